"""The states of clients, runs, rounds, phases and assignments, and the allowed transitions."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, bindparam, func, or_, select, update
from sqlalchemy.orm import Session

from federation.record import log_entries, results
from federation.refusals import Refusal
from storage import audit
from storage.models import Assignment, Client, Phase, Round, Run
from storage.states import AssignmentState, ClientState, PhaseState, RoundState, RunState

EVALUATES = or_(~Phase.decides, Phase.number >= func.coalesce(Round.evaluation_phase, 2**31 - 1))
"""Selects the phases, of joined rounds, that evaluate the new model.

The phases of a private evaluation are of the same kinds as those before the step.
"""
ONLY_EVALUATES = func.coalesce(Round.evaluation_phase, 1) == 0
"""Selects the rounds that measure a model and make no step."""
COUNTS = or_(~EVALUATES, ONLY_EVALUATES)
"""Selects the phases, of joined rounds, whose replies the end of the round depends on."""
CLIENT_TRANSITIONS: dict[ClientState, frozenset[ClientState]] = {
    ClientState.PENDING: frozenset({ClientState.ACTIVE, ClientState.REVOKED, ClientState.LEFT}),
    ClientState.ACTIVE: frozenset({ClientState.REVOKED, ClientState.LEFT}),
    ClientState.REVOKED: frozenset(),
    ClientState.LEFT: frozenset({ClientState.REVOKED}),  # it comes back when it joins again
}
RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.RUNNING, RunState.PAUSED, RunState.STOPPED}),
    RunState.RUNNING: frozenset({RunState.PAUSED, RunState.COMPLETED, RunState.FAILED, RunState.STOPPED}),
    RunState.PAUSED: frozenset({RunState.RUNNING, RunState.STOPPED}),
    RunState.COMPLETED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.STOPPED: frozenset(),
}
ROUND_TRANSITIONS: dict[RoundState, frozenset[RoundState]] = {
    RoundState.OPEN: frozenset({RoundState.STEPPED, RoundState.COMPLETED, RoundState.SKIPPED}),
    RoundState.STEPPED: frozenset({RoundState.COMPLETED}),
    RoundState.COMPLETED: frozenset(),
    RoundState.SKIPPED: frozenset(),
}
PHASE_TRANSITIONS: dict[PhaseState, frozenset[PhaseState]] = {
    PhaseState.OPEN: frozenset({PhaseState.CLOSED}),
    PhaseState.CLOSED: frozenset(),
}
ASSIGNMENT_TRANSITIONS: dict[AssignmentState, frozenset[AssignmentState]] = {
    AssignmentState.OPEN: frozenset(AssignmentState) - {AssignmentState.OPEN},
    **{state: frozenset() for state in AssignmentState if state is not AssignmentState.OPEN},
}

ROUND_OVER = "round-ended"  # the reason of assignments that were open when their round, or its attempt, ended
UNDER_WAY = (RunState.PENDING, RunState.RUNNING)
RUN_ENDED = frozenset(map(RunState, results.RUN_ENDED))
ROUND_ENDED = frozenset({RoundState.COMPLETED, RoundState.SKIPPED})

SIMULATOR = "simulation"  # the submitter of runs on simulated clients
INTERRUPTED = "interrupted; fedpareto simulate --resume goes on"

StateT = TypeVar("StateT", RunState, RoundState, PhaseState, AssignmentState)


class IllegalTransition(Exception):
    """A change of state that does not exist: a bug, not a user's mistake."""


def _check(transitions: dict[StateT, frozenset[StateT]], now: StateT, to: StateT, subject: str) -> None:
    if to not in transitions[now]:
        raise IllegalTransition(f"{subject} cannot go from {now} to {to}")


def move_client(client: Client, to: ClientState) -> None:
    """Moves a client.

    Raises:
        Refusal: `client-state`, with the state and the possible ones.
    """
    if to not in CLIENT_TRANSITIONS[client.state]:
        ways = ", ".join(sorted(CLIENT_TRANSITIONS[client.state])) or "nothing: it is shut out for good"
        raise Refusal("client-state", f"{client.client_id} is {client.state} and cannot become {to}; possible: {ways}")
    client.state = to


def move_run(run: Run, to: RunState, at: datetime, reason: str = "") -> None:
    """Moves a run.

    Raises:
        Refusal: `run-state`, with the state and the possible ones.
    """
    if to not in RUN_TRANSITIONS[run.state]:
        ways = ", ".join(sorted(RUN_TRANSITIONS[run.state])) or "nothing: it has ended"
        raise Refusal("run-state", f"run {run.run_id} is {run.state} and cannot become {to}; possible now: {ways}")
    run.state = to
    run.reason = reason
    if to is RunState.RUNNING and run.started is None:
        run.started = at
    if to in RUN_ENDED:
        run.ended = at


def run_ids(session: Session, *where: ColumnElement[bool]) -> Sequence[str]:
    """The ids of the runs that fulfil some conditions, oldest first."""
    return session.scalars(select(Run.run_id).where(*where).order_by(Run.created)).all()


def interrupt_simulations(session: Session, at: datetime) -> None:
    """Pauses the runs on simulated clients that a dead process left under way.

    A live simulation holds the exclusive lock of its database; the caller must hold that lock.
    """
    for run in session.scalars(select(Run).where(Run.submitted_by == SIMULATOR, Run.state.in_(UNDER_WAY))):
        move_run(run, RunState.PAUSED, at, INTERRUPTED)


def move_round(round_: Round, to: RoundState, at: datetime, reason: str = "") -> None:
    """Moves a round; STEPPED and the end are stamped with the time."""
    _check(ROUND_TRANSITIONS, round_.state, to, f"round {round_.number} of run {round_.run_id}")
    round_.state = to
    if reason:
        round_.reason = reason
    if to is RoundState.STEPPED:
        round_.stepped = at
    else:
        round_.ended = at


def close_phase(phase: Phase, at: datetime) -> None:
    """Closes a phase."""
    _check(PHASE_TRANSITIONS, phase.state, PhaseState.CLOSED, f"phase {phase.phase_id}")
    phase.state = PhaseState.CLOSED
    phase.ended = at


def end_assignment(
    assignment: Assignment, to: AssignmentState, at: datetime, reason: str = "", message: str = ""
) -> None:
    """Ends an assignment."""
    _check(ASSIGNMENT_TRANSITIONS, assignment.state, to, f"assignment {assignment.assignment_id}")
    for name, value in _ending(to, at, reason, message).items():
        setattr(assignment, name, value)


class Ending(NamedTuple):
    """The end of an assignment."""

    assignment_id: str
    to: AssignmentState
    at: datetime
    reason: str = ""
    message: str = ""


def end_open_assignments(session: Session, endings: Iterable[Ending]) -> None:
    """Ends assignments that this transaction has locked and found open, in one statement and without loading them."""
    rows = [{"ended_id": end.assignment_id, **_ending(end.to, end.at, end.reason, end.message)} for end in endings]
    session.connection().execute(_END, rows)


_END = update(Assignment).where(Assignment.assignment_id == bindparam("ended_id"))


def _ending(to: AssignmentState, at: datetime, reason: str, message: str) -> dict[str, Any]:
    return {"state": to, "reason": reason, "message": message, "ended": at}


def open_assignments(session: Session, *where: ColumnElement[bool]) -> Sequence[Assignment]:
    """The open assignments that meet the conditions, locked: a reply may be accepted at the same time."""
    return session.scalars(
        select(Assignment)
        .where(Assignment.state == AssignmentState.OPEN, *where)
        .order_by(Assignment.assignment_id)
        .with_for_update()
    ).all()


def close_open_phases(session: Session, round_id: int, reason: str, at: datetime) -> list[Assignment]:
    """Closes the open phases of a round. Returns the assignments that this cancels, with the reason."""
    cancelled: list[Assignment] = []
    for phase in session.scalars(
        select(Phase).where(Phase.round_id == round_id, Phase.state == PhaseState.OPEN).with_for_update()
    ):
        for assignment in open_assignments(session, Assignment.phase_id == phase.phase_id):
            end_assignment(assignment, AssignmentState.CANCELLED, at, reason)
            cancelled.append(assignment)
        close_phase(phase, at)
    return cancelled


def end_conversation(session: Session, run_id: str, reason: str, at: datetime) -> tuple[int | None, list[Assignment]]:
    """Ends the round of a run that has ended.

    Returns the id of the round, None without one, and the assignments that this cancels.
    """
    current = session.scalar(
        select(Round).where(Round.run_id == run_id, Round.state.in_([RoundState.OPEN, RoundState.STEPPED]))
    )
    if current is None:
        return None, []
    cancelled = close_open_phases(session, current.round_id, "run-ended", at)
    why = f"the run ended: {reason}"
    if current.state is RoundState.OPEN:
        move_round(current, RoundState.SKIPPED, at, why)
        subject = f"{run_id}/{current.number}"
        audit.record(session, at=at, actor="coordinator", action=log_entries.SKIPPED, subject=subject, detail=why)
    else:
        move_round(current, RoundState.COMPLETED, at, why)
    return current.round_id, cancelled
