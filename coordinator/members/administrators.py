"""Administrators, as the record of certificates says, and their revocation. Functions of a session."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.members.certificates import retire
from federation.identity import NAME_PATTERN, Role, parse_peer
from federation.refusals import Refusal
from storage import audit
from storage.models import Certificate


@dataclass(frozen=True)
class Administrator:
    """An administrator, by the newest certificate of that name."""

    name: str
    roles: frozenset[str]
    certificate: Certificate

    def may_call(self, now: datetime) -> bool:
        """Whether the certificate is valid."""
        return self.certificate.revoked is None and now < self.certificate.not_after


def administrators(session: Session, *, lock: bool = False) -> list[Administrator]:
    """Every administrator that ever had a certificate, by name; `lock` holds the rows until the transaction ends."""
    query = select(Certificate).where(Certificate.client_id.is_(None)).order_by(Certificate.serial)
    if lock:
        query = query.with_for_update()
    newest: dict[str, Administrator] = {}
    for row in sorted(session.scalars(query), key=lambda row: (row.revoked is None, row.not_before)):
        identity = parse_peer(row.certificate)
        newest[identity.name] = Administrator(identity.name, identity.roles, row)
    return [newest[name] for name in sorted(newest)]


def revoke_administrator(session: Session, name: str, reason: str, *, by: str, now: datetime) -> Administrator:
    """Ends an administrator's certificates; its running calls are for the caller of this function to end.

    Raises:
        Refusal: `administrator-unknown`; `administrator-state`: it is revoked already; `last-officer`: no other
            administrator could make join strings or revoke a member.
    """
    everybody = administrators(session, lock=True)
    administrator = next((admin for admin in everybody if admin.name == name), None)
    if administrator is None or NAME_PATTERN.fullmatch(name) is None:
        raise Refusal(
            "administrator-unknown", f"there is no administrator {name[:63]!r}; `fedpareto admin admins` lists them"
        )
    if administrator.certificate.revoked is not None:
        raise Refusal(
            "administrator-state",
            f"{name} was revoked on {administrator.certificate.revoked:%Y-%m-%d %H:%M} UTC already",
        )
    if [admin.name for admin in everybody if Role.SECURITY_OFFICER in admin.roles and admin.may_call(now)] == [name]:
        raise Refusal(
            "last-officer",
            f"{name} is the only security officer with a valid certificate: nobody could make join strings or revoke a "
            "member afterwards. Issue another one first, on the coordinator's own machine: `fedpareto coordinator "
            "admin NAME --role security-officer --out DIR`",
        )
    end_certificates(session, administrator.certificate.subject, by=by, now=now)
    audit.record(session, at=now, actor=by, action="admin.revoked", subject=name, detail=reason)
    session.refresh(administrator.certificate)
    return administrator


def end_certificates(session: Session, uri: str, *, by: str, now: datetime) -> None:
    """Ends the certificates of the administrator with a URI."""
    mine = Certificate.subject == uri, Certificate.client_id.is_(None)
    retire(session, *mine, subject=uri.rpartition("/")[2], by=by, now=now)


def note_seen(session: Session, serial: str, now: datetime) -> None:
    """Notes that the holder of a certificate has called."""
    session.execute(update(Certificate).where(Certificate.serial == serial).values(last_seen=now))


def revoked_among(session: Session, serials: Iterable[str]) -> set[str]:
    """Which of these certificates are revoked."""
    query = select(Certificate.serial).where(Certificate.serial.in_(list(serials)), Certificate.revoked.is_not(None))
    return set(session.scalars(query))
