"""The audit log: the actions of all parties, and every refusal.

An entry is recorded in the same transaction as the fact that it tells, so that neither exists without the other. One
sequencer gives entries their place in the log afterwards: concurrent transactions do not wait for each other, ids of
rows that were rolled back leave no gap, and the next process chains the entries of one that died.

Until then, a message authentication code (MAC, the column `tag`) protects an entry: a keyed hash that only processes
with the coordinator's directory can compute. A row that anybody else has inserted or changed in the database has no
valid MAC.
"""

import hmac
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from blake3 import blake3
from sqlalchemy import ColumnElement, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from federation.record import joinings
from federation.record.log_entries import EPOCH, FIRST, LogEntry
from federation.record.log_kinds import KINDS, REFUSALS
from storage.columns import Prose, cleaned
from storage.database import ENTRY_KEY
from storage.models import AuditEntry

# Actions whose entries are compared with rows of the record; those of envelopes are in `federation.record.log_entries`.
ENROLLED, ROTATED = joinings.ENROLLED, joinings.ROTATED
JOIN_CREATED = "join-string.created"
JOIN_CANCELLED = "join-string.cancelled"
TAMPERED = "log.tampered"
CONFIGURED = "configuration.set"
KEY_SET = "key.set"

_NONCE_BYTES = 16
_LEAVES_AT_A_TIME = 4096
_MICROSECOND = timedelta(microseconds=1)
_INSERT = insert(AuditEntry)
_PROSE = {column.name: column.type.length for column in AuditEntry.__table__.columns if isinstance(column.type, Prose)}
_SEARCHED = (AuditEntry.actor, AuditEntry.action, AuditEntry.subject, AuditEntry.outcome, AuditEntry.detail)
_COLUMNS = (
    AuditEntry.entry_id,
    AuditEntry.at,
    AuditEntry.actor,
    AuditEntry.action,
    AuditEntry.subject,
    AuditEntry.outcome,
    AuditEntry.detail,
    AuditEntry.digest,
    AuditEntry.times,
)
# Built once, since the sequencer runs them for each batch: the entries without a place in the log, one of them, and the
# MACs that they share with entries that have one.
_UNCHAINED = select(*_COLUMNS, AuditEntry.tag).where(AuditEntry.number.is_(None)).order_by(AuditEntry.entry_id)
_ONE_UNCHAINED = select(AuditEntry.entry_id).where(AuditEntry.number.is_(None)).limit(1)
_USED_MACS = select(AuditEntry.tag).where(
    AuditEntry.number.is_not(None),
    AuditEntry.tag.in_(select(AuditEntry.tag).where(AuditEntry.number.is_(None))),
)
_CHAIN = (
    update(AuditEntry.__table__)  # type: ignore[arg-type]  # a Table, which the ORM calls a FromClause
    .where(AuditEntry.entry_id == bindparam("row"))
    .values(number=bindparam("place"), leaf=bindparam("hash"))
)
_NEWEST_DIGEST = (
    select(AuditEntry.digest)
    .where(AuditEntry.action == bindparam("action"), AuditEntry.subject == bindparam("subject"))
    .order_by(AuditEntry.entry_id.desc())
    .limit(1)
)


def record(
    session: Session,
    *,
    at: datetime,
    actor: str,
    action: str,
    subject: str = "",
    outcome: str = "",
    detail: str = "",
    digest: str = "",
    times: int = 1,
) -> None:
    """Records an event in the transaction of `session`. Text is cut and cleaned (`storage.models.Prose`).

    Args:
        session: an open transaction.
        at: the time, aware.
        actor: the SAN URI of the caller's certificate, "peer <address>" without the port, or "coordinator".
        action: an rpc ("Submit") or an event ("run.completed").
        subject: of the event: a run, a client, an assignment.
        outcome: the reason of the refusal; empty for success.
        detail: anything else; never a secret.
        digest: of the envelope or object that the entry is about.
        times: the number of times that it happened.
    """
    event = LogEvent(at, actor, action, subject, outcome, detail, digest, times)
    record_all(session, [event])


class LogEvent(NamedTuple):
    """An event to record; the fields are the arguments of `record`."""

    at: datetime
    actor: str
    action: str
    subject: str = ""
    outcome: str = ""
    detail: str = ""
    digest: str = ""
    times: int = 1


def record_all(session: Session, events: Iterable[LogEvent]) -> None:
    """Records events in the transaction of `session`, in one statement; see `record`."""
    # Not as objects of the session: each reply records some entries, and its transaction never reads them.
    session.connection().execute(_INSERT, [_values(session, event) for event in events])


def _values(session: Session, event: LogEvent) -> dict[str, Any]:
    values = event._asdict()
    if (key := session.info.get(ENTRY_KEY)) is not None:
        texts = {name: cleaned(str(values[name]), length) for name, length in _PROSE.items()}
        entry = LogEntry(number=0, entry_id=0, at=event.at, digest=event.digest, times=event.times, **texts)
        # The nonces of later entries are larger, so that their index grows at its end.
        nonce = struct.pack(">q", (event.at - EPOCH) // _MICROSECOND) + secrets.token_bytes(_NONCE_BYTES - 8)
        values["tag"] = _mac(key, nonce, entry)
    return values


def _mac(key: bytes, nonce: bytes, entry: LogEntry) -> bytes:
    """The MAC of an entry without number and row id: both are 0. The nonce makes the MACs of equal entries differ."""
    return nonce + blake3(nonce + entry.encode(FIRST), key=key).digest()


def has_mac(entry: LogEntry, mac: bytes, key: bytes) -> bool:
    """True if a MAC belongs to this entry and key."""
    expected = _mac(key, mac[:_NONCE_BYTES], replace(entry, number=0, entry_id=0))
    return hmac.compare_digest(expected, mac)


def unchained(session: Session, limit: int | None = None) -> list[tuple[LogEntry, bytes]]:
    """The entries without a place in the log and their MACs, in the order of their rows, at most `limit`.

    Their numbers are 0.
    """
    entries = []
    for row in session.connection().execute(_UNCHAINED.limit(limit)).mappings():
        values = dict(row)
        mac = values.pop("tag") or b""
        entries.append((LogEntry(number=0, **values), mac))
    return entries


def waiting(session: Session, key: bytes) -> list[LogEntry]:
    """The entries without a place in the log with a MAC by a key, in the order of their rows."""
    used = used_macs(session)
    return [entry for entry, mac in unchained(session) if mac not in used and has_mac(entry, mac, key)]


def used_macs(session: Session) -> set[bytes]:
    """The MACs that an entry without a place shares with an entry that has one: these rows were copied."""
    return {mac for mac in session.connection().scalars(_USED_MACS) if mac is not None}


def remove(session: Session, entry_id: int) -> None:
    """Removes the row of an entry without a place in the log."""
    session.execute(delete(AuditEntry).where(AuditEntry.entry_id == entry_id, AuditEntry.number.is_(None)))


def any_unchained(session: Session) -> bool:
    """True if an entry has no place in the log yet."""
    return session.connection().scalar(_ONE_UNCHAINED) is not None


def chain(session: Session, leaves: Sequence[tuple[int, int, bytes]]) -> None:
    """Records the places of entries, each given as the id of its row, its number, and its leaf."""
    session.connection().execute(_CHAIN, [{"row": row, "place": place, "hash": leaf} for row, place, leaf in leaves])


def newest_time(session: Session) -> datetime | None:
    """The latest time of an entry, aware; None without entries."""
    return session.scalar(select(func.max(AuditEntry.at)))


def last_time(session: Session) -> datetime | None:
    """The time of the entry that was recorded last, aware; None without entries."""
    return session.scalar(select(AuditEntry.at).order_by(AuditEntry.entry_id.desc()).limit(1))


def newest_digest(session: Session, action: str, subject: str) -> str | None:
    """The digest in the newest entry of an action about a subject; None if there is no such entry."""
    return session.connection().scalar(_NEWEST_DIGEST, {"action": action, "subject": subject})


def has_digest(session: Session, action: str, subject: str, digest: str) -> bool:
    """True if there is an entry of an action about a subject with this digest."""
    where = AuditEntry.action == action, AuditEntry.subject == subject, AuditEntry.digest == digest
    return session.scalar(select(AuditEntry.entry_id).where(*where).limit(1)) is not None


def size(session: Session) -> int:
    """The number of entries that have a place in the log."""
    last = session.scalar(select(func.max(AuditEntry.number)))
    return 0 if last is None else last + 1


@dataclass(frozen=True)
class ChainedEntry:
    """An entry that has a place in the log, with its leaf and its MAC as they are stored."""

    entry: LogEntry
    leaf: bytes
    mac: bytes


def chained(
    session: Session, start: int, limit: int, *, since: datetime | None = None, actor: str = "", kind: str = ""
) -> Sequence[ChainedEntry]:
    """The entries from a number on, in order, at most `limit`.

    Args:
        session: reads.
        start: the number of the first one.
        limit: the largest number of entries.
        since: leaves out earlier entries.
        actor: leaves out the entries of others; a name stands for the member or administrator with this name.
        kind: leaves out other kinds than this one of `KINDS`.
    """
    return chained_where(session, AuditEntry.number >= start, *_of(since, actor, kind), limit=limit)


def newest(
    session: Session,
    limit: int,
    before: int | None,
    *,
    since: datetime | None = None,
    actor: str = "",
    text: str = "",
    kind: str = "",
) -> Sequence[ChainedEntry]:
    """The newest entries, the newest first, at most `limit`; `since`, `actor` and `kind` as for `chained`.

    Args:
        session: reads.
        limit: the largest number of entries.
        before: leaves out the entry of this number and later ones; None for none.
        since: leaves out earlier entries.
        actor: leaves out the entries of others.
        text: leaves out entries that have it in none of their texts, in any case.
        kind: leaves out other kinds.
    """
    conditions = [*_of(since, actor, kind)]
    if before is not None:
        conditions.append(AuditEntry.number < before)
    if text:
        conditions.append(or_(*(column.icontains(text, autoescape=True) for column in _SEARCHED)))
    return chained_where(session, *conditions, limit=limit, newest_first=True)


def _of(since: datetime | None, actor: str, kind: str) -> Iterator[ColumnElement[bool]]:
    if since is not None:
        yield AuditEntry.at >= since
    if actor:
        yield or_(AuditEntry.actor == actor, AuditEntry.actor.endswith(f"/{actor}", autoescape=True))
    if kind == REFUSALS:
        yield AuditEntry.outcome != ""
    elif kind:
        yield or_(*map(_is, KINDS[kind]))


def _is(action: str) -> ColumnElement[bool]:
    """That an entry has an action, as `KINDS` names it."""
    if action.endswith("."):
        return AuditEntry.action.startswith(action, autoescape=True)
    if action.startswith("."):
        return AuditEntry.action.endswith(action, autoescape=True)
    return AuditEntry.action == action


def chained_where(
    session: Session, *conditions: ColumnElement[bool], limit: int | None = None, newest_first: bool = False
) -> Sequence[ChainedEntry]:
    """The entries with a place in the log that meet the conditions, in order, at most `limit`."""
    columns = (*_COLUMNS, AuditEntry.number, AuditEntry.leaf, AuditEntry.tag)
    rows = select(*columns).where(AuditEntry.number.is_not(None), *conditions)
    order = AuditEntry.number.desc() if newest_first else AuditEntry.number
    entries = []
    for row in session.execute(rows.order_by(order).limit(limit)).mappings():
        values = dict(row)
        leaf, mac = values.pop("leaf") or b"", values.pop("tag") or b""
        entries.append(ChainedEntry(LogEntry(**values), leaf, mac))
    return entries


def newest_number(session: Session, action: str, subject: str) -> int | None:
    """The number of the newest entry of an action about a subject; None if none has a place in the log."""
    rows = select(func.max(AuditEntry.number)).where(AuditEntry.action == action, AuditEntry.subject == subject)
    return session.scalar(rows)


def numbers(session: Session, start: int, limit: int) -> Sequence[int]:
    """The numbers of the entries from one on, in order, at most `limit`."""
    rows = select(AuditEntry.number).where(AuditEntry.number >= start).order_by(AuditEntry.number).limit(limit)
    return [number for number in session.scalars(rows) if number is not None]


def chained_leaves(session: Session, start: int, stop: int) -> Sequence[bytes]:
    """The leaves of the entries from one number up to another, in order; fewer at the end of the log, or with gaps."""
    rows = select(AuditEntry.leaf).where(AuditEntry.number >= start, AuditEntry.number < stop)
    return [leaf or b"" for leaf in session.scalars(rows.order_by(AuditEntry.number))]


def read_leaves(session: Session, start: int, stop: int) -> Iterator[bytes]:
    """Reads the leaves that `chained_leaves` returns, some at a time."""
    for first in range(start, stop, _LEAVES_AT_A_TIME):
        yield from chained_leaves(session, first, min(first + _LEAVES_AT_A_TIME, stop))
