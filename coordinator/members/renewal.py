"""Renewal: a member's next certificate, and the end of those that it replaces. Functions of a session."""

from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coordinator.members.authority import Authority, certify, retire
from coordinator.members.membership import REVOKED
from federation.digests import digest
from federation.record.joinings import RENEWED
from federation.refusals import Refusal
from federation.trust.certificates import csr_public_key, der, serial_of
from federation.trust.keys import IdentityError
from federation.trust.proofs import proves_renewal
from storage import audit
from storage.models import Certificate, Client
from storage.states import ClientState

MAX_UNUSED = 3  # certificates besides the present and the newest one that are still valid
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

    A stolen TLS key alone renews nothing: the member's signing key must sign, too. The newest few
    certificates that the member has not attended with stay valid, because the answer to a renewal may have been lost.
    The newest few that have ended stay on record. `serial` is of the present certificate, `csr` a PKCS#10 request in
    DER, and `proof` by the signing key (`prove_renewal`).

    Raises:
        Refusal: `csr`, `proof`; `certificate-revoked`: the member is being revoked at this moment.
    """
    try:
        key = csr_public_key(csr)
    except IdentityError as error:
        raise Refusal("csr", str(error)) from None
    client = session.get_one(Client, client_id, with_for_update=True, populate_existing=True)
    if client.state is ClientState.REVOKED:
        raise Refusal("certificate-revoked", REVOKED)
    if not proves_renewal(Ed25519PublicKey.from_public_bytes(client.signing_key), proof, csr):
        raise Refusal("proof", f"the proof is not by the signing key of {client_id} over this request")
    certificate = certify(session, client_id, key, client.signing_key, authority=authority, now=now)
    session.flush()
    end_surplus(session, client_id, keep={serial, serial_of(certificate)}, by=by, now=now)
    audit.record(
        session,
        at=now,
        actor=by,
        action=RENEWED,
        subject=client_id,
        detail=f"certificate {serial_of(certificate)}",
        digest=digest(der(certificate)),
    )
    return certificate


def retire_older(session: Session, client_id: str, serial: str, *, by: str, now: datetime) -> None:
    """Ends the certificates of a member that were issued before the one with `serial`, with which it attends."""
    older = Certificate.not_before < session.get_one(Certificate, serial).not_before
    retire(session, Certificate.client_id == client_id, older, subject=client_id, by=by, now=now)


def end_surplus(session: Session, client_id: str, *, keep: set[str], by: str, now: datetime) -> None:
    """Bounds the certificates on record of a member, however often it renews; those with serials `keep` stay."""
    others = select(Certificate.serial).where(Certificate.client_id == client_id, Certificate.serial.not_in(keep))
    newest = others.order_by(Certificate.not_before.desc())
    unused = session.scalars(newest.where(Certificate.revoked.is_(None)).offset(MAX_UNUSED)).all()
    retire(session, Certificate.serial.in_(unused), subject=client_id, by=by, now=now)
    ended = session.scalars(newest.where(Certificate.revoked.is_not(None)).offset(MAX_ENDED)).all()
    session.execute(delete(Certificate).where(Certificate.serial.in_(ended)))
