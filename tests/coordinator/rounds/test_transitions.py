"""Every way from one state to another that is not in the tables is refused, and every way that is is taken."""

from datetime import UTC, datetime

import pytest

from coordinator.rounds import transitions
from federation.refusals import Refusal
from storage.models import Assignment, Client, Phase, Round, Run
from storage.states import AssignmentState, ClientState, PhaseState, RoundState, RunState

NOW = datetime(2026, 1, 1, tzinfo=UTC)

# Written out once more, by hand: a slip in the tables must show.
RUNS = {
    RunState.PENDING: {RunState.RUNNING, RunState.PAUSED, RunState.STOPPED},
    RunState.RUNNING: {RunState.PAUSED, RunState.COMPLETED, RunState.FAILED, RunState.STOPPED},
    RunState.PAUSED: {RunState.RUNNING, RunState.STOPPED},
}
ROUNDS = {
    RoundState.OPEN: {RoundState.STEPPED, RoundState.COMPLETED, RoundState.SKIPPED},
    RoundState.STEPPED: {RoundState.COMPLETED},
}
CLIENTS = {
    ClientState.PENDING: {ClientState.ACTIVE, ClientState.REVOKED, ClientState.LEFT},
    ClientState.ACTIVE: {ClientState.REVOKED, ClientState.LEFT},
    ClientState.LEFT: {ClientState.REVOKED},
}


@pytest.mark.parametrize("to", RunState)
@pytest.mark.parametrize("now", RunState)
def test_a_run_goes_only_where_the_table_says(now: RunState, to: RunState) -> None:
    assert (now in transitions.RUN_ENDED) == (now not in RUNS)
    run = Run(run_id="r", state=now, reason="before", started=None)
    if to in RUNS.get(now, set()):
        transitions.move_run(run, to, NOW, "why")
        assert (run.state, run.reason) == (to, "why")
        assert (run.started is not None) == (to is RunState.RUNNING)
        assert (run.ended is not None) == (to in {RunState.COMPLETED, RunState.FAILED, RunState.STOPPED})
    else:
        with pytest.raises(Refusal, match=f"run r is {now} and cannot become {to}") as refusal:
            transitions.move_run(run, to, NOW, "why")
        assert refusal.value.reason == "run-state"
        assert (run.state, run.reason, run.started, run.ended) == (now, "before", None, None)


@pytest.mark.parametrize("to", RoundState)
@pytest.mark.parametrize("now", RoundState)
def test_a_round_goes_only_where_the_table_says(now: RoundState, to: RoundState) -> None:
    round_ = Round(run_id="r", number=3, state=now, reason="before")
    if to in ROUNDS.get(now, set()):
        transitions.move_round(round_, to, NOW)
        assert (round_.state, round_.reason) == (to, "before")  # a reason that was given stays
        assert (round_.stepped is not None) == (to is RoundState.STEPPED)
        assert (round_.ended is not None) == (to is not RoundState.STEPPED)
    else:
        with pytest.raises(transitions.IllegalTransition, match=f"round 3 of run r cannot go from {now} to {to}"):
            transitions.move_round(round_, to, NOW)
        assert round_.state is now


@pytest.mark.parametrize("to", ClientState)
@pytest.mark.parametrize("now", ClientState)
def test_a_client_goes_only_where_the_table_says(now: ClientState, to: ClientState) -> None:
    client = Client(client_id="c", state=now)
    if to in CLIENTS.get(now, set()):
        transitions.move_client(client, to)
        assert client.state is to
    else:
        with pytest.raises(Refusal, match=f"c is {now} and cannot become {to}") as refusal:
            transitions.move_client(client, to)
        assert (refusal.value.reason, client.state) == ("client-state", now)


@pytest.mark.parametrize("to", AssignmentState)
@pytest.mark.parametrize("now", AssignmentState)
def test_an_assignment_ends_once(now: AssignmentState, to: AssignmentState) -> None:
    assignment = Assignment(assignment_id="a", state=now)
    if now is AssignmentState.OPEN and to is not AssignmentState.OPEN:
        transitions.end_assignment(assignment, to, NOW, "why", "in words")
        assert (assignment.state, assignment.ended) == (to, NOW)
        assert (assignment.reason, assignment.message) == ("why", "in words")
    else:
        with pytest.raises(transitions.IllegalTransition, match=f"assignment a cannot go from {now} to {to}"):
            transitions.end_assignment(assignment, to, NOW)
        assert assignment.state is now


def test_a_phase_closes_once() -> None:
    phase = Phase(phase_id=1, state=PhaseState.OPEN)
    transitions.close_phase(phase, NOW)
    assert (phase.state, phase.ended) == (PhaseState.CLOSED, NOW)
    with pytest.raises(transitions.IllegalTransition, match="phase 1 cannot go from CLOSED to CLOSED"):
        transitions.close_phase(phase, NOW)
