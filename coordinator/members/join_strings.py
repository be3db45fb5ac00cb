"""Makes, lists and cancels join strings in a session of the database."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, select, update
from sqlalchemy.orm import Session

from coordinator.lookup import check_client
from coordinator.members.logged_rights import join_string_digest
from coordinator.members.membership import check_not_revoked
from federation.refusals import Refusal
from federation.trust.identity import check_name
from federation.trust.join_string import secret_hash
from federation.trust.keys import IdentityError
from storage import audit
from storage.models import Client, JoinString


def create_join_string(
    session: Session,
    client_id: str,
    secret: bytes,
    *,
    again: bool = False,
    by: str,
    now: datetime,
    expires: datetime,
) -> int:
    """Records a join string for a new client, or for one that joins `again`; only the hash of its secret is kept.

    It replaces the open join strings for the name, so that there is one at a time.

    Returns:
        The number of join strings that it has replaced.

    Raises:
        Refusal: `argument`: not a name for a client; `client-exists`; of one that joins again `client-unknown`,
            `client-state`: it is revoked.
    """
    try:
        check_name(client_id, "client")
    except IdentityError as error:
        raise Refusal("argument", str(error)) from None
    if again:
        check_client(session, client_id)
        check_not_revoked(session.get_one(Client, client_id))
    elif session.get(Client, client_id) is not None:
        raise Refusal(
            "client-exists",
            f"there is a client {client_id!r} already; a name is never given twice. If it is to join again because its "
            "certificate has ended: `fedpareto admin join-string --again`",
        )
    replaced = len(_cancel_open(session, client_id, "{} of them, replaced by another one", by=by, now=now))
    row = JoinString(secret_hash=secret_hash(secret), client_id=client_id, created_by=by, created=now, expires=expires)
    session.add(row)
    detail, logged = "to join again" if again else "", join_string_digest(row)
    audit.record(session, at=now, actor=by, action=audit.JOIN_CREATED, subject=client_id, detail=detail, digest=logged)
    return replaced


def join_strings(session: Session, *, every: bool, now: datetime, start: int, count: int) -> Sequence[JoinString]:
    """The open join strings, or every one, newest first: at most `count` of them, after the first `start`."""
    query = select(JoinString).order_by(JoinString.created.desc(), JoinString.secret_hash)
    if not every:
        query = query.where(_is_open(now))
    return session.scalars(query.offset(start).limit(count)).all()


def cancel_join_strings(session: Session, client_id: str, *, by: str, now: datetime) -> Sequence[JoinString]:
    """Cancels the open join strings for a name.

    Raises:
        Refusal: `join-string-unknown`: there is none.
    """
    cancelled = _cancel_open(session, client_id, "{} of them", by=by, now=now)
    if not cancelled:
        raise Refusal(
            "join-string-unknown",
            f"there is no open join string of {client_id[:63]!r}; `fedpareto admin join-strings` lists them",
        )
    return cancelled


def _cancel_open(session: Session, client_id: str, detail: str, *, by: str, now: datetime) -> Sequence[JoinString]:
    """Cancels the open join strings for a name; `detail`, with their number, is for the record."""
    cancelled = session.scalars(
        update(JoinString)
        .where(JoinString.client_id == client_id, _is_open(now))
        .values(cancelled=now)
        .returning(JoinString)
    ).all()
    if cancelled:
        text = detail.format(len(cancelled))
        audit.record(session, at=now, actor=by, action=audit.JOIN_CANCELLED, subject=client_id, detail=text)
    return cancelled


def _is_open(now: datetime) -> ColumnElement[bool]:
    return and_(JoinString.used.is_(None), JoinString.cancelled.is_(None), JoinString.expires > now)
