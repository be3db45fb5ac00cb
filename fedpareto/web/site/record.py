"""What left a site, from its receipts, a bounded part at a time. No signature is verified: `worker receipts` does."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from federation.text import escaped
from federation.trust.envelope import from_text
from federation.v1.common_pb2 import AssignmentManifest

ENTRIES = 100
_BLOCK = 1 << 18
_MOST = 8 << 20  # bytes that are read for one page
COLUMNS = ("time", "run", "round", "phase", "work", "bytes", "receipt")


@dataclass(frozen=True)
class LeftPage:
    """Rows of `COLUMNS`, the newest first; `older` is the place in the file where older ones end, 0 if none is."""

    rows: list[tuple[str, ...]]
    older: int


def left_page(path: Path, before: int | None) -> LeftPage:
    """The newest rows, or those before a place in the file. Raises OSError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2) if before is None else min(before, file.seek(0, 2))
            start, data = end, b""
            while start and data.count(b"\n") <= ENTRIES and end - start < _MOST:
                step = min(_BLOCK, start)
                start -= step
                file.seek(start)
                data = file.read(step) + data
    except FileNotFoundError:
        return LeftPage([], 0)
    lines = data.splitlines(keepends=True)
    if start and lines:
        start += len(lines.pop(0))  # it may begin before
    shown = lines[-ENTRIES:]
    older = end - sum(map(len, shown))
    return LeftPage([_row(line) for line in reversed(shown)], older if shown else 0)


def all_rows(path: Path) -> Iterator[tuple[str, ...]]:
    """All rows, the oldest first, one line of the file in memory at a time."""
    try:
        with path.open("rb") as file:
            for line in file:
                yield _row(line)
    except FileNotFoundError:
        return


def _row(line: bytes) -> tuple[str, ...]:
    try:
        found = json.loads(line)
        outcome = "accepted" if found["accepted"] else f"refused: {found['reason']}"
        values = (found["created"], found["run_id"], found["round"], found["phase"], _kind(found["assignment"]))
        return tuple(escaped(str(value)) for value in (*values, found["payload_bytes"], outcome))
    except (ValueError, KeyError, TypeError, RecursionError, DecodeError):
        return ("", "", "", "", "", "", "this line of receipts.jsonl is damaged")


def _kind(assignment: str) -> str:
    return str(AssignmentManifest.FromString(from_text(assignment).manifest).kind)
