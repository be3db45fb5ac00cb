"""Rounds of simulated clients: over-selection, without measuring, and over several objectives."""

from pathlib import Path

import numpy as np
import pytest

from federation.spec.run_spec import SpecError
from fedpareto.face.simulated import simulate
from fedpareto.simulation.simulate import Simulation
from tests.fedpareto.simulation import scene as simulations
from tests.fedpareto.simulation.scene import OBJECTIVES, close, spec

one_thread = simulations.one_thread  # a fixture


def test_with_over_selection_a_round_takes_as_many_replies_as_it_wants() -> None:
    text = spec(clients=6, fraction=0.5, rounds=2).replace("[simulation]", "over_selection = 2.0\n\n[simulation]")
    history = simulate(text)
    for _, asked in history.replies.groupby("round"):
        assert len(asked) == 6
        assert asked["accepted"].sum() == 3
        assert set(asked[~asked["accepted"]]["reason"]) == {"not-needed"}


@pytest.mark.full
def test_without_measuring_the_model_is_the_same_and_losses_before_a_step_are_unknown() -> None:
    measured = simulate(spec())
    bare = simulate(spec().replace("[train]", "[train]\nmeasure = false"))
    np.testing.assert_array_equal(bare.model, measured.model)
    assert measured.rounds["improved"].notna().all()
    assert "improved" not in bare.rounds
    assert measured.replies["loss"].notna().all()
    assert bare.replies["loss"].isna().all()


def test_replies_have_each_clients_share_in_the_step_also_if_phases_follow_the_training() -> None:
    history = simulate(spec(algorithm="fedmdfg", rounds=1))
    assert len(history.replies) == 4
    assert (history.replies["cosine"] > 0).all()
    assert history.replies["weight"].sum() == pytest.approx(1.0)
    assert history.replies[["loss", "norm", "coefficient"]].notna().all(axis=None)


@pytest.mark.parametrize("algorithm", ["q-fedavg", "fedfa"])
def test_a_rule_that_needs_measurements_cannot_do_without(algorithm: str) -> None:
    with pytest.raises(SpecError, match=f"train.measure: {algorithm} needs what clients measure"):
        simulate(spec(algorithm=algorithm).replace("[train]", "[train]\nmeasure = false"))


def test_objectives_that_a_task_does_not_have_are_named() -> None:
    text = OBJECTIVES.format(algorithm='name = "fedcmoo"', objectives="all")
    for names, words in (
        ('["left", "up"]', "left, up are not those of two-digits, which has left, right"),
        ('["left"]', "left are not those of two-digits"),
        ('["left", "left"]', "each once"),
    ):
        with pytest.raises(SpecError, match=words):
            simulate(f"{text}\n[objectives]\nnames = {names}\n")
    with pytest.raises(SpecError, match=r"objectives\.serve\.client-000: no objective 'up'"):
        simulate(f"{text}\n[objectives.serve]\nclient-000 = ['up']\n")


@pytest.mark.parametrize(
    ("algorithm", "objectives"),
    [
        pytest.param('name = "fedcmoo"\nunbiased = true', "cycle:1", marks=pytest.mark.full),
        ('name = "fedcmoo"\nsketch = "svd-two-way"\nlatecomers = true', "all"),
        pytest.param('name = "fedcmoo-pref"\nsketch = "exact"', "all", marks=pytest.mark.full),
        pytest.param('name = "fsmgda"', "cycle:1", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_rounds_over_objectives_may_be_stacked_and_are_resumed_to_the_same_bytes(
    tmp_path: Path, algorithm: str, objectives: str
) -> None:
    text = OBJECTIVES.format(algorithm=algorithm, objectives=objectives)
    one, all_at_once = (simulate(text, backend=backend) for backend in ("loop", "stacked"))
    close(all_at_once.model, one.model)
    with Simulation(text.encode(), tmp_path / "home", backend="loop") as simulation:
        assert simulation.run(lambda progress: simulation.stop()).state == "PAUSED"
    rest = simulate(text, home=tmp_path / "home", backend="loop", resume=True)
    assert (rest.state, rest.model.tobytes()) == ("COMPLETED", one.model.tobytes())


@pytest.mark.full
@pytest.mark.parametrize(
    ("sketch", "attack", "reason"), [("count", "nan", "failed"), ("svd-two-way", "scale=1e30", "limit:norm")]
)
def test_gradients_that_no_sketch_can_hold_end_no_simulation(sketch: str, attack: str, reason: str) -> None:
    text = OBJECTIVES.format(algorithm=f'name = "fedcmoo"\nsketch = "{sketch}"', objectives="all")
    text = text.replace('method = "count"\ncount = 4\nover_selection = 1.5', "quorum = 0.1")
    history = simulate(text + f'attackers = 2\nattack = "{attack}"\n')
    assert history.state == "COMPLETED", history.reason
    assert history.round_records[0]["state"] == "COMPLETED"
    assert reason in {record["reason"] for record in history.reply_records}
