"""Enrollment: registers or certifies a member for a join string and proofs of two keys. Functions of a session."""

from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.members.authority import Authority, certify
from coordinator.members.logged_rights import LoggedRights
from coordinator.members.membership import check_not_revoked
from coordinator.members.renewal import end_surplus
from federation.digests import digest
from federation.record.joinings import JOINED_AGAIN
from federation.refusals import Refusal
from federation.trust.certificates import csr_public_key, der, serial_of
from federation.trust.envelope import key_id
from federation.trust.join_string import SECRET_BYTES, secret_hash
from federation.trust.keys import IdentityError
from federation.trust.proofs import proves_possession, signing_public_key
from storage import audit
from storage.models import Certificate, Client, JoinString
from storage.states import ClientState


@dataclass(frozen=True)
class Application:
    """The request of a newcomer; see `EnrollRequest` for each field."""

    secret: bytes
    csr: bytes
    signing_key: bytes
    proof: bytes
    software: str


def enroll(
    session: Session,
    application: Application,
    *,
    authority: Authority,
    rights: LoggedRights,
    approval: bool,
    peer: str,
    now: datetime,
) -> tuple[Client, x509.Certificate]:
    """Checks an application, uses up its join string, and makes the client and its certificate.

    If the join string names a member, the member joins again: with the signing key that is on record it gets a
    certificate, and its other data stay as they are. Its older certificates end when the new one attends.

    The answer may be lost. So an application with the secret, the signing key and the TLS key of the one that used up
    the join string gets the same certificate again, as long as it holds, and nothing is written.

    The join string is found by the hash of its secret, so that no comparison's duration reveals anything of a secret. A
    refusal leaves the join string as it was. With `approval`, a security officer must approve the client before it gets
    work. `peer` is the address that the application came from, for the record.

    Raises:
        Refusal: `join-string-invalid`, `join-string-used`, `join-string-cancelled`, `join-string-expired`, `csr`,
            `signing-key`, `proof`, `client-exists`, `client-state`; `unlogged`: the audit log does not tell of the
            join string.
    """
    row = _join_string(session, application.secret)
    if (answer := _answered(session, row, application, now)) is not None:
        return answer
    _check_unused(row, now)
    rights.check_join_string_logged(row)
    try:
        tls_key = csr_public_key(application.csr)
    except IdentityError as error:
        raise Refusal("csr", str(error)) from None
    try:
        signing_key = signing_public_key(application.signing_key)
    except IdentityError as error:
        raise Refusal("signing-key", str(error)) from None
    if not proves_possession(signing_key, application.proof, application.secret, application.csr):
        raise Refusal("proof", "the proof of possession does not fit the signing key, the secret and the request")
    signing_key_id = key_id(signing_key).hex()
    holder = session.scalar(select(Client.client_id).filter_by(key_id=signing_key_id))
    if holder not in (None, row.client_id):
        raise Refusal("signing-key", "this signing key is registered already: make a new one for each membership")
    member = session.get(Client, row.client_id, with_for_update=True)
    if member is not None:
        check_not_revoked(member)
        if holder is None:
            raise Refusal(
                "client-exists",
                f"{row.client_id} is a member with another signing key: join again in the directory that has this key. "
                f"If the key is lost, have {row.client_id} revoked, and join under a new name",
            )
        row.used = now
        return member, _join_again(session, member, tls_key, authority=authority, peer=peer, now=now)

    row.used = now
    client = Client(
        client_id=row.client_id,
        state=ClientState.PENDING if approval else ClientState.ACTIVE,
        signing_key=application.signing_key,
        key_id=signing_key_id,
        software=application.software,
        enrolled=now,
    )
    session.add(client)
    session.flush()
    certificate = certify(session, row.client_id, tls_key, client.signing_key, authority=authority, now=now)
    audit.record(
        session,
        at=now,
        actor=f"peer {peer}",
        action=audit.ENROLLED,
        subject=row.client_id,
        detail=f"certificate {serial_of(certificate)}, signing key {signing_key_id[:16]}, {client.state}",
        digest=digest(application.signing_key),
    )
    return client, certificate


def _answered(
    session: Session, row: JoinString, application: Application, now: datetime
) -> tuple[Client, x509.Certificate] | None:
    """The client and the certificate of an application that was answered before; None for any other one."""
    client = None if row.used is None else session.get(Client, row.client_id)
    if client is None or client.signing_key != application.signing_key:
        return None
    try:
        tls_key = csr_public_key(application.csr)
        signing_key = signing_public_key(application.signing_key)
    except IdentityError:
        return None
    if not proves_possession(signing_key, application.proof, application.secret, application.csr):
        return None
    holding = select(Certificate.certificate).where(
        Certificate.client_id == client.client_id, Certificate.revoked.is_(None), Certificate.not_after > now
    )
    certificates = map(x509.load_der_x509_certificate, session.scalars(holding).all())
    return next(((client, found) for found in certificates if found.public_key() == tls_key), None)


def _join_again(
    session: Session, member: Client, key: EllipticCurvePublicKey, *, authority: Authority, peer: str, now: datetime
) -> x509.Certificate:
    certificate = certify(session, member.client_id, key, member.signing_key, authority=authority, now=now)
    member.start = ""  # its new directory knows none of the old one
    member.closed_until, member.paused = None, False  # it has announced nothing since
    if member.state is ClientState.LEFT and member.left_from is not None:
        member.state, member.left, member.left_from = member.left_from, None, None
    session.flush()
    actor, serial = f"peer {peer}", serial_of(certificate)
    end_surplus(session, member.client_id, keep={serial}, by=actor, now=now)
    audit.record(
        session,
        at=now,
        actor=actor,
        action=JOINED_AGAIN,
        subject=member.client_id,
        detail=f"certificate {serial}, {member.state}",
        digest=digest(der(certificate)),
    )
    return certificate


def _join_string(session: Session, secret: bytes) -> JoinString:
    row = None
    if len(secret) == SECRET_BYTES:
        row = session.get(JoinString, secret_hash(secret), with_for_update=True)
    if row is None:
        raise Refusal(
            "join-string-invalid",
            "no join string with this secret exists: copy the whole join string again, or ask for a new one",
        )
    return row


def _check_unused(row: JoinString, now: datetime) -> None:
    for reason, at, event, remedy in (
        ("used", row.used, "was used", "and it works once; if that was not you, tell an administrator at once"),
        ("cancelled", row.cancelled, "was cancelled", "ask for another one"),
        ("expired", row.expires if row.expires <= now else None, "expired", "ask for a new one"),
    ):
        if at is not None:
            raise Refusal(
                f"join-string-{reason}",
                f"the join string of {row.client_id} {event} on {at:%Y-%m-%d %H:%M} UTC; {remedy}",
            )
