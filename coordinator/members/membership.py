"""Membership: one-time tokens, approval, revocation. Functions of a session; the caller tells whoever must know."""

from datetime import datetime

from sqlalchemy import update
from sqlalchemy.orm import Session

from coordinator.rounds.states import move_client
from coordinator.services.finding import must_be_client
from federation.identity import IdentityError, check_name, secret_hash
from federation.refusals import Refusal
from storage import audit
from storage.models import Certificate, Client, ClientState, EnrollmentToken


def create_token(session: Session, client_id: str, secret: bytes, *, by: str, now: datetime, expires: datetime) -> None:
    """Records a one-time token for a client to be; only the hash of its secret is kept.

    Raises:
        Refusal: `argument`: not a name for a client; `client-exists`.
    """
    try:
        check_name(client_id, "client")
    except IdentityError as error:
        raise Refusal("argument", str(error)) from None
    if session.get(Client, client_id) is not None:
        raise Refusal("client-exists", f"there is a client {client_id!r} already; a name is never given twice")
    session.add(
        EnrollmentToken(
            secret_hash=secret_hash(secret),
            client_id=client_id,
            created_by=by,
            created=now,
            expires=expires,
        )
    )
    audit.record(session, at=now, actor=by, action="token.created", subject=client_id)


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
