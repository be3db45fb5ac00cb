"""A disk that loses or alters bytes: the run is held with a reason that names the blob, and goes on once repaired."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.states import RoundState, RunState
from tests.coordinator.rounds.scene import Repair, compared, cut, flip, lose
from tests.few import few_of
from tests.stage import Stage, reply, spec
from tests.storage.scene import blob_file

Damage = Callable[[Path], Repair]


WORDS: dict[Damage, str] = {flip: "the bytes of blob", cut: "the bytes of blob", lose: "there is no blob"}


@pytest.mark.parametrize("damage", few_of(WORDS, lose))
@pytest.mark.full
def test_a_damaged_update_holds_the_run_until_it_is_repaired(stage: Stage, damage: Damage) -> None:
    run, expected, ann, ben = compared(stage)
    second = ben.order()
    ann.answer()
    payload = stage.replies(run)["ann"].payload
    repair = damage(blob_file(stage.blobs, payload))
    ben.reply(second)
    held = stage.wait_state(run, RunState.PAUSED)
    assert held.reason.startswith(f"storage: {WORDS[damage]} {payload} ")
    assert held.reason.endswith("repair it, then resume the run")
    assert stage.rounds(run)[0].state is RoundState.OPEN
    stage.resume(run)  # nothing was repaired: nothing has changed
    assert payload in stage.wait_reason(run, payload)
    repair()
    stage.resume(run, ann, ben)
    assert stage.run(run).model == expected


@pytest.mark.parametrize("damage", few_of(WORDS, cut))
def test_a_damaged_model_holds_the_run_until_it_is_repaired(stage: Stage, damage: Damage) -> None:
    run, expected, ann, ben = compared(stage)
    orders = {player: player.order() for player in (ann, ben)}
    model = stage.rounds(run)[0].base_model
    repair = damage(blob_file(stage.blobs, model))
    reply(orders)
    assert stage.wait_state(run, RunState.PAUSED).reason.startswith(f"storage: {WORDS[damage]} {model}")
    repair()
    stage.restart()
    assert stage.run(run).state is RunState.PAUSED  # a restart resumes nothing that an operator has not
    stage.resume(run, ann, ben)
    assert stage.run(run).model == expected


def test_a_run_beside_a_damaged_one_goes_on(stage: Stage) -> None:
    run, _, ann, ben = compared(stage)
    beside = stage.submit(spec("beside", stage.task(), more="selection.minimum = 1"))
    (cleo,) = stage.cast(f"task-{stage.count}", "cleo")
    second = ben.order()
    ann.answer()
    repair = flip(blob_file(stage.blobs, stage.replies(run)["ann"].payload))
    ben.reply(second)
    stage.wait_state(run, RunState.PAUSED)
    stage.play(beside, cleo)
    repair()
