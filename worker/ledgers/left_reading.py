"""Reads the ledger of what left a site, a page at a time, also while a worker runs; it takes no lock of the worker."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.ledgers.ledger_file import LedgerFile
from worker.ledgers.left_ledger import ADVICE, MIGRATIONS, LeftState

PAGE = 100  # rows
MAX_PAGE = 1000
_LONGEST_RECEIPT = 1 << 20  # bytes of a line of receipts.jsonl
_COLUMNS = (
    "entry, reply, kept, run, round, phase, attempt, task, kind, work, session, assignment, payload, payload_bytes, "
    "message_bytes, numbers, more_numbers, rows, more_rows, row_numbers, tries, state, ended, receipt, reason, weight, "
    "coefficient, told_by"
)


@dataclass(frozen=True, kw_only=True)
class LeftReply:
    """One reply, as it was signed, and what is known of it. Names and reasons are as others gave them: not escaped.

    Attributes:
        entry: the number of the entry.
        reply: the digest of its envelope.
        kept: when it was first about to be sent, ISO 8601, by the coordinator's clock.
        run, round, phase, attempt, task: of the assignment; rounds, phases and attempts count from 0.
        kind: of the work, such as "train" or "secure-mask".
        work: of a phase of a private session that names it: what its vector is made from; else empty.
        session: of a private round; else empty.
        assignment: the id of the assignment.
        payload, payload_bytes: the digest and the size of the payload; empty and 0 without one.
        message_bytes: the size of the signed message, which holds the numbers.
        numbers: the numbers in the message, by name; `more_numbers` others are only counted.
        rows: the name, the type and the length of each row of the payload; `more_rows` others are only counted.
        row_numbers: the numbers in the payload.
        tries: how often it was about to be sent; the coordinator counts it once.
        state: what is known of it.
        ended: the time of the receipt, or of the end without one; empty before it.
        receipt: the digest of the receipt; empty without one.
        reason: of a refusal, or of the end without a receipt.
        weight, coefficient: in the step; None while they are not known.
        told_by: who named the coefficient: "order" or "answer"; empty without one.
    """

    entry: int
    reply: str
    kept: str
    run: str
    round: int
    phase: int
    attempt: int
    task: str
    kind: str
    work: str
    session: str
    assignment: str
    payload: str
    payload_bytes: int
    message_bytes: int
    numbers: dict[str, float]
    more_numbers: int
    rows: tuple[tuple[str, str, int], ...]
    more_rows: int
    row_numbers: int
    tries: int
    state: LeftState
    ended: str
    receipt: str
    reason: str
    weight: float | None
    coefficient: float | None
    told_by: str


@dataclass(frozen=True)
class LeftRow:
    """One row of the reading: one reply, or the replies of a private session in the order in which they were kept."""

    number: int
    replies: tuple[LeftReply, ...]

    @property
    def first(self) -> LeftReply:
        """The first reply."""
        return self.replies[0]

    @property
    def last(self) -> LeftReply:
        """The newest reply."""
        return self.replies[-1]

    @property
    def telling(self) -> LeftReply:
        """The reply whose state is that of the row: the first one that is not accepted, or else the newest one."""
        return next((reply for reply in self.replies if reply.state is not LeftState.ACCEPTED), self.last)

    @property
    def private(self) -> bool:
        """True if it is a session of a private round."""
        return self.first.session != ""

    @property
    def work(self) -> str:
        """The kind of work: in a private session that of its vector, such as "train"; empty if no phase named it."""
        return next((reply.work for reply in self.replies if reply.work), "" if self.private else self.first.kind)

    @property
    def bytes(self) -> int:
        """The bytes of messages and payloads, each counted once."""
        return sum(reply.payload_bytes + reply.message_bytes for reply in self.replies)

    @property
    def numbers(self) -> int:
        """How many numbers the replies have, in messages and payloads."""
        return sum(len(reply.numbers) + reply.more_numbers + reply.row_numbers for reply in self.replies)

    @property
    def coefficient(self) -> float | None:
        """The coefficient in the step; None while it is not known."""
        return next((reply.coefficient for reply in self.replies if reply.coefficient is not None), None)


@dataclass(frozen=True)
class LeftPage:
    """A page of the reading, newest first. `before` asks for the next page; None if this is the last one."""

    rows: tuple[LeftRow, ...]
    before: int | None


def read_left(path: Path, *, run: str = "", before: int | None = None, limit: int | None = None) -> LeftPage:
    """The newest rows of the ledger at `path`; an empty page if there is no file.

    Args:
        path: `WorkerHome.left`.
        run: the id of a run, or the beginning of ids; empty for all runs.
        before: only rows before this number, which the page before has named.
        limit: the most rows, 1 to `MAX_PAGE`; None is `PAGE`.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile.reading`.
    """
    limit = max(1, min(PAGE if limit is None else limit, MAX_PAGE))
    clauses, values = ["part_of < ?"], list[Any]([2**63 - 1 if before is None else before])
    if run:
        clauses.append("run >= ? AND run < ?")  # by the index; no id has the last character of Unicode
        values += [run, run + chr(0x10FFFF)]
    with LedgerFile.reading(path, MIGRATIONS, ADVICE) as connection:
        if connection is None:
            return LeftPage((), None)
        chosen = f"SELECT DISTINCT part_of FROM replies WHERE {' AND '.join(clauses)} ORDER BY part_of DESC LIMIT ?"  # noqa: S608 - our own
        numbers = [number for (number,) in connection.execute(chosen, (*values, limit + 1))]
        shown = numbers[:limit]
        marks = ", ".join("?" * len(shown))
        found = connection.execute(
            f"SELECT part_of, {_COLUMNS} FROM replies WHERE part_of IN ({marks}) ORDER BY entry",  # noqa: S608 - our own
            shown,
        ).fetchall()
    replies: dict[int, list[LeftReply]] = {number: [] for number in shown}
    for number, *columns in found:
        replies[number].append(_reply(dict(zip(_COLUMNS.split(", "), columns, strict=True))))
    rows = tuple(LeftRow(number, tuple(replies[number])) for number in shown)
    return LeftPage(rows, shown[-1] if len(numbers) > limit else None)


@dataclass(frozen=True)
class CountedDeclines:
    """The declines of assignments for one reason. Names and messages are as others gave them: not escaped.

    Attributes:
        reason: as the coordinator was told; `OTHER_REASONS` for those that are counted together.
        count: how many there were.
        first, last: the times of the first and of the last one, ISO 8601, by the coordinator's clock.
        run, assignment, message: of the last one; the message is for the owner.
    """

    reason: str
    count: int
    first: str
    last: str
    run: str
    assignment: str
    message: str


def read_declines(path: Path) -> list[CountedDeclines]:
    """The declines that the ledger at `path` counts, the last one first. Errors are those of `read_left`."""
    with LedgerFile.reading(path, MIGRATIONS, ADVICE) as connection:
        if connection is None:
            return []
        query = "SELECT reason, count, first, last, run, assignment, message FROM declines ORDER BY last DESC, reason"
        return [CountedDeclines(*row) for row in connection.execute(query)]


def keeps(path: Path, reply: str) -> bool:
    """True if the ledger has the reply whose envelope has this digest. Errors are those of `read_left`."""
    with LedgerFile.reading(path, MIGRATIONS, ADVICE) as connection:
        if connection is None:
            return False
        return connection.execute("SELECT 1 FROM replies WHERE reply = ?", (reply,)).fetchone() is not None


def earlier_receipts(path: Path, receipts: Path) -> bool:
    """True if the first receipt of the file `receipts` is for a reply that the ledger at `path` does not have.

    Errors are those of `read_left`.
    """
    try:
        with receipts.open("rb") as file:
            first = file.readline(_LONGEST_RECEIPT)
        return bool(first) and not keeps(path, str(json.loads(first)["envelope"]))
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, RecursionError):  # damaged, which `worker receipts` reports
        return True


def _reply(columns: dict[str, Any]) -> LeftReply:
    columns["numbers"] = json.loads(columns["numbers"])
    columns["rows"] = tuple((name, dtype, length) for name, dtype, length in json.loads(columns["rows"]))
    columns["state"] = LeftState(columns["state"])
    return LeftReply(**columns)
