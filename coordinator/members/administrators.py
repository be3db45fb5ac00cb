"""Administrators: registration of their signing keys, their certificates, and revocation. Functions of a session."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from coordinator.members.authority import Authority, register, retire
from federation.digests import digest
from federation.refusals import Refusal
from federation.trust.certificates import der, serial_of
from federation.trust.envelope import key_id
from federation.trust.identity import NAME_PATTERN, Role, admin_uris
from storage import audit
from storage.models import Administrator, Certificate

CERTIFIED = "admin.certified"  # the log entry of a certificate
ISSUED = "admin.issued"  # the log entry of a signing key
REVOKED = "admin.revoked"
MAX_VALID = 32  # certificates of one administrator at a time: of several commands, or of several machines
KEPT = timedelta(days=1)  # how long a certificate stays on record after its end


@dataclass(frozen=True)
class ListedAdministrator:
    """An administrator, by the newest signing key of that name, and its newest certificate, if one is on record."""

    row: Administrator
    certificate: Certificate | None

    @property
    def is_officer(self) -> bool:
        """True if it can act as a security officer."""
        return self.row.ended is None and Role.SECURITY_OFFICER in self.row.roles


def identity_digest(administrator: Administrator) -> str:
    """The digest of an administrator in the log: of the raw signing key, a zero byte, and the roles."""
    return digest(administrator.signing_key + b"\0" + ",".join(administrator.roles).encode())


def administrators(session: Session, *, lock: bool = False) -> list[ListedAdministrator]:
    """All administrators, revoked ones included, by name; `lock` holds the rows until the transaction ends."""
    query = select(Administrator).order_by(Administrator.key_id)
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    rows = {row.name: row for row in sorted(session.scalars(query), key=lambda row: (row.ended is None, row.issued))}
    certificates = select(Certificate).where(Certificate.administrator.in_([row.key_id for row in rows.values()]))
    newest = {row.administrator: row for row in session.scalars(certificates.order_by(Certificate.not_after))}
    return [ListedAdministrator(rows[name], newest.get(rows[name].key_id)) for name in sorted(rows)]


def officers(session: Session) -> list[str]:
    """The names of the security officers who can act."""
    return [officer.row.name for officer in administrators(session) if officer.is_officer]


def register_administrator(
    session: Session, name: str, roles: Iterable[Role], key: Ed25519PublicKey, *, by: str, now: datetime
) -> Administrator:
    """Puts an administrator's signing key on record. An older key of the name ends, with its certificates."""
    for older in session.scalars(select(Administrator).filter_by(name=name, ended=None).with_for_update()):
        _end(session, older, by=by, now=now)
    row = Administrator(
        key_id=key_id(key).hex(), name=name, signing_key=key.public_bytes_raw(), roles=sorted(roles), issued=now
    )
    session.add(row)
    session.flush()
    audit.record(
        session,
        at=now,
        actor=by,
        action=ISSUED,
        subject=name,
        detail="roles " + ", ".join(row.roles),
        digest=identity_digest(row),
    )
    return row


def certify_administrator(
    session: Session,
    administrator: Administrator,
    key: EllipticCurvePublicKey,
    *,
    authority: Authority,
    lifetime: timedelta,
    login: str | None,
    by: str,
    now: datetime,
) -> x509.Certificate:
    """Issues a certificate of an administrator for a TLS key, and puts it on record.

    The newest certificates stay valid until they end, so that several commands can log in at the same time. `login` is
    the digest of the signed request.
    """
    name = administrator.name
    uris = admin_uris(authority.federation_id, name, map(Role, administrator.roles))
    certificate = authority.issue(key, name, uris, now=now, lifetime=lifetime)
    register(session, certificate, administrator=administrator.key_id, login=login)
    session.flush()
    mine = Certificate.administrator == administrator.key_id
    newest = select(Certificate.serial).where(mine, Certificate.revoked.is_(None))
    surplus = session.scalars(newest.order_by(Certificate.not_before.desc()).offset(MAX_VALID)).all()
    retire(session, Certificate.serial.in_(surplus), subject=name, by=by, now=now)
    session.execute(delete(Certificate).where(mine, Certificate.not_after < now - KEPT))
    until = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    audit.record(
        session,
        at=now,
        actor=by,
        action=CERTIFIED,
        subject=name,
        detail=f"certificate {serial_of(certificate)}, until {until}",
        digest=digest(der(certificate)),
    )
    return certificate


def revoke_administrator(
    session: Session, name: str, reason: str, *, least: int, by: str, now: datetime, consent: str = ""
) -> ListedAdministrator:
    """Ends an administrator's signing key and certificates; the caller must end its running calls.

    `least` is the number of security officers that have to remain; `consent` is the digest of a second officer's
    signed decision.

    Raises:
        Refusal: `administrator-unknown`; `administrator-state`: it is revoked already; `last-officer`: fewer than
            `least` officers would remain.
    """
    everybody = {listed.row.name: listed for listed in administrators(session, lock=True)}
    administrator = everybody.get(name)
    if administrator is None or NAME_PATTERN.fullmatch(name) is None:
        raise Refusal(
            "administrator-unknown", f"there is no administrator {name[:63]!r}; `fedpareto admin admins` lists them"
        )
    if administrator.row.ended is not None:
        raise Refusal(
            "administrator-state", f"{name} was revoked on {administrator.row.ended:%Y-%m-%d %H:%M} UTC already"
        )
    remaining = sum(listed.is_officer for listed in everybody.values()) - 1
    if administrator.is_officer and remaining < least:
        consequence = "nobody could make join strings or revoke a member"
        if least > 1:
            consequence = f"what takes two officers could not be done with {remaining or 'none'}"
        raise Refusal(
            "last-officer",
            f"{name} is one of the last security officers: {consequence} afterwards. Issue another one first, on the "
            "coordinator's own machine: `fedpareto coordinator admin NAME --role security-officer --out DIR`",
        )
    _end(session, administrator.row, by=by, now=now)
    audit.record(session, at=now, actor=by, action=REVOKED, subject=name, detail=reason, digest=consent)
    return administrator


def _end(session: Session, administrator: Administrator, *, by: str, now: datetime) -> None:
    administrator.ended = now
    mine = Certificate.administrator == administrator.key_id
    retire(session, mine, subject=administrator.name, by=by, now=now)


def note_seen(session: Session, serial: str, now: datetime) -> None:
    """Notes that the holder of a certificate has called."""
    holder = select(Certificate.administrator).where(Certificate.serial == serial).scalar_subquery()
    session.execute(update(Administrator).where(Administrator.key_id == holder).values(last_seen=now))


def revoked_among(session: Session, serials: Iterable[str]) -> set[str]:
    """The serial numbers of the revoked certificates among these."""
    query = select(Certificate.serial).where(Certificate.serial.in_(list(serials)), Certificate.revoked.is_not(None))
    return set(session.scalars(query))
