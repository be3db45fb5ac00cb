"""What left a site, for people: the cells of a table, and CSV that no spreadsheet executes."""

import csv
import io
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from federation.text import counted, escaped
from fedpareto.formatting import UNKNOWN, number, size
from worker.ledgers.left_ledger import LeftState
from worker.ledgers.left_reading import MAX_PAGE, LeftReply, LeftRow, read_left

COLUMNS = ("run", "time", "round", "work", "bytes", "numbers", "outcome", "coefficient")
CSV_COLUMNS = (
    *("kept", "run", "round", "attempt", "task", "work", "private", "phases", "bytes", "numbers", "values", "rows"),
    *("tries", "state", "reason", "ended", "weight", "coefficient", "told_by", "assignments", "replies", "receipts"),
)
SHOWN = 6  # values in a cell of the table
# Excel, LibreOffice and others take a cell that begins with one of these for a formula; the second four are full-width.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_WORDS = {LeftState.KEPT: "kept, may have left", LeftState.SENT: "sent, no receipt yet"}


def cells(row: LeftRow) -> dict[str, str]:
    """The cells of a row by `COLUMNS`, without control characters."""
    first = row.first
    again = f" attempt {first.attempt + 1}" if first.attempt else ""
    told = UNKNOWN if row.coefficient is None else number(row.coefficient, 6)
    place = (escaped(first.run, 80), local_time(first.kept), f"{first.round}{again}")
    texts = (*place, work(row), size(row.bytes), numbers(row), outcome(row), told)
    return {name: escaped(text) for name, text in zip(COLUMNS, texts, strict=True)}


def work(row: LeftRow) -> str:
    """The kind of work in words, such as "train" or "private train, 6 phases"."""
    if not row.private:
        return row.work
    return f"private {row.work or 'round'}, {counted(len(row.replies), 'phase')}"


def numbers(row: LeftRow) -> str:
    """The numbers sent, in words: those of the payloads as a count, and the first others with their values."""
    told = {name: value for reply in row.replies for name, value in reply.numbers.items()}
    rows = sum(reply.row_numbers for reply in row.replies)
    parts = [f"{escaped(name, 80)} {value:g}" for name, value in list(told.items())[:SHOWN]]
    more = row.numbers - rows - len(parts)
    parts += [f"{more} more"] if more > 0 else []
    return ", ".join([*([f"{counted(rows, 'number')} in the payload"] if rows else []), *parts]) or "no numbers"


def outcome(row: LeftRow) -> str:
    """What is known of a row, in words."""
    tries = max(reply.tries for reply in row.replies)
    state, reason = row.telling.state, f": {row.telling.reason}" if row.telling.reason else ""
    return f"{_WORDS.get(state, state)}{reason}{f' ({tries} tries)' if tries > 1 else ''}"


def csv_text(path: Path, run: str = "", last: int | None = None) -> Iterator[str]:
    """The ledger at `path` as CSV, a part at a time: its head, and its rows, newest first; all, or the `last` ones.

    Raises:
        WorkerHomeError, OSError: see `read_left`.
    """
    yield _line(CSV_COLUMNS)
    before, left = None, last
    while left is None or left > 0:
        page = read_left(path, run=run, before=before, limit=MAX_PAGE if left is None else left)
        yield "".join(_line(_csv_cells(row)) for row in page.rows)
        if (before := page.before) is None:
            return
        left = None if left is None else left - len(page.rows)


def _csv_cells(row: LeftRow) -> tuple[object, ...]:
    first, replies = row.first, row.replies
    values = [f"{name}={value!r}" for reply in replies for name, value in reply.numbers.items()]
    rows = [f"{name} {dtype} {length}" for reply in replies for name, dtype, length in reply.rows]
    weight = next((reply.weight for reply in replies if reply.weight is not None), None)
    told_by = next((reply.told_by for reply in replies if reply.told_by), "")
    return (
        *(first.kept, first.run, first.round, first.attempt, first.task, row.work, "yes" if row.private else "no"),
        *(len(replies), row.bytes, row.numbers, "; ".join(values), "; ".join(rows)),
        *(sum(reply.tries for reply in replies), row.telling.state, row.telling.reason, row.telling.ended, weight),
        *(
            row.coefficient,
            told_by,
            _joined(replies, "assignment"),
            _joined(replies, "reply"),
            _joined(replies, "receipt"),
        ),
    )


def _joined(replies: tuple[LeftReply, ...], name: str) -> str:
    return "; ".join(text for reply in replies if (text := getattr(reply, name)))


def _line(values: tuple[object, ...]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([_harmless(value) for value in values])
    return text.getvalue()


def _harmless(value: object) -> object:
    """A cell that no spreadsheet takes for a formula; numbers are none."""
    if not isinstance(value, str):
        return value
    text = escaped(str(value), 10_000)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def local_time(text: str) -> str:
    """A time, ISO 8601, in the local zone."""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M")
