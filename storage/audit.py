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
    """Records an event in the transaction of `session`.

    A refusal with the actor, action and reason of a row begun less than a minute before adds to `times` of that row,
    so repeated refusals add at most one row per minute. Text is cut and cleaned (`storage.models.Prose`).

    Args:
        session: an open transaction.
        at: the time, aware.
        actor: the SAN URI of the caller's certificate, "peer <address>" without the port, or "coordinator".
        action: an rpc ("Submit") or an event ("run.completed").
        subject: what it was about: a run, a client, an assignment.
        outcome: the reason of the refusal; empty for success.
        detail: anything else; no secret.
        times: how often it happened.
    """
    begun = None
    if outcome:
        begun = session.scalar(
            select(AuditEntry.entry_id)
            .filter_by(actor=actor, action=action, outcome=outcome)
            .where(AuditEntry.at > at - MERGE_WINDOW, AuditEntry.at <= at)
            .order_by(AuditEntry.entry_id.desc())
            .limit(1)
        )
    if begun is not None:
        session.execute(update(AuditEntry).where(AuditEntry.entry_id == begun).values(times=AuditEntry.times + times))
        return
    session.add(
        AuditEntry(at=at, actor=actor, action=action, subject=subject, outcome=outcome, detail=detail, times=times)
    )
    session.flush()
