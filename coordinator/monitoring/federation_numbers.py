"""The numbers of the whole federation, read from the record. Every one of them is in `fedpareto admin`, too.

None is a number that a round computes: no loss, norm, weight or sample count. So they tell
nothing that a private round conceals. `fedpareto_run_round` names runs by their ids, which tell nothing about them.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from enum import StrEnum

from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from coordinator.clock import past
from coordinator.rounds.transitions import RUN_ENDED
from federation.monitoring.tally import Labels, MonitoredKind, MonitoredNumber, Reading, by_label, single
from storage import audit
from storage.models import Alert, Assignment, Certificate, Checkpoint, Client, Phase, Round, Run
from storage.states import AssignmentState, ClientState, PhaseState, RunState

DAY = 86_400.0  # seconds
MOST_RUNS = 200  # of which the round is shown: the newest ones
RUNS = MonitoredNumber("fedpareto_runs", "Runs, by state.", MonitoredKind.GAUGE, ("state",))
RUN_ROUND = MonitoredNumber(
    "fedpareto_run_round",
    "The newest round that has begun, of each run that has not ended.",
    MonitoredKind.GAUGE,
    ("run",),
)
OPEN_ASSIGNMENTS = MonitoredNumber(
    "fedpareto_open_assignments", "Assignments of open phases that wait for a reply.", MonitoredKind.GAUGE
)
MEMBERS = MonitoredNumber("fedpareto_members", "Members, by state.", MonitoredKind.GAUGE, ("state",))
MEMBERS_ATTENDING = MonitoredNumber(
    "fedpareto_members_attending", "Members that attend, at any coordinator.", MonitoredKind.GAUGE
)
MEMBERS_CERTIFICATE = MonitoredNumber(
    "fedpareto_members_certificate_days",
    "Days until the first of the active members' certificates ends.",
    MonitoredKind.GAUGE,
)
LOG_ENTRIES = MonitoredNumber("fedpareto_log_entries", "Entries of the audit log.", MonitoredKind.GAUGE)
LOG_SIGNED = MonitoredNumber(
    "fedpareto_log_signed_entries", "Entries of the audit log under its newest checkpoint.", MonitoredKind.GAUGE
)
BACKUP_AGE = MonitoredNumber(
    "fedpareto_backup_age_seconds",
    "Seconds since the newest backup, or since the federation was made if there is none.",
    MonitoredKind.GAUGE,
)
ALERTS = MonitoredNumber(
    "fedpareto_alerts", "Alerts that last, by kind and severity.", MonitoredKind.GAUGE, ("kind", "severity")
)
MEMBER_ATTENDING = MonitoredNumber(
    "fedpareto_member_attending", "1 if the active member attends, else 0.", MonitoredKind.GAUGE, ("member",)
)
MEMBER_SEEN = MonitoredNumber(
    "fedpareto_member_seen_timestamp_seconds", "When the member was last seen.", MonitoredKind.GAUGE, ("member",)
)
MEMBER_CERTIFICATE = MonitoredNumber(
    "fedpareto_member_certificate_days", "Days until the member's certificate ends.", MonitoredKind.GAUGE, ("member",)
)
MEMBER_ALERTS = MonitoredNumber(
    "fedpareto_member_alerts", "Alerts about the member that last.", MonitoredKind.GAUGE, ("member",)
)

_UNENDED = Run.state.not_in(list(RUN_ENDED))
_NEWEST = select(func.max(Round.number)).where(Round.run_id == Run.run_id).correlate(Run).scalar_subquery()
_WAITING = (
    select(func.count())
    .select_from(Run)
    .join(Round, (Round.run_id == Run.run_id) & (Round.number == _NEWEST))
    .join(Phase, Phase.round_id == Round.round_id)
    .join(Assignment, Assignment.phase_id == Phase.phase_id)
    .where(_UNENDED, Phase.state == PhaseState.OPEN, Assignment.state == AssignmentState.OPEN)
)

# When the newest certificate of each active member ends.
_CERTIFICATES = (
    select(Certificate.client_id, func.max(Certificate.not_after).label("ends"))
    .join(Client, Client.client_id == Certificate.client_id)
    .where(Certificate.revoked.is_(None), Client.state == ClientState.ACTIVE)
    .group_by(Certificate.client_id)
)


def federation_numbers(
    session: Session, attending: Collection[str], *, backed_up: datetime, now: datetime
) -> Iterator[Reading]:
    """The numbers that name no member.

    Args:
        session: reads the record.
        attending: the names of members that attend.
        backed_up: when the newest backup was made.
        now: the time, aware.
    """
    yield by_label(RUNS, _by_state(session, Run.state))
    rounds = select(Run.run_id, _NEWEST).where(_UNENDED).order_by(Run.created.desc()).limit(MOST_RUNS)
    yield by_label(RUN_ROUND, {run_id: number or 0 for run_id, number in session.execute(rounds)})
    yield single(OPEN_ASSIGNMENTS, session.scalar(_WAITING) or 0)
    yield by_label(MEMBERS, _by_state(session, Client.state))
    yield single(MEMBERS_ATTENDING, len(attending))
    ends = _CERTIFICATES.subquery()
    if (first := session.scalar(select(func.min(ends.c.ends)))) is not None:
        yield single(MEMBERS_CERTIFICATE, _days(first, now))
    yield single(LOG_ENTRIES, audit.size(session))
    yield single(LOG_SIGNED, session.scalar(select(func.max(Checkpoint.size))) or 0)
    yield single(BACKUP_AGE, (now - backed_up).total_seconds())
    lasting = select(Alert.kind, Alert.severity, func.count()).where(Alert.ended.is_(None))
    counted = session.execute(lasting.group_by(Alert.kind, Alert.severity))
    alerts: dict[Labels, float] = {(str(kind), str(severity)): count for kind, severity, count in counted}
    yield ALERTS, alerts


def member_numbers(session: Session, attending: Collection[str], *, now: datetime) -> Iterator[Reading]:
    """The numbers of each active member, by its name; arguments as for `federation_numbers`."""
    active = select(Client.client_id, Client.last_seen).where(Client.state == ClientState.ACTIVE)
    seen = dict(session.execute(active.order_by(Client.client_id)).all())
    yield by_label(MEMBER_ATTENDING, {name: name in attending for name in seen})
    last = {name: now if name in attending else past(at, now) for name, at in seen.items()}
    yield by_label(MEMBER_SEEN, {name: at.timestamp() for name, at in last.items() if at is not None})
    yield by_label(MEMBER_CERTIFICATE, {str(name): _days(end, now) for name, end in session.execute(_CERTIFICATES)})
    about = select(Alert.client_id, func.count()).where(Alert.ended.is_(None)).group_by(Alert.client_id)
    alerts = dict(session.execute(about).all())
    yield by_label(MEMBER_ALERTS, {name: alerts.get(name, 0) for name in seen})


def _by_state(
    session: Session, column: InstrumentedAttribute[RunState] | InstrumentedAttribute[ClientState]
) -> dict[str, float]:
    """The number of rows in each state, also where there is none."""
    counted = {str(state): count for state, count in session.execute(select(column, func.count()).group_by(column))}
    states: Iterable[StrEnum] = RunState if column is Run.state else ClientState
    return {str(state): counted.get(str(state), 0) for state in states}


def _days(end: datetime, now: datetime) -> float:
    return (end - now).total_seconds() / DAY
