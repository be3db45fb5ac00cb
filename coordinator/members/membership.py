"""Membership: approval and revocation. Functions of a session; the caller notifies workers and watchers."""

from datetime import datetime

from sqlalchemy import update
from sqlalchemy.orm import Session

from coordinator.finding import must_be_client
from coordinator.rounds.states import move_client
from storage import audit
from storage.models import Certificate, Client, ClientState


def approve(session: Session, client_id: str, *, by: str, now: datetime) -> None:
    """Lets a pending client work.

    Raises:
        Refusal: `client-unknown`, `client-state`.
    """
    client = _get(session, client_id)
    move_client(client, ClientState.ACTIVE)
    audit.record(session, at=now, actor=by, action="client.approved", subject=client_id)


def revoke(session: Session, client_id: str, reason: str, *, by: str, now: datetime) -> None:
    """Shuts a client and its certificates out, for good. What it has contributed stays in the record.

    Raises:
        Refusal: `client-unknown`, `client-state`: it is revoked already.
    """
    client = _get(session, client_id)
    move_client(client, ClientState.REVOKED)
    client.revoked = now
    client.revoked_reason = reason
    session.execute(
        update(Certificate).where(Certificate.client_id == client_id, Certificate.revoked.is_(None)).values(revoked=now)
    )
    audit.record(session, at=now, actor=by, action="client.revoked", subject=client_id, detail=reason)


def _get(session: Session, client_id: str) -> Client:
    must_be_client(session, client_id)
    return session.get_one(Client, client_id, with_for_update=True, populate_existing=True)
