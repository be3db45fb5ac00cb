"""The facts about a run as a whole: it has ended, the coordinator has paused it, or nothing happens in it."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.alerts.facts import AlertFact
from coordinator.rounds.runs.disclosure import parsed_spec
from coordinator.rounds.transitions import SIMULATOR
from federation.text import counted
from storage.models import Assignment, Phase, Round, Run
from storage.states import AlertKind, AlertSeverity, AssignmentState, PhaseState, RunState

STALLED = 3  # times the median round
LEAST_STALLED = timedelta(minutes=1)  # of rounds that take seconds
STALLED_AT_FIRST = timedelta(minutes=10)  # before a round has ended
FAILED_SHOWN = timedelta(days=7)  # a run that failed
_NAMED = 5  # members that a sentence names
_BY_OPERATOR = "paused by "  # how the reason of an operator's pause begins


def ended(run: Run, done: int) -> AlertFact:
    """The fact that a run has ended after `done` rounds. That it failed lasts until it is a week old."""
    if run.ended is None:
        raise ValueError(f"run {run.run_id} has not ended")
    failed = run.state is RunState.FAILED
    rounds = f"{done} of {counted(parsed_spec(run.spec).rounds, 'round')}"
    reason = f": {run.reason.rstrip('.')}" if run.reason else ""
    return AlertFact(
        kind=AlertKind.RUN_ENDED,
        severity=AlertSeverity.CRITICAL if failed else AlertSeverity.NOTICE,
        run_id=run.run_id,
        message=f"run {run.name} {_ENDS[run.state]} after {rounds}{reason}",
        remedy=f"repair the cause, then submit it again; `fedpareto admin run {run.run_id}` shows more"
        if failed
        else f"`fedpareto report {run.run_id}` shows each member's result",
        began=run.ended,
        ended=None if failed else run.ended,
    )


_ENDS = {RunState.COMPLETED: "was completed", RunState.FAILED: "failed", RunState.STOPPED: "was stopped"}


def paused(run: Run, now: datetime) -> list[AlertFact]:
    """The fact that the coordinator has paused a run, unless an operator did, or the run is on simulated clients."""
    if run.state is not RunState.PAUSED or run.submitted_by == SIMULATOR:
        return []
    if not run.reason or run.reason.startswith(_BY_OPERATOR):
        return []
    return [
        AlertFact(
            kind=AlertKind.RUN_PAUSED,
            severity=AlertSeverity.CRITICAL,
            run_id=run.run_id,
            message=f"the coordinator has paused run {run.name}: {run.reason.rstrip('.')}",
            remedy=f"repair the cause, then `fedpareto admin resume {run.run_id}`",
            began=now,
        )
    ]


def stalled(session: Session, run: Run, seconds: Sequence[float], *, since: datetime, now: datetime) -> list[AlertFact]:
    """The fact that nothing has happened in a running run for three times its median round.

    `seconds` are those of its rounds so far; nothing is expected to have happened before `since`.
    """
    if run.state is not RunState.RUNNING:
        return []
    limit = max(STALLED * timedelta(seconds=median(seconds)), LEAST_STALLED) if seconds else STALLED_AT_FIRST
    last = max(_last_event(session, run), since)
    if now < last + limit:
        return []
    median_round = f", and its median round takes {median(seconds):.3g} s" if seconds else ""
    return [
        AlertFact(
            kind=AlertKind.RUN_STALLED,
            severity=AlertSeverity.WARNING,
            run_id=run.run_id,
            message=f"nothing has happened in run {run.name} since {last:%Y-%m-%d %H:%M} UTC{median_round}"
            f"{_awaited(session, run)}",
            remedy=f"`fedpareto admin watch {run.run_id}` shows who is asked, `fedpareto admin clients` who attends",
            began=last + limit,
        )
    ]


def _last_event(session: Session, run: Run) -> datetime:
    """The last time at which a round or phase of a run began or ended, or a member answered."""
    newest = session.scalar(select(Round).where(Round.run_id == run.run_id).order_by(Round.number.desc()).limit(1))
    events = [run.started or run.created]
    if newest is not None:
        events += [newest.started, newest.stepped or newest.started, newest.ended or newest.started]
        phases = session.scalars(select(Phase).where(Phase.round_id == newest.round_id)).all()
        events += [at for phase in phases for at in (phase.started, phase.ended) if at is not None]
        answered = select(func.max(Assignment.ended)).where(Assignment.phase_id.in_([p.phase_id for p in phases]))
        if (at := session.scalar(answered)) is not None:
            events.append(at)
    return max(events)


def _awaited(session: Session, run: Run) -> str:
    """What a run waits for, for a sentence: the members that have not answered, or else what it says itself."""
    query = (
        select(Assignment.client_id)
        .join(Phase, Phase.phase_id == Assignment.phase_id)
        .join(Round, Round.round_id == Phase.round_id)
        .where(Round.run_id == run.run_id, Phase.state == PhaseState.OPEN, Assignment.state == AssignmentState.OPEN)
        .order_by(Assignment.client_id)
    )
    names = session.scalars(query).all()
    if not names:
        return f": {run.reason}" if run.reason else ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f": it waits for {', '.join(names[:_NAMED])}{more}"
