"""The operator's selection: members, tags, and clients without which there is no round."""

from pathlib import Path

import pytest

from federation.v1 import admin_pb2 as admin
from fedpareto.simulation import SimulationError
from fedpareto.simulation.simulate import Simulation
from storage.states import RoundState, RunState
from tests.running import SECONDS, refused
from tests.stage import Stage, answer, spec


def tag(stage: Stage, client: str, *tags: str) -> list[str]:
    request = admin.TagClientRequest(client_id=client, tags=admin.Tags(tags=tags))
    return list(stage._admin.TagClient(request, timeout=SECONDS).client.tags)


def begun(stage: Stage, task: str, more: str, rounds: int = 1) -> str:
    return stage.submit(spec(f"required-{stage.count}", task, rounds, more=more))


def test_a_round_asks_members_of_the_run_with_its_tags_and_nobody_who_is_excluded(stage: Stage) -> None:
    task, (ann, ben, cleo, dan) = stage.crew("ann", "ben", "cleo", "dan")
    assert tag(stage, "ann", "north", "large", "north") == ["large", "north"]
    assert [tag(stage, name, "north") for name in ("ben", "cleo")] == [["north"], ["north"]]
    more = "selection = { tags = ['north'], exclude = ['ben'], members = ['ann', 'cleo', 'dan'] }"
    run = begun(stage, task, more, rounds=2)
    stage.play(run, ann, ben, cleo, dan, until=lambda: len(stage.rounds(run)) == 2)
    assert stage.rounds(run)[0].selected == ["ann", "cleo"]
    assert tag(stage, "cleo") == []
    stage.complete(run, ann, ben, cleo, dan)
    for name in ("ann", "ben"):
        tag(stage, name)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("selection.members = ['ann', 'nobody-2']", "selection.members: there is no client 'nobody-2'"),
        ("selection.exclude = ['zoe']", "selection.exclude: there is no client 'zoe'"),
        ("selection.required = ['zoe']", "selection.required: there is no client 'zoe'"),
        ("selection.tags = ['nowhere']", "selection.tags: no client has the tag 'nowhere'; the tags are: none"),
        ("selection.required = ['ann']\nselection.exclude = ['ann']", "exclude and required both name 'ann'"),
    ],
)
def test_a_selection_of_clients_that_do_not_exist_is_refused(stage: Stage, more: str, words: str) -> None:
    with refused("INVALID_ARGUMENT", "spec") as messages:
        stage.begin("ann", more=more)
    assert words in messages[0]


@pytest.mark.parametrize("bad", ["North", "", "a b", "x" * 64])
def test_what_cannot_be_a_tag_is_refused(stage: Stage, bad: str) -> None:
    stage.player("ann")
    with refused("INVALID_ARGUMENT", "argument"):
        tag(stage, "ann", bad)
    with refused("NOT_FOUND", "client-unknown"):
        tag(stage, "zoe", "north")


def test_a_round_waits_for_a_required_client_and_says_for_whom(stage: Stage) -> None:
    task, (ann, ben) = stage.crew("ann", "ben")
    ben.leave()
    run = begun(stage, task, "selection.required = ['ben']")
    stage.wait_reason(run, "waiting for required members: ben does not attend")
    ben.attend(**{task: 10})
    stage.play(run, ann, ben)
    assert stage.wait_state(run, RunState.COMPLETED).reason == ""
    assert stage.rounds(run)[0].selected == ["ann", "ben"]


def test_a_round_is_skipped_after_its_patience_and_three_in_a_row_end_the_run(stage: Stage) -> None:
    task, [ann, ben] = stage.crew("ann", "ben")
    ben.leave()
    run = begun(stage, task, "selection.required = ['ben']\nselection.patience_seconds = 600", rounds=5)
    for number in range(3):
        stage.wait_reason(run, "waiting for required members: ben")
        assert len(stage.rounds(run)) == number
        stage.pass_deadline()
        skipped = stage.wait_round(run, number, RoundState.SKIPPED)
        assert skipped.reason == "required: ben does not attend, or does not offer the task"
        assert (skipped.selected, skipped.metrics["required/missing"]) == ([], 1.0)
        assert skipped.not_asked == {"ben": "does not attend, or does not offer the task"}
    failed = stage.wait_state(run, RunState.FAILED)
    assert "3 rounds in a row were skipped; the last one: required: ben" in failed.reason
    assert ann.orders() == []


def test_a_round_without_the_reply_of_a_required_client_makes_no_step(stage: Stage) -> None:
    more = "selection = { required = ['ben'], minimum = 3 }"
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", rounds=2, more=more)
    ben.decline(ben.order(), "limit:steps")
    answer(ann, cleo)
    skipped = stage.wait_round(run, 0, RoundState.SKIPPED)
    assert skipped.reason == "required: ben declined (limit:steps)"
    assert skipped.metrics["required/missing"] == 1.0
    stage.complete(run, ann, ben, cleo)
    assert stage.rounds(run)[1].state is RoundState.COMPLETED


FIRST_OF_THREE = "selection = { required = ['ben'], method = 'count', count = 1, over_selection = 3.0, minimum = 3 }"


def test_a_phase_with_enough_replies_waits_for_a_required_client(stage: Stage) -> None:
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", more=FIRST_OF_THREE)
    ann.answer()
    held = ben.order()
    assert stage.outcomes(run)["cleo"] == ("OPEN", "")
    ben.reply(held)
    stage.wait_round(run, 0, RoundState.STEPPED, RoundState.COMPLETED)
    assert stage.outcomes(run)["cleo"] == ("CANCELLED", "not-needed")
    assert set(stage.replies(run)) == {"ann", "ben"}
    cleo.kept = [(envelope, order) for envelope, order in cleo.orders() if order.phase != held.phase]
    stage.play(run, ann, ben, cleo)


def test_a_phase_waits_for_a_required_client_until_its_deadline(stage: Stage) -> None:
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", more=FIRST_OF_THREE)
    ann.answer()
    for player in (ben, cleo):
        player.order()
    stage.pass_deadline()
    assert stage.wait_round(run, 0, RoundState.SKIPPED).reason == "required: ben gave no reply"
    ended = {"ann": ("FULFILLED", ""), "ben": ("EXPIRED", "deadline"), "cleo": ("CANCELLED", "not-needed")}
    assert stage.outcomes(run) == ended


SIMULATED = b"""
name = "selected"
task = "digits"
rounds = 1
train.steps = 1
simulation.clients = 4
[selection]
"""


def test_a_simulation_honours_members_and_refuses_names_and_tags_that_it_does_not_have(tmp_path: Path) -> None:
    for keys, words in (
        (b"required = ['client-009']", "selection.required: there is no client 'client-009'; the 4 clients are"),
        (b"tags = ['north']", "selection.tags: simulated clients have no tags"),
        (b"members = ['client-001']\nminimum = 1\nexclude = ['client-004']", "selection.exclude: there is no client"),
    ):
        with pytest.raises(SimulationError, match=words):
            Simulation(SIMULATED + keys, tmp_path / "refused", threads=1)
    keys = b"members = ['client-001', 'client-003']\nrequired = ['client-003']"
    with Simulation(SIMULATED + keys, tmp_path / "run", threads=1) as simulation:
        assert set(simulation.run().members["client"]) == {"client-001", "client-003"}
