"""Administrators: who there is, as the record of certificates says, and the end of one. Functions of a session."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from federation.identity import NAME_PATTERN, Role, parse_peer
from federation.refusals import Refusal
from storage import audit
from storage.models import Certificate


@dataclass(frozen=True)
class Administrator:
    """An administrator, by the newest certificate of that name.

    Attributes:
        name: its name.
        roles: what it may do.
        certificate: the row of the certificate.
    """

    name: str
    roles: frozenset[str]
    certificate: Certificate

    def holds(self, now: datetime) -> bool:
        """Whether the certificate opens doors."""
        return self.certificate.revoked is None and now < self.certificate.not_after


def administrators(session: Session, *, lock: bool = False) -> list[Administrator]:
    """Everybody who was ever issued, by name.

    Args:
        session: where to read.
        lock: hold the rows until the transaction ends.
    """
    query = select(Certificate).where(Certificate.client_id.is_(None)).order_by(Certificate.serial)
    if lock:
        query = query.with_for_update()
    newest: dict[str, Administrator] = {}
    for row in sorted(session.scalars(query), key=lambda row: (row.revoked is None, row.not_before)):
        identity = parse_peer(row.certificate)
        newest[identity.name] = Administrator(identity.name, identity.roles, row)
    return [newest[name] for name in sorted(newest)]


def revoke_administrator(session: Session, name: str, reason: str, *, by: str, now: datetime) -> Administrator:
    """Ends an administrator's certificates; the caller ends its calls.

    Raises:
        Refusal: `administrator-unknown`; `administrator-state`: it is revoked already; `last-officer`: nobody else
            could make join strings, or revoke anybody.
    """
    everybody = administrators(session, lock=True)
    found = next((one for one in everybody if one.name == name), None)
    if found is None or NAME_PATTERN.fullmatch(name) is None:
        raise Refusal(
            "administrator-unknown", f"there is no administrator {name[:63]!r}; `fedpareto admin admins` lists them"
        )
    if found.certificate.revoked is not None:
        raise Refusal(
            "administrator-state", f"{name} was revoked on {found.certificate.revoked:%Y-%m-%d %H:%M} UTC already"
        )
    if [one.name for one in everybody if Role.SECURITY_OFFICER in one.roles and one.holds(now)] == [name]:
        raise Refusal(
            "last-officer",
            f"{name} is the only security officer with a valid certificate: nobody could make join strings or revoke a "
            "member afterwards. Issue another one first, on the coordinator's own machine: `fedpareto coordinator "
            "admin NAME --role security-officer --out DIR`",
        )
    end_certificates(session, found.certificate.subject, by=by, now=now)
    audit.record(session, at=now, actor=by, action="admin.revoked", subject=name, detail=reason)
    session.refresh(found.certificate)
    return found


def end_certificates(session: Session, uri: str, *, by: str, now: datetime) -> list[str]:
    """Ends the certificates of an administrator.

    Args:
        session: an open transaction.
        uri: the administrator, as its certificates name it.
        by: who does this, for the record.
        now: the time.

    Returns:
        Their serial numbers.
    """
    ended = session.scalars(
        update(Certificate)
        .where(Certificate.subject == uri, Certificate.client_id.is_(None), Certificate.revoked.is_(None))
        .values(revoked=now)
        .returning(Certificate.serial)
    ).all()
    for serial in ended:
        audit.record(
            session, at=now, actor=by, action="certificate.retired", subject=uri.rpartition("/")[2], detail=serial
        )
    return list(ended)


def note_seen(session: Session, serial: str, now: datetime) -> None:
    """Notes that the holder of a certificate has called."""
    session.execute(update(Certificate).where(Certificate.serial == serial).values(last_seen=now))


def revoked_among(session: Session, serials: Iterable[str]) -> set[str]:
    """Which of these certificates are revoked."""
    query = select(Certificate.serial).where(Certificate.serial.in_(list(serials)), Certificate.revoked.is_not(None))
    return set(session.scalars(query))
