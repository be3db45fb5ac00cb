"""Certificates of this federation: issued, put on record, and ended. Functions of a session."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from sqlalchemy import ColumnElement, update
from sqlalchemy.orm import Session

from federation.trust.certificates import CLIENT_LIFETIME, der, issue_certificate, serial_of
from federation.trust.identity import client_uri, parse_peer, signing_key_uri
from storage import audit
from storage.models import Certificate

RETIRED = "certificate.retired"  # the log entry of the end of a certificate; its detail is the serial number


@dataclass(frozen=True)
class Authority:
    """Issues certificates of a federation."""

    federation_id: str
    ca: x509.Certificate
    ca_key: EllipticCurvePrivateKey

    def issue(
        self,
        key: EllipticCurvePublicKey,
        name: str,
        uris: Sequence[str],
        *,
        now: datetime,
        lifetime: timedelta,
        hosts: Sequence[str] = (),
    ) -> x509.Certificate:
        """Issues the certificate of a key; see `issue_certificate`."""
        return issue_certificate(
            ca=self.ca,
            ca_key=self.ca_key,
            public_key=key,
            federation_id=self.federation_id,
            common_name=name,
            uris=uris,
            now=now,
            lifetime=lifetime,
            hosts=hosts,
        )


def certify(
    session: Session,
    client_id: str,
    key: EllipticCurvePublicKey,
    signing_key: bytes,
    *,
    authority: Authority,
    now: datetime,
) -> x509.Certificate:
    """Issues a certificate of a client with this raw Ed25519 signing key, and puts it on record."""
    federation = authority.federation_id
    uris = [client_uri(federation, client_id), signing_key_uri(federation, signing_key)]
    certificate = authority.issue(key, client_id, uris, now=now, lifetime=CLIENT_LIFETIME)
    register(session, certificate, client_id=client_id)
    return certificate


def register(
    session: Session,
    certificate: x509.Certificate,
    *,
    client_id: str | None = None,
    administrator: str | None = None,
    login: str | None = None,
) -> None:
    """Puts a new certificate on record, of a client or of an administrator, by the id of the signing key.

    Only certificates on record are accepted. `login` is the digest of the request of an administrator, if there was
    one.
    """
    session.add(
        Certificate(
            serial=serial_of(certificate),
            client_id=client_id,
            administrator=administrator,
            subject=parse_peer(der(certificate)).uri,
            certificate=der(certificate),
            login=login,
            not_before=certificate.not_valid_before_utc,
            not_after=certificate.not_valid_after_utc,
        )
    )


def retire(session: Session, *conditions: ColumnElement[bool], subject: str, by: str, now: datetime) -> None:
    """Ends the certificates of a subject that meet all `conditions` and have not ended; records each.

    `subject` is the member or administrator; `by` is the actor, for the record.
    """
    ended = update(Certificate).where(Certificate.revoked.is_(None), *conditions).values(revoked=now)
    for serial in session.scalars(ended.returning(Certificate.serial)).all():
        audit.record(session, at=now, actor=by, action=RETIRED, subject=subject, detail=serial)
