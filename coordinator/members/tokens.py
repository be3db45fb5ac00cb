"""One-time tokens, each the secret of a join string: made, listed, cancelled. Functions of a session."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from federation.identity import check_name
from federation.join_string import secret_hash
from federation.keys import IdentityError
from federation.refusals import Refusal
from storage import audit
from storage.models import Client, EnrollmentToken


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


def tokens(session: Session, *, every: bool, now: datetime, start: int, count: int) -> Sequence[EnrollmentToken]:
    """Tokens, newest first.

    Args:
        session: where to read.
        every: those that were used, cancelled or have expired, too.
        now: the time.
        start: how many are left out.
        count: at most so many.
    """
    query = select(EnrollmentToken).order_by(EnrollmentToken.created.desc(), EnrollmentToken.secret_hash)
    if not every:
        query = query.where(
            EnrollmentToken.used.is_(None), EnrollmentToken.cancelled.is_(None), EnrollmentToken.expires > now
        )
    return session.scalars(query.offset(start).limit(count)).all()


def cancel_tokens(session: Session, client_id: str, *, by: str, now: datetime) -> Sequence[EnrollmentToken]:
    """Ends the open tokens of a client to be.

    Raises:
        Refusal: `token-unknown`: there is none.
    """
    cancelled = session.scalars(
        update(EnrollmentToken)
        .where(
            EnrollmentToken.client_id == client_id,
            EnrollmentToken.used.is_(None),
            EnrollmentToken.cancelled.is_(None),
            EnrollmentToken.expires > now,
        )
        .values(cancelled=now)
        .returning(EnrollmentToken)
    ).all()
    if not cancelled:
        raise Refusal(
            "token-unknown", f"there is no open join string of {client_id[:63]!r}; `fedpareto admin tokens` lists them"
        )
    audit.record(
        session, at=now, actor=by, action="token.cancelled", subject=client_id, detail=f"{len(cancelled)} of them"
    )
    return cancelled
