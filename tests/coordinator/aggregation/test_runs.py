"""The algorithms in real runs: behind stages, with losses, and with fewer updates than they need."""

import json
from typing import Any

import numpy as np
import pytest

from coordinator.aggregation import aggregate
from federation.vectors import to_bytes, update_layout
from storage.states import RoundState, RunState
from tests.stage import Stage, spec, vector

NAMES = ("ann", "ben", "cleo", "dan", "eve")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fedmgda+", {"pre": ["normalise", "nnm"], "byzantine": 1}),
        pytest.param("fedavg", {"pre": ["bucket"], "bucket_seed": 5}, marks=pytest.mark.full),
        pytest.param("fedmgda+auto", {}, marks=pytest.mark.full),
        pytest.param("dual-cone", {"pre": ["clip"]}, marks=pytest.mark.full),
        pytest.param("multi-krum", {"byzantine": 1, "select": 2}, marks=pytest.mark.full),
        pytest.param("geometric-median", {}, marks=pytest.mark.full),
        ("centred-clipping", {"iterations": 3}),
    ],
)
def test_a_run_steps_as_the_library_says(stage: Stage, name: str, keys: dict[str, Any]) -> None:
    task = stage.task()
    players = stage.cast(task, *NAMES)
    settings = "\n".join(f"algorithm.{key} = {json.dumps(value)}" for key, value in keys.items())
    run = stage.submit(spec(task, task, algorithm=name, more=f"selection.minimum = 5\n{settings}"))
    orders = [player.order() for player in players]
    U = np.array([vector(player.name, order) for player, order in zip(players, orders, strict=True)])
    for player, order in zip(players, orders, strict=True):
        player.reply(order)
    stage.play(run, *players)
    expected = aggregate(name, U, **keys)
    updates = stage.replies(run)
    for told, computed in (("coefficient", expected.coefficients), ("weight", expected.weights)):
        np.testing.assert_allclose([getattr(updates[who], told) for who in NAMES], computed, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "more", "needs"),
    [
        ("krum", "", "krum with byzantine = 1 needs at least 5"),
        pytest.param(
            "multi-krum",
            "algorithm.select = 2",
            "multi-krum with byzantine = 1 needs at least 5",
            marks=pytest.mark.full,
        ),
        ("fedavg", 'algorithm.pre = ["nnm"]\nalgorithm.byzantine = 2', "nnm with byzantine = 2 needs at least 5"),
    ],
)
def test_a_round_with_fewer_updates_than_the_rule_needs_is_skipped_and_says_how_many_it_needs(
    stage: Stage, name: str, more: str, needs: str
) -> None:
    task = stage.task()
    players = stage.cast(task, *NAMES)
    run = stage.submit(spec(task, task, rounds=2, algorithm=name, more=f"selection.minimum = 5\n{more}"))
    for player in players[:4]:
        player.reply(player.order())
    players[4].decline(players[4].order(), "busy")
    skipped = stage.wait_round(run, 0)
    assert (skipped.state, skipped.result_model) == (RoundState.SKIPPED, None)
    assert skipped.reason == f"aggregation: {needs} updates; there are 4"
    stage.play(run, *players)
    assert stage.rounds(run)[1].state is RoundState.COMPLETED
    assert stage.run(run).state is RunState.COMPLETED


def test_a_client_that_reports_no_loss_is_left_out_of_a_rule_that_reads_losses(stage: Stage) -> None:
    task = stage.task()
    ann, ben = stage.cast(task, "ann", "ben")
    run = stage.submit(spec("lossless", task, algorithm="q-fedavg", more="selection.minimum = 2"))
    ann.reply(ann.order())
    order = ben.order()
    payload = to_bytes(update_layout([(row.name, row.length, row.dtype) for row in order.rows]), vector("ben", order))
    manifest = ben.member.manifest(order, payload)
    manifest.losses.clear()
    assert ben.member.submit(ben.member.seal(manifest), payload).accepted
    stage.play(run, ann, ben)
    updates = stage.replies(run)
    assert (updates["ann"].weight, updates["ben"].weight) == (1.0, None)
