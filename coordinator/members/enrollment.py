"""Enrollment: a join string and a proof of two keys become a member. Functions of a session."""

from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.certificates import CLIENT_LIFETIME, csr_public_key, der, issue_certificate, serial_of
from federation.envelope import key_id
from federation.identity import client_uri, parse_peer
from federation.join_string import SECRET_BYTES, secret_hash
from federation.keys import IdentityError
from federation.proofs import proves_possession, signing_public_key
from federation.refusals import Refusal
from storage import audit
from storage.models import Certificate, Client, ClientState, JoinString


@dataclass(frozen=True)
class Authority:
    """What certificates are issued with.

    Attributes:
        federation_id: the federation.
        ca: the CA certificate.
        ca_key: its key.
    """

    federation_id: str
    ca: x509.Certificate
    ca_key: EllipticCurvePrivateKey


@dataclass(frozen=True)
class Application:
    """What a client to be sends; see `EnrollRequest` for each field."""

    secret: bytes
    csr: bytes
    signing_key: bytes
    proof: bytes
    software: str


@dataclass(frozen=True)
class Enrolled:
    """A new member.

    Attributes:
        client_id: its name, from the join string.
        certificate: its certificate.
        state: whether it must wait for approval.
    """

    client_id: str
    certificate: x509.Certificate
    state: ClientState


def enroll(
    session: Session, application: Application, *, authority: Authority, approval: bool, peer: str, now: datetime
) -> Enrolled:
    """Checks an application; uses up its join string, makes the client and its certificate, all in one transaction.

    The join string is found by the hash of its secret, so that no comparison's duration says anything about a secret. A
    refusal leaves the join string as it was.

    Args:
        session: an open transaction.
        application: what arrived.
        authority: issues the certificate.
        approval: whether an operator must approve the client before it gets work.
        peer: where the application came from, for the record.
        now: the time.

    Raises:
        Refusal: `join-string-invalid`, `join-string-used`, `join-string-cancelled`, `join-string-expired`, `csr`,
            `signing-key`, `proof`, `client-exists`.
    """
    row = _join_string(session, application.secret, now)
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
    if session.scalar(select(Client).filter_by(key_id=signing_key_id)) is not None:
        raise Refusal("signing-key", "this signing key is registered already: make a new one for each membership")
    if session.get(Client, row.client_id) is not None:
        raise Refusal("client-exists", f"{row.client_id} has been enrolled already, with another join string")

    row.used = now
    state = ClientState.PENDING if approval else ClientState.ACTIVE
    session.add(
        Client(
            client_id=row.client_id,
            state=state,
            signing_key=application.signing_key,
            key_id=signing_key_id,
            software=application.software,
            enrolled=now,
        )
    )
    session.flush()
    certificate = certify(session, row.client_id, tls_key, authority=authority, now=now)
    audit.record(
        session,
        at=now,
        actor=f"peer {peer}",
        action="Enroll",
        subject=row.client_id,
        detail=f"certificate {serial_of(certificate)}, signing key {signing_key_id[:16]}, {state}",
    )
    return Enrolled(row.client_id, certificate, state)


def certify(
    session: Session, client_id: str, key: EllipticCurvePublicKey, *, authority: Authority, now: datetime
) -> x509.Certificate:
    """Issues a certificate of a client, and notes it."""
    certificate = issue_certificate(
        ca=authority.ca,
        ca_key=authority.ca_key,
        public_key=key,
        federation_id=authority.federation_id,
        common_name=client_id,
        uris=[client_uri(authority.federation_id, client_id)],
        now=now,
        lifetime=CLIENT_LIFETIME,
    )
    register(session, certificate, client_id=client_id)
    return certificate


def register(session: Session, certificate: x509.Certificate, *, client_id: str | None = None) -> None:
    """Notes that a certificate was issued: from now on it opens doors.

    Args:
        session: an open transaction.
        certificate: the certificate.
        client_id: its client; None for an administrator's.
    """
    session.add(
        Certificate(
            serial=serial_of(certificate),
            client_id=client_id,
            subject=parse_peer(der(certificate)).uri,
            certificate=der(certificate),
            not_before=certificate.not_valid_before_utc,
            not_after=certificate.not_valid_after_utc,
        )
    )


def _join_string(session: Session, secret: bytes, now: datetime) -> JoinString:
    row = None
    if len(secret) == SECRET_BYTES:
        row = session.get(JoinString, secret_hash(secret), with_for_update=True)
    if row is None:
        raise Refusal(
            "join-string-invalid",
            "no join string with this secret exists: copy the whole join string again, or ask for a new one",
        )
    if row.used is not None:
        raise Refusal(
            "join-string-used",
            f"the join string of {row.client_id} was used on {row.used:%Y-%m-%d %H:%M} UTC, and it works once; "
            "if that was not you, tell an administrator at once",
        )
    if row.cancelled is not None:
        raise Refusal(
            "join-string-cancelled",
            f"the join string of {row.client_id} was cancelled on {row.cancelled:%Y-%m-%d %H:%M} UTC; ask for "
            "another one",
        )
    if row.expires <= now:
        raise Refusal(
            "join-string-expired",
            f"the join string of {row.client_id} expired on {row.expires:%Y-%m-%d %H:%M} UTC; ask for a new one",
        )
    return row
