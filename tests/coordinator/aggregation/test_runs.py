"""The algorithms in real runs: behind stages, with losses, and with fewer updates than they need."""

import json
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation import aggregate
from federation.vectors import to_bytes, update_layout
from storage.states import RoundState, RunState
from tests.coordinator.aggregation.scene import coefficients_of
from tests.few import few_of
from tests.stage import Stage, answer, reply, vector

NAMES = ("ann", "ben", "cleo", "dan", "eve")


RULES: dict[str, dict[str, Any]] = {
    "fedmgda+": {"pre": ["normalise", "nnm"], "byzantine": 1},
    "fedavg": {"pre": ["bucket"], "bucket_seed": 5},
    "fedmgda+auto": {},
    "dual-cone": {"pre": ["clip"]},
    "multi-krum": {"byzantine": 1, "select": 2},
    "geometric-median": {},
    "centred-clipping": {"iterations": 3},
}


@pytest.mark.parametrize("name", few_of(RULES, "fedmgda+", "centred-clipping"))
def test_a_run_steps_as_the_library_says(stage: Stage, name: str) -> None:
    keys = RULES[name]
    settings = "\n".join(f"algorithm.{key} = {json.dumps(value)}" for key, value in keys.items())
    run, players = stage.begin(*NAMES, algorithm=name, more=f"selection.minimum = 5\n{settings}")
    orders = {player: player.order() for player in players}
    U = np.array([vector(player.name, order) for player, order in orders.items()])
    reply(orders)
    stage.play(run, *players)
    expected = aggregate(name, U, **keys)
    updates = stage.replies(run)
    for told, computed in (("coefficient", coefficients_of(expected)), ("weight", expected.weights)):
        np.testing.assert_allclose([getattr(updates[who], told) for who in NAMES], computed, rtol=1e-12, atol=1e-15)


NEEDS = {
    ("krum", ""): "krum with byzantine = 1 needs at least 5",
    ("multi-krum", "algorithm.select = 2"): "multi-krum with byzantine = 1 needs at least 5",
    ("fedavg", 'algorithm.pre = ["nnm"]\nalgorithm.byzantine = 2'): "nnm with byzantine = 2 needs at least 5",
}


@pytest.mark.parametrize("rule", few_of(NEEDS, *[rule for rule in NEEDS if rule[0] != "multi-krum"]))
def test_a_round_with_fewer_updates_than_the_rule_needs_is_skipped_and_says_how_many_it_needs(
    stage: Stage, rule: tuple[str, str]
) -> None:
    name, more = rule
    run, players = stage.begin(*NAMES, rounds=2, algorithm=name, more=f"selection.minimum = 5\n{more}")
    answer(*players[:4])
    players[4].decline(players[4].order(), "busy")
    skipped = stage.wait_round(run, 0)
    assert (skipped.state, skipped.result_model) == (RoundState.SKIPPED, None)
    assert skipped.reason == f"aggregation: {NEEDS[rule]} updates; there are 4"
    stage.play(run, *players)
    assert stage.rounds(run)[1].state is RoundState.COMPLETED
    assert stage.run(run).state is RunState.COMPLETED


def test_a_client_that_reports_no_loss_is_left_out_of_a_rule_that_reads_losses(stage: Stage) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="q-fedavg", more="selection.minimum = 2")
    ann.answer()
    order = ben.order()
    payload = to_bytes(update_layout([(row.name, row.length, row.dtype) for row in order.rows]), vector("ben", order))
    manifest = ben.member.manifest(order, payload)
    manifest.losses.clear()
    assert ben.member.submit(ben.member.seal(manifest), payload).accepted
    stage.play(run, ann, ben)
    updates = stage.replies(run)
    assert (updates["ann"].weight, updates["ben"].weight) == (1.0, None)
