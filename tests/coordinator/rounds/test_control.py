"""What operators say to a run, several runs at a time, and a coordinator that stops and starts in between."""

import threading
from datetime import timedelta
from itertools import count
from pathlib import Path

import grpc
import pytest
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.remote import RemoteFleet
from coordinator.rounds.fleets.returning import RECONNECT_GRACE
from federation.transport.channels import refusal_from_rpc_error
from federation.v1.federation_pb2 import GetModelRequest
from storage.states import RoundState, RunState
from tests.coordinator.rounds.scene import at, compared, conducting, wait_rest
from tests.few import few
from tests.running import SECONDS, refused, wait_for
from tests.stage import Stage, answer, reply, spec
from tests.stage import stage as make_stage

MORE = "selection.minimum = 2"


# --- the pool


def test_clients_that_leave_while_a_round_is_opened_are_selected_or_none_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _ = stage.crew("ann", "ben")
    pool, calls = RemoteFleet.pool, count()

    def leaving(self: RemoteFleet, session: Session) -> dict[str, int]:
        """The second call is the first one of the transaction that selects."""
        return pool(self, session) if next(calls) < 2 else {}

    monkeypatch.setattr(RemoteFleet, "pool", leaving)
    run = stage.submit(spec("leaving", task, more=MORE))
    assert stage.wait_round(run, 0, RoundState.OPEN).selected == ["ann", "ben"]
    monkeypatch.undo()
    stage.stop_run(run)


# --- pause, resume, stop


def test_replies_to_open_assignments_count_while_a_run_is_paused_and_it_goes_on_where_it_was(stage: Stage) -> None:
    run, expected, ann, ben = compared(stage)
    first, second = ann.order(), ben.order()
    stage.pause(run)
    wait_rest(run)
    paused = stage.run(run)
    assert paused.state is RunState.PAUSED
    assert paused.reason.startswith("paused by ")
    ann.reply(first)
    ben.reply(second)
    assert stage.outcomes(run) == {"ann": ("FULFILLED", ""), "ben": ("FULFILLED", "")}
    assert stage.rounds(run)[0].state is RoundState.OPEN
    assert not ann.orders()
    stage.resume(run, ann, ben)
    assert stage.run(run).model == expected
    assert stage.assignment_ids(run) == {first.assignment_id, second.assignment_id}


def test_deadlines_go_on_while_a_run_is_paused(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", more="selection = { minimum = 2, quorum = 1.0 }")
    ann.answer()
    late = ben.order()
    stage.pause(run)
    wait_rest(run)
    stage.pass_deadline()
    with refused("FAILED_PRECONDITION", "deadline"):
        ben.submit(late)
    assert stage.rounds(run)[0].state is RoundState.OPEN
    stage.resume(run)
    assert stage.wait_round(run, 0).reason == "quorum: 1 of 2 members replied, 2 are needed"


def test_a_run_that_is_submitted_paused_asks_nobody_before_it_is_resumed(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", rounds=2, more=MORE, paused=True)
    stage.nudge()
    row = stage.run(run)
    assert (row.state, row.started, stage.rounds(run), conducting(run)) == (RunState.PAUSED, None, [], False)
    stage.restart()
    assert (stage.run(run).state, conducting(run)) == (RunState.PAUSED, False)
    stage.resume(run, ann, ben)
    assert stage.run(run).started is not None


def test_a_stop_cancels_what_is_open_and_keeps_the_last_model(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", rounds=3, more=MORE)
    for _ in ("train", "evaluate"):
        answer(ann, ben)
    first, second = ann.order(), ben.order()
    last = stage.rounds(run)[0].result_model
    ann.reply(first)
    stage.stop_run(run, "enough is enough")
    row = stage.run(run)
    assert (row.state, row.reason, row.model) == (RunState.STOPPED, "enough is enough", last)
    assert stage.outcomes(run, 1) == {"ann": ("FULFILLED", ""), "ben": ("CANCELLED", "run-ended")}
    ended = stage.rounds(run)[1]
    assert (ended.state, ended.reason) == (RoundState.SKIPPED, "the run ended: enough is enough")
    with refused("FAILED_PRECONDITION", "assignment-closed"):
        ben.submit(second)
    wait_for(lambda: ben.orders() or ben.cancelled, "the word to ben")
    assert [(c.assignment_id, c.reason) for c in ben.cancelled] == [(second.assignment_id, "run-ended")]
    wait_rest(run)
    assert not [phase for phase in stage.phases(run, 1) if phase.ended is None]


def test_what_cannot_be_is_refused_with_the_ways_that_there_are(stage: Stage) -> None:
    run, _ = stage.begin(more=MORE, paused=True)
    with refused("FAILED_PRECONDITION", "run-state") as message:
        stage.pause(run)
    assert message == [f"run {run} is PAUSED and cannot become PAUSED; possible now: RUNNING, STOPPED"]
    stage.resume(run)
    with refused("FAILED_PRECONDITION", "run-state"):
        stage.resume(run)
    stage.stop_run(run)
    for order in (stage.pause, stage.resume, stage.stop_run):
        with refused("FAILED_PRECONDITION", "run-state") as message:
            order(run)
        assert "possible now: nothing: it has ended" in message[0]


def test_a_name_is_given_once_at_a_time_however_many_ask_for_it(stage: Stage) -> None:
    task, reasons, ready = stage.task(), list[str](), threading.Barrier(8)

    def submit() -> None:
        ready.wait()
        try:
            reasons.append(stage.submit(spec("popular", task), paused=True) and "")
        except grpc.RpcError as error:
            reasons.append(refusal_from_rpc_error(error).reason)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reasons) == [""] + ["run-exists"] * 7


@few("after-patience")
@pytest.mark.parametrize(
    "more", ["", 'selection.required = ["ann"]\nselection.patience_seconds = 600'], ids=["minimum", "after-patience"]
)
def test_a_run_that_waits_for_clients_sleeps(stage: Stage, more: str) -> None:
    task, (ann,) = stage.crew("ann")
    changes: list[str] = []
    unwatch = stage.parts.changes.watchers.listen(changes.append)
    run = stage.submit(spec("patient", task, 2, seed=23, more=f"selection.minimum = 2\n{more}"))
    stage.wait_reason(run)
    stage.pass_deadline()  # absent required clients would be given up now; too few clients are waited for
    with at(f"run-{run}", "SELECT runs", lambda: None) as looks:
        for _ in range(20):
            stage.nudge()  # wakes it
    unwatch()
    # A conductor that woke itself would announce thousands, and one that did not wait would look all the time.
    assert changes.count(run) < 100, f"{changes.count(run)} changes were announced"
    assert len(looks) <= 100, f"it looked {len(looks)} times"
    (ben,) = stage.cast(task, "ben")
    stage.play(run, ann, ben)


def test_a_client_that_waits_for_approval_gets_nothing_until_it_has_it(tmp_path: Path, database_url: str) -> None:
    with make_stage(tmp_path / "coordinator", database_url, approval=True) as stage:
        pending = stage.player("pending")
        pending.attend(digits=10)
        run = stage.submit(spec("approval", "digits", more='selection.pool = "enrolled"'))
        assert stage.wait_reason(run) == "waiting for members: 0 of 1 are ready for digits"
        stage.nudge()
        pending.attend(digits=10)
        assert (pending.orders(), stage.rounds(run)) == ([], [])
        with refused("FAILED_PRECONDITION", "client-state"):
            pending.member.stub.GetModel(GetModelRequest(run=run, nonce=bytes(16)), timeout=SECONDS)
        stage.approve("pending")
        stage.play(run, pending)


# --- several runs


@pytest.mark.full
def test_runs_beside_each_other_come_to_what_each_comes_to_alone(stage: Stage) -> None:
    task, players = stage.crew("ann", "ben", "cleo")
    rules = {"fedavg": 1, "fedmgda": 2, "fedmgda+": 3}

    def text(name: str, suffix: str) -> bytes:
        more = "selection.minimum = 3"
        return spec(f"{suffix}-{rules[name]}", task, 2, seed=rules[name], algorithm=name, more=more)

    alone = {}
    for name in rules:
        run = stage.submit(text(name, "alone"))
        stage.play(run, *players)
        alone[name] = stage.run(run).model
    runs = {name: stage.submit(text(name, "together")) for name in rules}
    wait_for(lambda: all(len(stage.assignments(run)) == 3 for run in runs.values()), "every run to ask")
    assert len(set[str]().union(*(stage.assignment_ids(run) for run in runs.values()))) == 9
    for run in runs.values():
        stage.play(run, *players)
    assert {name: stage.run(run).model for name, run in runs.items()} == alone
    assert len(set(alone.values())) == 3


# --- restart by replay


@pytest.mark.parametrize("replied", [1, *(pytest.param(count, marks=pytest.mark.full) for count in (0, 2))])
def test_a_coordinator_that_stops_while_clients_train_goes_on_to_the_same_model(stage: Stage, replied: int) -> None:
    run, expected, ann, ben = compared(stage)
    orders = {player: player.order() for player in (ann, ben)}
    if replied == 2:
        stage.pause(run)  # both replies are in, and nothing was made of them
    for player in (ann, ben)[:replied]:
        player.reply(orders[player])
    stage.restart()
    if replied == 2:
        stage.resume(run)
    stage.play(run, *(ann, ben)[:replied], until=lambda: True)
    stage.restart()
    reply({player: orders[player] for player in (ann, ben)[replied:]})  # made before the restart, it counts after it
    stage.play(run, ann, ben)
    assert stage.run(run).model == expected
    assert stage.assignment_ids(run) == {order.assignment_id for order in orders.values()}


@pytest.mark.full
def test_a_coordinator_that_stops_in_the_evaluation_and_between_rounds_goes_on_to_the_same_model(stage: Stage) -> None:
    run, expected, ann, ben = compared(stage)
    answer(ann, ben)
    stage.wait_round(run, 0, RoundState.STEPPED)
    wait_for(lambda: len(stage.outcomes(run, 0, 1)) == 2, "the evaluation")
    evaluation = ann.order()
    step = stage.rounds(run)[0].step
    stage.restart()
    ann.reply(evaluation)
    stage.play(run, ann, ben, until=lambda: len(stage.rounds(run)) == 2)
    stage.restart()
    stage.play(run, ann, ben)
    assert stage.run(run).model == expected
    assert stage.rounds(run)[0].step == step
    assert len(stage.evaluations(run, 0)) == len(stage.evaluations(run, 1)) == 4


@pytest.mark.parametrize("passes", [2 * RECONNECT_GRACE, -timedelta(days=3)], ids=["grace", "set-back"])
def test_a_round_begins_with_those_who_come_back_after_a_restart_also_if_the_clock_is_set_back(
    stage: Stage, passes: timedelta
) -> None:
    run, (ann, ben, _) = stage.begin("ann", "ben", f"latecomer-{stage.count}", paused=True)
    stage.stop()
    stage.start()
    stage.resume(run)
    ann.attend(**ann.tasks)  # enough for the minimum
    assert stage.wait_reason(run, "come back") == "waiting for members to come back after a restart"
    ben.attend(**ben.tasks)
    stage.nudge()
    assert stage.rounds(run) == []
    stage.clock.ahead += passes  # the latecomer is given up
    stage.nudge()
    stage.play(run, ann, ben)
    assert stage.rounds(run)[0].selected == ["ann", "ben"]
