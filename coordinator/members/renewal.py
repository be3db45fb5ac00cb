"""Renewal: a member's next certificate, and the end of those that it replaces. Functions of a session."""

from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.members.enrollment import Authority, certify
from federation.certificates import csr_public_key, serial_of
from federation.keys import IdentityError
from federation.proofs import proves_renewal
from federation.refusals import Refusal
from storage import audit
from storage.models import Certificate, Client, ClientState

MAX_UNUSED = 3  # certificates besides the present and the newest one that are still good
MAX_ENDED = 16  # certificates that have ended and stay on record


def renew(
    session: Session,
    client_id: str,
    serial: str,
    csr: bytes,
    proof: bytes,
    *,
    authority: Authority,
    by: str,
    now: datetime,
) -> x509.Certificate:
    """Issues the next certificate of a member, for a new key. The present one holds until the next one attends.

    A stolen TLS key alone renews nothing: the member's signing key has to agree. The newest few
    certificates that the member has not attended with stay valid, because the answer to a renewal may have been lost.
    The newest few that have ended stay on record.

    Args:
        session: an open transaction.
        client_id: the member, as its present certificate says.
        serial: of its present certificate.
        csr: a PKCS#10 request, DER.
        proof: by the signing key; see `prove_renewal`.
        authority: issues the certificate.
        by: how the record names the caller.
        now: the time.

    Raises:
        Refusal: `csr`, `proof`; `certificate-revoked`: the member is being revoked at this moment.
    """
    try:
        key = csr_public_key(csr)
    except IdentityError as error:
        raise Refusal("csr", str(error)) from None
    client = session.get_one(Client, client_id, with_for_update=True, populate_existing=True)
    if client.state is ClientState.REVOKED:
        raise Refusal("certificate-revoked", "your certificate has been revoked; ask an administrator why")
    if not proves_renewal(Ed25519PublicKey.from_public_bytes(client.signing_key), proof, csr):
        raise Refusal("proof", f"the proof is not by the signing key of {client_id} over this request")
    certificate = certify(session, client_id, key, authority=authority, now=now)
    session.flush()
    _end_surplus(session, client_id, keep={serial, serial_of(certificate)}, by=by, now=now)
    audit.record(
        session, at=now, actor=by, action="Renew", subject=client_id, detail=f"certificate {serial_of(certificate)}"
    )
    return certificate


def retire_older(session: Session, client_id: str, serial: str, *, by: str, now: datetime) -> None:
    """Ends the certificates of a member that were issued before the one that it attends with.

    Args:
        session: an open transaction.
        client_id: the member.
        serial: of the certificate that it attends with.
        by: how the record names the caller.
        now: the time.
    """
    present = session.get_one(Certificate, serial)
    ended = session.scalars(
        update(Certificate)
        .where(
            Certificate.client_id == client_id,
            Certificate.revoked.is_(None),
            Certificate.not_before < present.not_before,
        )
        .values(revoked=now)
        .returning(Certificate.serial)
    ).all()
    for old in ended:
        audit.record(session, at=now, actor=by, action="certificate.retired", subject=client_id, detail=old)


def _end_surplus(session: Session, client_id: str, *, keep: set[str], by: str, now: datetime) -> None:
    """Bounds what is on record of a member, however often it renews."""
    others = select(Certificate).where(Certificate.client_id == client_id, Certificate.serial.not_in(keep))
    newest = Certificate.not_before.desc()
    unused = session.scalars(others.where(Certificate.revoked.is_(None)).order_by(newest).offset(MAX_UNUSED))
    for row in unused.all():
        row.revoked = now
        audit.record(session, at=now, actor=by, action="certificate.retired", subject=client_id, detail=row.serial)
    session.flush()
    ended = session.scalars(others.where(Certificate.revoked.is_not(None)).order_by(newest).offset(MAX_ENDED))
    for row in ended.all():
        session.delete(row)
