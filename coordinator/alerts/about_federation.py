"""The facts about members and about the coordinator's machine, at a time."""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from cryptography import x509
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from coordinator.alerts.facts import AlertFact
from coordinator.clock import BEHIND_RECORD, past
from coordinator.run_sizes import open_runs_bytes
from federation.work.closing import SiteClosing
from storage.faults import StorageFault
from storage.models import AuditEntry, Certificate, Client, Federation, Withdrawal
from storage.states import AlertKind, AlertSeverity, ClientState

BACKUP_MADE = "backup.made"
MEMBER_CERTIFICATE = timedelta(days=14)  # workers renew theirs 30 days before the end
SERVER_CERTIFICATE = timedelta(days=30)
CA_CERTIFICATE = timedelta(days=180)
COPIED_SHOWN = timedelta(days=1)  # after the last refusal; a worker that runs is refused every ten minutes


def silent(
    session: Session, attending: Collection[str], *, after: timedelta, since: datetime, now: datetime
) -> list[AlertFact]:
    """The active members that have not attended for a time; none is expected to have attended before `since`.

    Nor is one whose site was closed or paused when it went: until the time that it named it may be switched off. A site
    that is paused without a time never counts; the end of its certificate is an alert.
    """
    facts = []
    for client in session.scalars(select(Client).where(Client.state == ClientState.ACTIVE)):
        seen = past(client.last_seen, now)
        last = max(seen or past(client.enrolled, now) or since, client.closed_until or since, since)
        until_resumed = client.paused and client.closed_until is None
        if client.client_id in attending or until_resumed or now < last + after:
            continue
        name = client.client_id
        was = "has never attended" if client.last_seen is None else "has not attended since a wrong clock was set right"
        was = was if seen is None else f"has not attended since {seen:%Y-%m-%d %H:%M} UTC"
        announced = SiteClosing.of(client.closed_until, paused=client.paused)
        was += "" if announced is None else f", when it said that its site was {announced}"
        reach = f"reach {client.contact}: " if client.contact else ""
        facts.append(
            AlertFact(
                kind=AlertKind.MEMBER_SILENT,
                severity=AlertSeverity.WARNING,
                client_id=name,
                message=f"{name} {was}",
                remedy=f"{reach}`fedpareto worker doctor` on its machine says what is wrong; revoke a member that is "
                f"gone for good: `fedpareto admin revoke {name}`",
                began=last + after,
            )
        )
    return facts


def pending(session: Session) -> list[AlertFact]:
    """The members that wait for a security officer's approval."""
    return [
        AlertFact(
            kind=AlertKind.MEMBER_PENDING,
            severity=AlertSeverity.WARNING,
            client_id=client.client_id,
            message=f"{client.client_id} has waited for its approval since {client.enrolled:%Y-%m-%d %H:%M} UTC, and "
            "gets no work until then",
            remedy="a security officer asks the member whether it has joined, then "
            f"`fedpareto admin approve {client.client_id}`; or `fedpareto admin revoke {client.client_id}`",
            began=client.enrolled,
        )
        for client in session.scalars(
            select(Client).where(Client.state == ClientState.PENDING).order_by(Client.client_id)
        )
    ]


def copied(session: Session, now: datetime) -> list[AlertFact]:
    """The members of which a home was refused not long ago, since another one with their identity has started."""
    since = now - COPIED_SHOWN
    return [
        AlertFact(
            kind=AlertKind.HOME_COPIED,
            severity=AlertSeverity.WARNING,
            client_id=client.client_id,
            message=f"two homes with the identity of {client.client_id} have started: the worker that started last is "
            "served, the other one is refused (home-copied)",
            remedy=f"{f'reach {client.contact}: ' if client.contact else ''}its owner stops both workers and decides "
            "with `fedpareto worker copied`; if nobody there has copied the home, revoke the member: `fedpareto admin "
            f"revoke {client.client_id}`",
            began=now if client.copied is None else client.copied,
        )
        for client in session.scalars(
            select(Client)
            .where(Client.state != ClientState.REVOKED, Client.copied.between(since, now + BEHIND_RECORD))
            .order_by(Client.client_id)
        )
    ]


def asks_to_be_forgotten(session: Session) -> list[AlertFact]:
    """The members that have left and ask officers to remove what they have sent; until that is done."""
    newest = (
        select(Withdrawal, Client)
        .join(Client, Client.client_id == Withdrawal.client_id)
        .where(Client.state.in_([ClientState.LEFT, ClientState.REVOKED]), Withdrawal.forget)
        .where(or_(Client.forgotten.is_(None), Client.forgotten < Withdrawal.received))
        .order_by(Withdrawal.received)
    )
    asking = {client.client_id: withdrawal for withdrawal, client in session.execute(newest)}
    return [
        AlertFact(
            kind=AlertKind.FORGET_ASKED,
            severity=AlertSeverity.NOTICE,
            client_id=name,
            message=f"{name} has left on {withdrawal.received:%Y-%m-%d %H:%M} UTC, and asks that the updates that it "
            "has sent are removed",
            remedy=f"a security officer decides: `fedpareto admin forget {name}`; afterwards, the steps that these "
            "updates entered can no longer be computed again from a bundle",
            began=withdrawal.received,
        )
        for name, withdrawal in sorted(asking.items())
    ]


def member_certificates(session: Session, now: datetime) -> list[AlertFact]:
    """The active members whose newest certificate ends soon, or has ended."""
    newest = (
        select(Certificate.client_id, func.max(Certificate.not_after))
        .join(Client, Client.client_id == Certificate.client_id)
        .where(Certificate.revoked.is_(None), Client.state == ClientState.ACTIVE)
        .group_by(Certificate.client_id)
        .having(func.max(Certificate.not_after) < now + MEMBER_CERTIFICATE)
    )
    facts = []
    for name, end in session.execute(newest):
        over = end <= now
        remedy = (
            f"it joins again: `fedpareto admin join-string {name} --again`"
            if over
            else "a running worker renews it by itself: see that it runs, or use `fedpareto worker renew` there"
        )
        facts.append(_certificate(f"the certificate of {name}", end, now, MEMBER_CERTIFICATE, remedy, name or ""))
    return facts


def own_certificates(ca: x509.Certificate, server: x509.Certificate, now: datetime) -> list[AlertFact]:
    """The first of the coordinator's certificates that ends soon, or has ended."""
    if (end := ca.not_valid_after_utc) < now + CA_CERTIFICATE:
        remedy = "it cannot be replaced: make a new federation, which members join, before it ends"
        return [_certificate("the CA's certificate", end, now, CA_CERTIFICATE, remedy)]
    if (end := server.not_valid_after_utc) < now + SERVER_CERTIFICATE:
        remedy = "start the coordinator again: it issues itself the next one"
        return [_certificate("the coordinator's certificate", end, now, SERVER_CERTIFICATE, remedy)]
    return []


def _certificate(what: str, end: datetime, now: datetime, soon: timedelta, remedy: str, name: str = "") -> AlertFact:
    over = end <= now
    return AlertFact(
        kind=AlertKind.CERTIFICATE_ENDS,
        severity=AlertSeverity.CRITICAL if over else AlertSeverity.WARNING,
        client_id=name,
        message=f"{what} {'ended' if over else 'ends'} on {end:%Y-%m-%d %H:%M} UTC",
        remedy=remedy,
        began=end - soon,
    )


def disk(session: Session, free: int | None, faults: Mapping[StorageFault, str], now: datetime) -> list[AlertFact]:
    """The fact that the disk is full, or has less than `free` bytes for the runs that have not ended.

    `free` is None if the blobs are in a bucket, whose space is not known.
    """
    remedy = "free some space, or set keep_rounds; `fedpareto admin disk` shows what takes it"
    if (cause := faults.get(StorageFault.DISK)) is not None:
        message = f"the coordinator's disk is full or fails ({cause}): runs are paused until there is space"
        severity = AlertSeverity.CRITICAL
    elif free is not None and (needed := open_runs_bytes(session)) > free:
        severity = AlertSeverity.WARNING
        message = (
            f"the runs that have not ended will take about {needed / 1e9:.1f} GB on the coordinator's disk, where "
            f"{max(free, 0) / 1e9:.1f} GB are free"
        )
    else:
        return []
    return [AlertFact(kind=AlertKind.DISK_LOW, severity=severity, message=message, remedy=remedy, began=now)]


def clock(back: timedelta, faults: Mapping[StorageFault, str], now: datetime) -> list[AlertFact]:
    """The fact that the machine's clock was set `back`, which changes nothing yet, or that it is a fault."""
    kind = AlertKind.CLOCK_WRONG
    if (cause := faults.get(StorageFault.CLOCK)) is not None:
        message = f"the clock of the coordinator's machine cannot be trusted ({cause}): no work is given out"
        remedy = "set the clock right, and let it be kept by NTP; if it is right, `fedpareto admin resume RUN`"
        return [AlertFact(kind=kind, severity=AlertSeverity.CRITICAL, message=message, remedy=remedy, began=now)]
    if back:
        shown = timedelta(seconds=round(back.total_seconds()))
        message = (
            f"the clock of the coordinator's machine was set back by {shown}: the coordinator's time goes on evenly"
        )
        remedy = (
            "set the clock right before the coordinator starts again: it serves nobody while it is behind the record"
        )
        return [AlertFact(kind=kind, severity=AlertSeverity.WARNING, message=message, remedy=remedy, began=now)]
    return []


def last_backup(session: Session, after: datetime | None, now: datetime) -> datetime | None:
    """The time of the newest backup. With `after`, older backups are not looked at."""
    query = select(func.max(AuditEntry.at))
    query = query.where(AuditEntry.action == BACKUP_MADE, AuditEntry.at <= now + BEHIND_RECORD)
    return session.scalar(query if after is None else query.where(AuditEntry.at >= after))


def backup(session: Session, last: datetime | None, *, after: timedelta, now: datetime) -> list[AlertFact]:
    """The fact that the last backup is older than `after`, or that a federation of that age has none."""
    created = session.scalar(select(func.min(Federation.created)))
    since = last or created
    if since is None or now < since + after:
        return []
    message = f"the last backup was made on {last:%Y-%m-%d %H:%M} UTC" if last else "no backup has been made"
    remedy = "`fedpareto coordinator backup DIRECTORY` makes one, also while the coordinator serves"
    severity = AlertSeverity.WARNING
    return [
        AlertFact(kind=AlertKind.BACKUP_OLD, severity=severity, message=message, remedy=remedy, began=since + after)
    ]
