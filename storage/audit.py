"""The audit log: who did what, and every refusal."""

from datetime import datetime, timedelta

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from storage.models import AuditEntry

MERGE_WINDOW = timedelta(minutes=1)


def record(
    session: Session,
    *,
    at: datetime,
    actor: str,
    action: str,
    subject: str = "",
    outcome: str = "",
    detail: str = "",
    times: int = 1,
) -> None:
    """Writes down something that happened, in the transaction of `session`.

    A refusal that repeats one by the same actor, of the same action, for the same reason, less than a minute after the
    row of the first was begun, adds to `times` of that row and leaves the rest of it, subject and detail included,
    as the first had it: whoever hammers at the door fills one row a minute, not the disk. What went well is never
    merged. (Two transactions at once on PostgreSQL may each begin a row; both count.)

    Text of any kind and length is taken: it is cut to its column, and unprintable characters are replaced
    (`storage.models.Prose`).

    Args:
        session: an open transaction.
        at: when, with a time zone.
        actor: the SAN URI of the caller's certificate, "peer <address>" (the port left out, or nothing would ever be
            merged), or "coordinator".
        action: an rpc ("Submit") or an event ("run.completed").
        subject: what it was about: a run, a client, an assignment.
        outcome: empty when it went well, else the reason of the refusal.
        detail: anything else worth knowing; no secret.
        times: how often it happened, if the caller has counted.
    """
    if outcome and _repeated(session, at, actor, action, outcome, times):
        return
    session.add(
        AuditEntry(at=at, actor=actor, action=action, subject=subject, outcome=outcome, detail=detail, times=times)
    )
    session.flush()


def _repeated(session: Session, at: datetime, actor: str, action: str, outcome: str, times: int) -> bool:
    begun = session.scalar(
        select(AuditEntry.entry_id)
        .where(
            AuditEntry.actor == actor,
            AuditEntry.action == action,
            AuditEntry.outcome == outcome,
            AuditEntry.at > at - MERGE_WINDOW,
            AuditEntry.at <= at,
        )
        .order_by(AuditEntry.entry_id.desc())
        .limit(1)
    )
    if begun is None:
        return False
    session.execute(update(AuditEntry).where(AuditEntry.entry_id == begun).values(times=AuditEntry.times + times))
    return True
