"""Rounds: who is asked, how many must answer, by when; and what becomes of everybody else, with its reason."""

import math
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from coordinator.rounds import selection
from federation.digests import digest
from federation.spec.run_spec import RunSpec
from federation.v1.federation_pb2 import Heartbeat
from storage.models import AuditEntry
from storage.states import PhaseState, RoundState, RunState
from tests.running import command, refused, wait_for
from tests.stage import MODEL, Stage, spec


def test_a_run_goes_from_its_first_round_to_its_last(stage: Stage) -> None:
    run, players = stage.begin("ann", "ben", "cleo", rounds=3, more="selection.minimum = 3")
    stage.play(run, *players)
    row, rounds = stage.run(run), stage.rounds(run)
    assert (row.reason, row.initial_model) == ("", digest(MODEL))
    assert row.started is not None
    assert row.ended is not None
    assert [round_.state for round_ in rounds] == [RoundState.COMPLETED] * 3
    assert [round_.base_model for round_ in rounds] == [row.initial_model, *(r.result_model for r in rounds[:2])]
    assert row.model == rounds[2].result_model
    assert len({row.initial_model, *(round_.result_model for round_ in rounds)}) == 4
    for number in range(3):
        phases = [(phase.kind, phase.state) for phase in stage.phases(run, number)]
        assert phases == [("train", PhaseState.CLOSED), ("evaluate", PhaseState.CLOSED)]
        for phase in (0, 1):
            assert stage.outcomes(run, number, phase) == dict.fromkeys(("ann", "ben", "cleo"), ("FULFILLED", ""))


def test_models_are_evaluated_every_so_many_rounds_and_in_the_last_one_and_the_end_is_on_record(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", rounds=5, more="selection.minimum = 1\nevaluate.every = 2")
    stage.play(run, ann)
    evaluated = ["evaluate" in [phase.kind for phase in stage.phases(run, number)] for number in range(5)]
    assert evaluated == [False, True, False, True, True]
    _, end = stage.served.entries(AuditEntry.action.startswith("run."), subject=run)
    assert (end.actor, end.action, end.detail) == ("coordinator", "run.completed", "")


# --- how many answers count


def test_over_selection_takes_the_first_answers_and_tells_the_others_to_stop(stage: Stage) -> None:
    more = 'selection = { method = "count", count = 2, over_selection = 2.0, minimum = 4 }\nevaluate.every = 0'
    run, (ann, ben, cleo, dan) = stage.begin("ann", "ben", "cleo", "dan", rounds=2, more=more)
    orders = {player: player.order() for player in (ann, ben, cleo, dan)}
    first = stage.rounds(run)[0]
    assert (first.selected, first.wanted, stage.phases(run)[0].wanted) == (["ann", "ben", "cleo", "dan"], 2, 2)
    dan.reply(orders[dan])
    ben.reply(orders[ben])
    stage.wait_round(run, 0)
    needless = dict.fromkeys(("ann", "cleo"), ("CANCELLED", "not-needed"))
    assert stage.outcomes(run) == needless | dict.fromkeys(("ben", "dan"), ("FULFILLED", ""))
    assert {name for name, update in stage.replies(run).items() if update.weight is not None} == {"ben", "dan"}
    for late in (ann, cleo):
        with refused("FAILED_PRECONDITION", "assignment-closed") as message:
            late.submit(orders[late])
        assert "not-needed" in message[0]
        wait_for(lambda: late.orders() or late.cancelled, f"a word to {late.name}")  # noqa: B023
        (cancelled,) = late.cancelled
        assert (cancelled.assignment_id, cancelled.reason) == (orders[late].assignment_id, "not-needed")
    assert not ben.cancelled


def test_a_round_without_its_quorum_is_skipped_and_the_next_one_goes_on_from_the_same_model(stage: Stage) -> None:
    more = "selection = { minimum = 3, quorum = 0.6 }"
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", rounds=2, more=more)
    order, late, _ = ann.order(), ben.order(), cleo.order()
    ann.reply(order)
    stage.pass_deadline()
    skipped = stage.wait_round(run, 0)
    assert (skipped.state, skipped.result_model, skipped.step) == (RoundState.SKIPPED, None, None)
    assert skipped.reason == "quorum: 1 of 3 members replied, 2 are needed"
    late_ones = dict.fromkeys(("ben", "cleo"), ("EXPIRED", "deadline"))
    assert stage.outcomes(run) == {"ann": ("FULFILLED", "")} | late_ones
    with refused("FAILED_PRECONDITION", "deadline"):
        ben.submit(late)
    stage.play(run, ann, ben, cleo)
    second = stage.rounds(run)[1]
    assert (second.state, second.base_model) == (RoundState.COMPLETED, digest(MODEL))
    assert stage.run(run).model == second.result_model


def test_a_quorum_that_is_met_at_the_deadline_makes_a_step_without_the_stragglers(stage: Stage) -> None:
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", more="selection = { minimum = 3, quorum = 0.6 }")
    ann.answer()
    ben.answer()
    straggler = cleo.order()
    stage.pass_deadline()
    stage.wait_round(run, 0, RoundState.STEPPED)
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "deadline")
    assert cleo.order().base_model == stage.rounds(run)[0].result_model
    assert (cleo.cancelled[0].assignment_id, cleo.cancelled[0].reason) == (straggler.assignment_id, "deadline")
    # The evaluation asks the straggler too, and has a deadline of its own.
    assert set(stage.outcomes(run, 0, 1)) == {"ann", "ben", "cleo"}
    ann.answer()
    stage.pass_deadline()
    stage.wait_state(run, RunState.COMPLETED)
    assert {client for client, _ in stage.evaluations(run)} == {"ann"}
    assert stage.outcomes(run, 0, 1)["cleo"] == ("EXPIRED", "deadline")


def test_rounds_that_are_skipped_in_a_row_fail_the_run(stage: Stage) -> None:
    more = "selection = { minimum = 2, quorum = 1.0 }\nlimits.skipped_rounds = 2\nevaluate.every = 0"
    run, (ann, ben) = stage.begin("ann", "ben", rounds=9, more=more)
    replies = [1, 2, 1, 0]  # a step in between starts the count of skipped rounds again
    for number, count in enumerate(replies):
        for i, player in enumerate((ann, ben)):
            order = player.order()
            if i < count:
                player.reply(order)
            else:
                player.decline(order, "busy")
        stage.wait_round(run, number)
    failed = stage.wait_state(run, RunState.FAILED)
    quorum = "quorum: 0 of 2 members replied, 2 are needed"
    why = "2 rounds in a row were skipped, with busy in 4 of 4 failed answers"
    assert failed.reason == f"{why}; the last one: {quorum}"
    assert failed.model == stage.rounds(run)[1].result_model
    assert len(stage.rounds(run)) == 4


def test_a_run_in_which_no_round_has_made_a_step_fails_and_its_model_is_the_initial_one(
    stage: Stage, tmp_path: Path
) -> None:
    run, (ann,) = stage.begin("ann", rounds=2)
    for number in range(2):
        ann.decline(ann.order(), "busy")
        stage.wait_round(run, number)
    failed = stage.wait_state(run, RunState.FAILED)
    last = "the last one: quorum: 0 of 1 members replied, 1 are needed"
    assert failed.reason == f"no step was made in any of its 2 rounds, with busy in 2 of 2 failed answers; {last}"
    assert failed.model == failed.initial_model

    def said(*arguments: object, code: int = 0) -> str:
        done = command(*arguments, code=code)
        return " ".join(f"{done.output} {done.exception or ''}".split())

    home = ("--home", stage.served.home.admin_dir)
    told = said("admin", *home, "watch", run, code=1)
    assert f"did not complete: FAILED {failed.reason}" in told
    assert "its model" not in told
    model, bundle, page = (tmp_path / name for name in ("model.safetensors", "run.fedpareto", "report.html"))
    assert "the model that the run began with" in said("admin", *home, "export", run, "--out", model)
    best = ("--best", "loss", "--out", tmp_path / "best")
    assert "no model of run" in said("admin", *home, "export", run, *best, code=1)
    said("admin", *home, "bundle", run, "--payloads", "--yes", "--out", bundle)
    assert "everything else was verified" in said("verify", bundle, "--model", model)
    said("report", run, *home, "--out", page)
    assert "the initial one: no round has made a step" in page.read_text()


def test_a_client_that_declines_is_not_waited_for_and_its_reason_is_kept(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", more="selection = { minimum = 2, quorum = 0.5 }")
    ben.decline(ben.order(), "disk-full", "no room for the\x1b[31m model")
    ann.answer()
    stage.wait_round(run, 0, RoundState.STEPPED)
    declined = stage.assignments(run)["ben"]
    assert (declined.state, declined.reason) == ("DECLINED", "disk-full")
    assert declined.message == r"no room for the\x1b[31m model"
    stage.play(run, ann, ben)


def test_each_phase_has_the_deadline_of_its_kind(stage: Stage) -> None:
    task, (ann,) = stage.crew("ann")
    text = spec("deadlines", task).decode().replace("train.deadline_seconds = 900", "train.deadline_seconds = 77")
    run = stage.submit(text.encode())
    train = ann.order()
    ann.reply(train)
    evaluate = ann.order()
    for order, seconds in ((train, 77), (evaluate, 900)):
        assert (order.deadline.ToDatetime() - order.created.ToDatetime()).total_seconds() == seconds
    phases = stage.phases(run)
    assert [(phase.deadline - phase.started).total_seconds() for phase in phases] == [77, 900]


# --- who is asked


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        pytest.param('method = "all"', 5, marks=pytest.mark.full),
        pytest.param('method = "fraction", fraction = 0.5', 3, marks=pytest.mark.full),
        pytest.param('method = "count", count = 2', 2, marks=pytest.mark.full),
        pytest.param('method = "count", count = 2, by = "samples"', 2, marks=pytest.mark.full),
        ('method = "count", count = 2, over_selection = 1.5', 3),
    ],
)
def test_selection_is_seeded_and_recorded(stage: Stage, rule: str, asked: int) -> None:
    names, samples = ("ann", "ben", "cleo", "dan", "eve"), (10, 20, 30, 40, 1000)
    more = f"selection = {{ {rule}, minimum = 5 }}"
    run, players = stage.begin(*names, rounds=3, samples=samples, seed=17, more=more)
    rules = RunSpec.parse(stage.run(run).spec).selection

    def act() -> None:
        for player in players:
            for _, order in player.orders():
                with suppress(grpc.RpcError):  # enough others were quicker
                    player.reply(order)

    stage.play(run, until=act)
    for number, round_ in enumerate(stage.rounds(run)):
        expected = selection.select(rules, dict(zip(names, samples, strict=True)), seed=17, round_number=number)
        assert round_.selected == expected
        assert len(expected) == asked
        assert round_.wanted == math.ceil(asked / rules.over_selection)
        assert sorted(stage.assignments(run, number)) == expected
        # Evaluated is everybody.
        assert sorted(stage.assignments(run, number, 1)) == sorted(names)


def test_a_pool_of_those_who_attend_leaves_the_absent_alone_and_a_pool_of_the_enrolled_does_not(stage: Stage) -> None:
    task, (ann, ben) = stage.crew("ann", "ben")
    stage.hang_up(ben)
    attending = stage.submit(spec("attending", task, more='selection.pool = "attending"'))
    stage.play(attending, ann)
    assert set(stage.outcomes(attending)) == set(stage.outcomes(attending, 0, 1)) == {"ann"}
    enrolled = stage.submit(spec("enrolled", task, more='selection.pool = "enrolled"'))
    ann.answer()
    assert stage.outcomes(enrolled) == {"ann": ("FULFILLED", ""), "ben": ("OPEN", "")}
    ben.attend(**{task: 10})  # finds its assignment waiting
    stage.play(enrolled, ann, ben)
    assert stage.outcomes(enrolled) == {"ann": ("FULFILLED", ""), "ben": ("FULFILLED", "")}


def test_a_preference_is_refused_at_submission_where_cvxpy_is_not_installed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = spec("preferred", stage.task(), algorithm="fedcmoo-pref")
    stage.dry_run(document)
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with refused("INVALID_ARGUMENT", "spec") as messages:
        stage.submit(document)
    assert 'not installed here: pip install "fedpareto[preference]"' in messages[0]


def test_a_run_of_a_task_that_no_member_offers_says_at_submission_and_while_it_waits_what_they_offer(
    stage: Stage,
) -> None:
    task, _ = stage.crew("ann", "ben")
    (warning,) = stage.dry_run(spec("misnamed", "digitz")).warnings
    assert warning.startswith("no member offers digitz; they offer ")
    assert f"{task} (2 members)" in warning
    assert "fedpareto worker run --task digitz" in warning
    run = stage.submit(spec("misnamed", "digitz"))
    waits = "waiting for members: 0 of 1 are ready for digitz; no member offers digitz; they offer "
    assert stage.wait_reason(run).startswith(waits)
    stage.stop_run(run)


def test_a_round_waits_for_its_minimum_and_says_so(stage: Stage) -> None:
    task = stage.task()
    ann, _ = stage.cast(task, "ann", "ben", samples=(10, 0))  # ben offers the task, and holds nothing to train on
    run = stage.submit(spec("minimum", task, more="selection.minimum = 3"))
    assert stage.wait_reason(run) == f"waiting for members: 1 of 3 are ready for {task}"
    assert stage.run(run).state is RunState.RUNNING
    assert (stage.rounds(run), ann.orders()) == ([], [])
    changes: list[str] = []
    unwatch = stage.parts.changes.watchers.listen(changes.append)
    (cleo,) = stage.cast(task, "cleo")
    after = f"waiting for members: 2 of 3 are ready for {task}"
    wait_for(lambda: stage.run(run).reason == after, "the new reason")  # the word about the first may come this late
    wait_for(lambda: run in changes, "a word to those that watch the run")
    unwatch()
    (dan,) = stage.cast(task, "dan")
    wait_for(lambda: stage.rounds(run), "the first round")
    assert stage.run(run).reason == ""  # while the run is RUNNING: its end would clear the reason, too
    stage.play(run, ann, cleo, dan)
    assert stage.rounds(run)[0].selected == ["ann", "cleo", "dan"]


def test_a_client_that_joins_while_a_run_is_under_way_takes_part_from_the_next_round_on(stage: Stage) -> None:
    task, (ann,) = stage.crew("ann")
    run = stage.submit(spec("joined", task, rounds=2))
    order = ann.order()
    (newcomer,) = stage.cast(task, f"newcomer-{stage.count}")
    assert newcomer.orders() == []
    ann.reply(order)
    stage.play(run, ann, newcomer)
    assert [round_.selected for round_ in stage.rounds(run)] == [["ann"], ["ann", newcomer.name]]
    # The clients that are present evaluate the model.
    assert set(stage.outcomes(run, 0, 1)) == {"ann", newcomer.name}


def test_a_client_that_is_revoked_is_not_waited_for(stage: Stage) -> None:
    run, (ann, gone) = stage.begin("ann", f"gone-{stage.count}", rounds=2, more="selection.quorum = 0.5")
    mine, theirs = ann.order(), gone.order()
    stage.revoke(gone.name)
    wait_for(lambda: stage.outcomes(run)[gone.name] == ("CANCELLED", "client-revoked"), "the assignment to be void")
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        gone.submit(theirs)
    ann.reply(mine)
    stage.play(run, ann)
    assert [round_.selected for round_ in stage.rounds(run)] == [["ann", gone.name], ["ann"]]
    assert set(stage.outcomes(run, 0, 1)) == {"ann"}


def test_a_sign_of_life_in_the_middle_of_work_is_seen(stage: Stage) -> None:
    _, (ann,) = stage.begin("ann")
    order = ann.order()
    ann.say(heartbeat=Heartbeat(assignment_id=order.assignment_id, progress=0.5))
    presence = stage.parts.presence
    wait_for(lambda: presence.streams()["ann"].progress == 0.5, "the progress")
    assert presence.streams()["ann"].assignment_id == order.assignment_id
