"""Membership: approval, revocation, removal of a member's payloads. Functions of a session; callers notify others."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.lookup import check_client
from coordinator.rounds.transitions import move_client
from federation.refusals import Refusal
from federation.spec.run_sections import IDENTIFIER
from federation.trust.envelope import sign
from federation.v1.common_pb2 import RevocationManifest
from storage import audit
from storage.models import Certificate, Client
from storage.states import ClientState

MAX_TAGS = 32
MAX_CONTACT = 200  # characters
REVOKED = "your certificate has been revoked; ask an administrator why"


APPROVED = "client.approved"  # entries of the log
CLIENT_REVOKED = "client.revoked"
FORGOTTEN = "client.forgotten"


def approve(session: Session, client_id: str, key_id: str, *, by: str, now: datetime, consent: str = "") -> None:
    """Lets a pending client work. `consent` is the digest of a second officer's signed decision.

    `key_id` names the signing key that the officer has seen: the client may have replaced it since.

    Raises:
        Refusal: `client-unknown`, `client-state`; `client-key`: the client has another key.
    """
    client = _get(session, client_id)
    move_client(client, ClientState.ACTIVE)
    if client.key_id != key_id:
        given = f"not the one that was to be approved, {key_id[:64]!r}" if key_id else "and the call names none"
        raise Refusal(
            "client-key",
            f"{client_id} has the signing key {client.key_id}, {given}: ask its owner which key is right, and approve "
            "it with `fedpareto admin approve`, which shows the key",
        )
    audit.record(session, at=now, actor=by, action=APPROVED, subject=client_id, digest=consent)


def describe(
    session: Session, client_id: str, tags: Sequence[str] | None, contact: str | None, *, by: str, now: datetime
) -> None:
    """Replaces the tags of a client, and its contact; None leaves them as they are.

    The contact is not in the audit log, whose entries leave the federation with the record of a run.

    Raises:
        Refusal: `client-unknown`; `argument`: something cannot be a tag, they are too many, or the contact is too long.
    """
    client = _get(session, client_id)
    if tags is not None:
        client.tags = _tags(tags)
        named = ", ".join(client.tags)
        audit.record(session, at=now, actor=by, action="client.tagged", subject=client_id, detail=named)
    if contact is not None:
        if len(contact) > MAX_CONTACT:
            raise Refusal("argument", f"a contact of {len(contact)} characters; at most {MAX_CONTACT}")
        client.contact = contact.strip()
        audit.record(session, at=now, actor=by, action="client.contact", subject=client_id)
        session.flush()
        session.refresh(client)  # the column replaces characters that cannot be printed


def _tags(names: Sequence[str]) -> list[str]:
    if len(names) > MAX_TAGS:
        raise Refusal("argument", f"{len(names)} tags; a client has at most {MAX_TAGS}")
    for name in names:
        if re.fullmatch(IDENTIFIER, name) is None:
            raise Refusal(
                "argument", f"{name[:80]!r} cannot be a tag: use lower-case letters, digits, dots and hyphens"
            )
    return sorted(set(names))


def revoke(session: Session, client_id: str, reason: str, *, by: str, now: datetime, consent: str = "") -> Client:
    """Revokes a client and its certificates. Its contributions stay in the record. `consent` as for `approve`.

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
    audit.record(session, at=now, actor=by, action=CLIENT_REVOKED, subject=client_id, detail=reason, digest=consent)
    session.refresh(client)  # the column holds a shorter reason, perhaps
    return client


def check_not_revoked(client: Client) -> None:
    """Raises the Refusal `client-state` if a client that wants to join again is revoked."""
    if client.state is ClientState.REVOKED:
        raise Refusal(
            "client-state",
            f"{client.client_id} was revoked and cannot join again: ask for a join string for a new name",
        )


def forget(session: Session, client_id: str, reason: str, *, by: str, now: datetime, consent: str = "") -> None:
    """Marks a client as forgotten: the payloads that it has sent are removed, and its signed envelopes are kept.

    `consent` as for `approve`.

    Raises:
        Refusal: `client-unknown`.
    """
    _get(session, client_id).forgotten = now
    audit.record(session, at=now, actor=by, action=FORGOTTEN, subject=client_id, detail=reason, digest=consent)


def _get(session: Session, client_id: str) -> Client:
    check_client(session, client_id)
    return session.get_one(Client, client_id, with_for_update=True, populate_existing=True)


def gone_clients_among(session: Session, names: Iterable[str]) -> Sequence[Client]:
    """The clients among these that were revoked or have left."""
    gone = Client.state.in_([ClientState.REVOKED, ClientState.LEFT])
    return session.scalars(select(Client).where(Client.client_id.in_(list(names)), gone)).all()


def revoked(federation_id: str, key: Ed25519PrivateKey, client: Client, certificate: Certificate | None) -> Refusal:
    """The refusal of a revoked client, with the coordinator's signed statement. Without it a worker would try again.

    `certificate` is the one that the caller showed, if the certificate has ended and the client is not revoked.
    """
    is_revoked = client.state is ClientState.REVOKED
    manifest = RevocationManifest(federation_id=federation_id, client_id=client.client_id)
    if is_revoked:
        manifest.reason = client.revoked_reason
    elif certificate is not None:
        manifest.serial = certificate.serial
        manifest.reason = "the client has attended with a newer certificate"
    ended = client.revoked if is_revoked else certificate.revoked if certificate is not None else None
    if ended is not None:
        manifest.revoked.FromDatetime(ended)
    return Refusal("certificate-revoked", REVOKED, signed=sign(manifest, key).SerializeToString())
