"""The ledger of what left the site: an entry for each reply, on the disk before the reply leaves this machine.

An entry has the numbers that the coordinator can read in the reply, and is completed by the receipt. Beside the entries
are the declines of assignments, counted by reason. It is the owner's own record; unlike `receipts.jsonl`, no other
member is given it. `worker.ledgers.left_reading` reads it.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.v1.secure_pb2 import SecureMaskWork, SecureReadyWork, SecureStatement, SecureTerms
from federation.work.secure.terms import SessionStage
from worker.ledgers.ledger_file import LedgerFile

MAX_VALUES = 100  # of the numbers and of the rows of one reply that are kept; the others are counted
MAX_REASONS = 200  # of declines, counted one by one; declines for further reasons are counted together
OTHER_REASONS = "others"
MAX_PHASES = 50  # of one private session that are one row of the reading; further ones begin another row
MAX_MESSAGE = 1000  # characters of the message of a decline
ADVICE = "move it away; what left before then stands in receipts.jsonl alone"
MIGRATIONS = (
    (
        """
        CREATE TABLE replies (
            entry INTEGER PRIMARY KEY, part_of INTEGER NOT NULL, reply TEXT NOT NULL UNIQUE, kept TEXT NOT NULL,
            run TEXT NOT NULL, round INTEGER NOT NULL, phase INTEGER NOT NULL, attempt INTEGER NOT NULL,
            task TEXT NOT NULL, kind TEXT NOT NULL, work TEXT NOT NULL, session TEXT NOT NULL,
            assignment TEXT NOT NULL, payload TEXT NOT NULL, payload_bytes INTEGER NOT NULL,
            message_bytes INTEGER NOT NULL, numbers TEXT NOT NULL, more_numbers INTEGER NOT NULL, rows TEXT NOT NULL,
            more_rows INTEGER NOT NULL, row_numbers INTEGER NOT NULL, tries INTEGER NOT NULL DEFAULT 1,
            state TEXT NOT NULL DEFAULT 'kept', ended TEXT NOT NULL DEFAULT '', receipt TEXT NOT NULL DEFAULT '',
            reason TEXT NOT NULL DEFAULT '', weight REAL, coefficient REAL, told_by TEXT NOT NULL DEFAULT ''
        )
        """,
        "CREATE INDEX by_row ON replies (part_of)",
        "CREATE INDEX by_run ON replies (run, part_of)",
        "CREATE INDEX by_assignment ON replies (assignment)",
        "CREATE INDEX by_session ON replies (session) WHERE session != ''",
    ),
    (
        """
        CREATE TABLE declines (
            reason TEXT PRIMARY KEY, count INTEGER NOT NULL, first TEXT NOT NULL, last TEXT NOT NULL,
            run TEXT NOT NULL, assignment TEXT NOT NULL, message TEXT NOT NULL
        ) WITHOUT ROWID
        """,
    ),
)
_UNIT = 2.0**-32  # of the coefficients of a private round


class LeftState(StrEnum):
    """What is known of a reply."""

    KEPT = "kept"  # it is on record here; it may have left, and no answer is known
    SENT = "sent"  # the coordinator has answered, without a receipt
    ACCEPTED = "accepted"  # a receipt says that it counts
    REFUSED = "refused"  # a receipt says that it does not count
    DROPPED = "dropped"  # the coordinator refused it for good, without a receipt
    DECLINED = "declined"  # the same, and the worker declined the assignment
    CANCELLED = "cancelled"  # it was no longer wanted before a receipt came


class ToldBy(StrEnum):
    """Who named a coefficient."""

    ORDER = "order"  # the coordinator's signed order for the masked vector of a private round
    ANSWER = "answer"  # the coordinator's signed answer to `worker model`


@dataclass(frozen=True)
class ReplyShare:
    """Weight and coefficient of a reply in its step, NaN where it has none; `reply` is the digest of its envelope."""

    reply: str
    weight: float
    coefficient: float


class LeftLedger:
    """The ledger in the file `path`, made when it is missing. Any thread and any process may use it.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """

    def __init__(self, path: Path) -> None:
        self._file = LedgerFile(path, MIGRATIONS, ADVICE)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def keep(self, envelope: SignedEnvelope, assignment: SignedEnvelope, at: datetime) -> None:
        """Records that a reply is about to be sent, for the first time or once more; it is on the disk afterwards.

        Raises:
            OSError: it cannot be written. The reply must not leave then.
        """
        values = _entry(envelope, assignment, at)
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        with self._file.using() as connection:
            # One statement: it is one transaction, and syncs the disk once.
            connection.execute(
                f"""
                INSERT INTO replies (part_of, {columns})
                SELECT ifnull(
                    (SELECT part_of FROM replies WHERE session = :session AND session != '' GROUP BY part_of
                     HAVING count(*) < {MAX_PHASES} ORDER BY part_of DESC LIMIT 1),
                    (SELECT ifnull(max(entry), 0) + 1 FROM replies)
                ), {marks} WHERE true
                ON CONFLICT (reply) DO UPDATE SET tries = tries + 1
                """,  # noqa: S608 - our own names
                values,
            )

    def answered(self, reply: str) -> None:
        """Records that the coordinator has answered to a reply, named by its digest, without a receipt."""
        with self._file.using() as connection:
            connection.execute(
                "UPDATE replies SET state = ? WHERE reply = ? AND state = ?", (LeftState.SENT, reply, LeftState.KEPT)
            )

    def acknowledge(self, receipt: SignedEnvelope, manifest: ReceiptManifest) -> None:
        """Completes an entry by a verified receipt; the newest receipt for a reply counts. Raises OSError."""
        state = LeftState.ACCEPTED if manifest.accepted else LeftState.REFUSED
        values = (state, _time(manifest), envelope_digest(receipt), manifest.reason, manifest.envelope)
        with self._file.using() as connection:
            connection.execute(
                "UPDATE replies SET state = ?, ended = ?, receipt = ?, reason = ? WHERE reply = ?", values
            )

    def end(self, assignment: str, state: LeftState, reason: str, at: datetime) -> None:
        """Completes the entries of an assignment that have no receipt, and will get none. Raises OSError."""
        with self._file.using() as connection:
            connection.execute(
                "UPDATE replies SET state = ?, ended = ?, reason = ? WHERE assignment = ? AND receipt = ''",
                (state, at.isoformat(), reason, assignment),
            )

    def decline(self, reason: str, message: str, *, run: str, assignment: str, at: datetime) -> None:
        """Counts a decline of an assignment; not if it repeats the last one for its reason. Raises OSError.

        `message` is for the owner; `run` is empty if the assignment was not the coordinator's.
        """
        with self._file.together() as connection:
            known = connection.execute("SELECT reason FROM declines").fetchall()
            counted = reason if (reason,) in known or len(known) < MAX_REASONS else OTHER_REASONS
            connection.execute(
                """
                INSERT INTO declines VALUES (?1, 1, ?2, ?2, ?3, ?4, ?5) ON CONFLICT (reason) DO UPDATE SET
                    count = count + (assignment != ?4), last = ?2, run = ?3, assignment = ?4, message = ?5
                """,
                (counted, at.isoformat(), run, assignment, message[:MAX_MESSAGE]),
            )

    def learn(self, shares: Iterable[ReplyShare]) -> None:
        """Fills in weights and coefficients that the coordinator has told, all or none. Raises OSError."""
        told = [(_real(share.weight), _real(share.coefficient), share.reply) for share in shares]
        with self._file.together() as connection:
            connection.executemany(
                f"""
                UPDATE replies SET weight = ifnull(?1, weight), told_by = iif(?2 IS NULL, told_by, '{ToldBy.ANSWER}'),
                    coefficient = ifnull(?2, coefficient)
                WHERE reply = ?3 AND (weight IS NOT ?1 OR coefficient IS NOT ?2)
                """,  # noqa: S608 - our own
                told,
            )


def _entry(envelope: SignedEnvelope, assignment: SignedEnvelope, at: datetime) -> Mapping[str, Any]:
    """The columns of a new entry, by name, without those of the answer."""
    reply = ReplyManifest.FromString(envelope.manifest)
    order = AssignmentManifest.FromString(assignment.manifest)
    session, work, coefficient = _private(order, reply)
    numbers = _numbers(reply)
    shown = dict(islice(numbers.items(), MAX_VALUES))
    rows = [[row.name, row.dtype, row.length] for row in islice(reply.rows, MAX_VALUES)]
    return {
        "reply": envelope_digest(envelope),
        "kept": at.isoformat(),
        "run": reply.run_id,
        "round": reply.round,
        "phase": reply.phase,
        "attempt": reply.attempt,
        "task": reply.task,
        "kind": order.kind,
        "work": work,
        "session": session,
        "assignment": reply.assignment_id,
        "payload": reply.payload,
        "payload_bytes": reply.payload_bytes,
        "message_bytes": envelope.ByteSize(),
        "numbers": json.dumps(shown),
        "more_numbers": len(numbers) - len(shown),
        "rows": json.dumps(rows),
        "more_rows": len(reply.rows) - len(rows),
        "row_numbers": sum(row.length for row in reply.rows),
        "coefficient": coefficient,
        "told_by": "" if coefficient is None else ToldBy.ORDER,
    }


def _numbers(reply: ReplyManifest) -> dict[str, float]:
    """The numbers of the signed message, by name: everything in it that was measured or chosen at this site."""
    numbers: dict[str, float] = {"samples": reply.samples} if reply.samples else {}
    numbers |= {"seconds": reply.seconds} if reply.seconds else {}
    numbers |= {f"losses/{name}": reply.losses[name] for name in sorted(reply.losses)}
    numbers |= {name: reply.metrics[name] for name in sorted(reply.metrics)}
    if reply.HasField("privacy"):
        numbers |= {f"noise/{field.name}": value for field, value in reply.privacy.ListFields()}
    return numbers


def _private(order: AssignmentManifest, reply: ReplyManifest) -> tuple[str, str, float | None]:
    """The session of a phase of a private round, its work where the phase names it, and the coefficient asked for.

    Empty and None for other work, and for messages that cannot be read.
    """
    if order.kind not in set(SessionStage):
        return "", "", None
    try:
        session = SecureStatement.FromString(reply.statement).session.hex()
        if order.kind == SessionStage.READY:
            terms = SecureTerms.FromString(SecureReadyWork.FromString(order.work).terms)
            return session, terms.WhichOneof("work") or "", None
        if order.kind == SessionStage.MASK:
            mask = SecureMaskWork.FromString(order.work)
            asked = dict(zip(mask.members, mask.coefficients, strict=False)).get(reply.client_id)
            return session, "", None if asked is None else asked * _UNIT
    except DecodeError:
        return "", "", None
    return session, "", None


def _time(manifest: ReceiptManifest) -> str:
    try:
        return manifest.created.ToDatetime(tzinfo=UTC).isoformat() if manifest.HasField("created") else ""
    except (ValueError, OverflowError):  # a time that does not exist; the signed bytes have it
        return ""


def _real(value: float) -> float | None:
    return value if math.isfinite(value) else None
