"""The reasons of `reasons.toml`, by who says them: the coordinator, a worker, or a command that reads the record."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from federation.refusals import REASONS

REFUSED = "the coordinator, which refuses a request"
# Who says the reasons of a table of the file; those of all other tables are of refused requests.
_SAID_BY = {
    "assignments": "the coordinator, of an assignment that ended without a reply",
    "worker": "a worker, which declines an assignment or refuses a run",
    "envelopes": "`fedpareto admin round` and `replies`, of a signed envelope on record",
}
_REASON = re.compile(r"[a-z][a-z0-9-]*(:[\w<>-]+)?")


@dataclass(frozen=True)
class KnownReason:
    """What reasons mean where one party says them. Texts are in Markdown; links begin at docs/.

    Attributes:
        reasons: the reasons that have this meaning; one with a suffix in <> stands for all suffixes.
        said_by: who says it.
        status: the gRPC status of a refusal, or the state of an assignment; empty for others.
        means: what it means.
        remedy: what to do; empty for nothing.
    """

    reasons: tuple[str, ...]
    said_by: str
    status: str
    means: str
    remedy: str

    def has(self, reason: str) -> bool:
        """True if this is the meaning of a reason."""
        return any(re.fullmatch(re.sub("<[a-z]+>", ".+", known), reason) for known in self.reasons)


@cache
def by_table() -> dict[str, tuple[KnownReason, ...]]:
    """All meanings, by the table of the file that has them."""
    document = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))
    return {table: tuple(_known(table, *row) for row in rows.items()) for table, rows in document.items()}


def _known(table: str, names: str, row: dict[str, Any]) -> KnownReason:
    reasons, said_by = tuple(names.split(", ")), _SAID_BY.get(table, REFUSED)
    status = REASONS[reasons[0].partition(":")[0]] if said_by == REFUSED else row.get("state", "")
    means, remedy = (" ".join(str(row.get(key, "")).split()) for key in ("means", "remedy"))
    return KnownReason(reasons, said_by, status, means, remedy)


def known() -> Iterator[KnownReason]:
    """All meanings, in the order of the file."""
    for rows in by_table().values():
        yield from rows


def names() -> list[str]:
    """All reasons, each once."""
    return list(dict.fromkeys(reason for row in known() for reason in row.reasons))


def with_suffix(stem: str, said_by: str) -> list[str]:
    """The reasons of a party that are this one with a suffix."""
    rows = (row for row in known() if row.said_by == said_by)
    return [reason for row in rows for reason in row.reasons if reason.startswith(f"{stem}:")]


def meanings(text: str) -> list[KnownReason]:
    """What a reason means, of each party that says it; empty if nobody does.

    A message may follow the reason. A suffix that is not listed means what its stem means: "mismatch:round" is
    "mismatch". A stem that is not listed means what its suffixes mean.
    """
    found = _REASON.match(text.strip().strip("`"))
    reason = found[0] if found else ""
    exact = [row for row in known() if row.has(reason)]
    parties = {row.said_by for row in exact}
    stem = [row for row in known() if row.has(reason.partition(":")[0]) and row.said_by not in parties]
    return exact + stem or [row for row in known() if any(name.startswith(f"{reason}:") for name in row.reasons)]
