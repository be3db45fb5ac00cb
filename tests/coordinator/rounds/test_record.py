"""What a round leaves behind: the facts of its replies and of its step, its traffic, and why a step was not made."""

from dataclasses import replace

import numpy as np
import pytest

from coordinator.aggregation.interface import Combination
from coordinator.aggregation.phases import Past, PhaseReply, Replies, Step
from coordinator.rounds.step import _longest
from federation.digests import digest
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import SignedEnvelope
from federation.vectors import to_bytes, update_layout
from storage.states import RoundState
from tests.stage import LAYOUT, MODEL, Stage, vector


def play(stage: Stage, more: str = "", *, rounds: int = 2) -> str:
    """A run of FedMGDA+ that is over; returns its id."""
    more += "\nselection.minimum = 3\nserver = { learning_rate = 0.7, decay = 0.5 }"
    samples = (10, 20, 30)
    run, players = stage.begin("ann", "ben", "cleo", rounds=rounds, samples=samples, algorithm="fedmgda+", more=more)
    stage.play(run, *players)
    return run


def test_an_assignment_names_the_signed_step_that_made_its_model(stage: Stage) -> None:
    run = play(stage)
    steps = [envelope_digest(SignedEnvelope.FromString(round_.step or b"")) for round_ in stage.rounds(run)]
    named = {
        (number, phase): {order.previous_step for order in stage.orders(run, number, phase).values()}
        for number in (0, 1)
        for phase in (0, 1)
    }
    # A round trains from the step before it, and evaluates its own.
    assert named == {(0, 0): {""}, (0, 1): {steps[0]}, (1, 0): {steps[0]}, (1, 1): {steps[1]}}


def test_the_facts_of_a_round_are_those_of_the_submitted_vectors(stage: Stage) -> None:
    run = play(stage, "algorithm.epsilon = 0.2", rounds=1)
    round_ = stage.rounds(run)[0]
    updates = stage.replies(run)
    U = np.array([vector(name, order) for name, order in sorted(stage.orders(run).items())], dtype=np.float64)
    norms = np.linalg.norm(U, axis=1)
    weights = np.array([updates[name].weight for name in ("ann", "ben", "cleo")], dtype=np.float64)
    assert weights.sum() == pytest.approx(1)
    assert np.abs(weights - 1 / 3).max() <= 0.2 + 1e-12
    c = weights / norms
    direction = c @ U
    for i, name in enumerate(("ann", "ben", "cleo")):
        update = updates[name]
        assert update.norm == pytest.approx(norms[i])
        assert update.coefficient == pytest.approx(c[i])
        assert update.cosine == pytest.approx(U[i] @ direction / (norms[i] * np.linalg.norm(direction)))
        assert (update.samples, update.losses, update.metrics["train/samples"]) == (10 * (i + 1), {"loss": 2.0}, 8.0)
        assert update.payload == digest(to_bytes(update_layout([("loss", LAYOUT.size)]), U[i].astype(np.float32)))
    assert round_.metrics["step/rate"] == 0.7
    assert round_.metrics["direction_norm"] == pytest.approx(np.linalg.norm(direction))
    # The weights are the box's shortest: no direction along the simplex that stays in the box makes it shorter.
    unit = U / norms[:, None]
    slope = unit @ (weights @ unit)
    free = np.abs(weights - 1 / 3) < 0.2 - 1e-9
    if free.any():
        assert np.ptp(slope[free]) < 1e-7


def test_a_model_counts_as_traffic_once_for_each_client_that_fetches_it(stage: Stage) -> None:
    model = to_bytes(LAYOUT, np.full(LAYOUT.size, 7, np.float32))  # that no other test has handed out
    run, players = stage.begin("ann", "ben", rounds=2, algorithm="fedavg", more="selection.minimum = 2", model=model)
    stage.play(run, *players)
    for number, models in enumerate((2, 1)):  # the second round trains from the model that the first one evaluated
        numbers = stage.rounds(run)[number].metrics
        assert numbers["bytes/down"] == models * len(players) * len(model)
        assert numbers["bytes/up"] == sum(update.payload_bytes for update in stage.replies(run, number).values())
        assert numbers["bytes/refused"] == 0.0


def test_a_step_that_overflows_is_not_made(stage: Stage) -> None:
    huge = to_bytes(LAYOUT, np.full(LAYOUT.size, -3e38, np.float32))
    run, (ann,) = stage.begin("ann", algorithm="fedavg", more="limits.norm = 1e40", model=huge)
    ann.reply(ann.order(), np.full(LAYOUT.size, 3e38, np.float32))
    assert stage.wait_round(run, 0).reason.startswith("non-finite: ")
    assert stage.run(run).model == digest(huge)


def test_the_longest_update_is_named_also_if_it_is_of_an_earlier_round() -> None:
    short, long = np.ones(2, np.float32), np.full(2, 3.0, np.float32)
    ann = PhaseReply(client_id="ann", samples=1, losses={}, metrics={}, rows=(short, short))
    ben = PhaseReply(client_id="ben", samples=1, losses={}, metrics={}, rows=(2 * short,))
    past = Past(client_id="cleo", round=0, envelope="", payload="", row=long)
    now = Step(Replies([ann, ben]), Combination(np.ones(4), np.ones(3), {}, {}))
    assert "the longest update is ben's, 2.83" in _longest(now)
    assert "the longest update is cleo's, 4.24" in _longest(replace(now, history=(past,)))
    assert "the combined update has the norm 4.24" in _longest(replace(now, combined=long))


@pytest.mark.parametrize("optimiser", ["adam", "yogi", "adagrad"])
def test_a_second_moment_beyond_float32_skips_the_round_names_the_client_and_leaves_no_trace(
    stage: Stage, optimiser: str
) -> None:
    more = f'selection.minimum = 2\nserver = {{ optimiser = "{optimiser}", learning_rate = 0.01 }}\nlimits.norm = 1e40'
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more=more)
    ann.answer()
    ben.reply(ben.order(), np.full(LAYOUT.size, 1e30, np.float32))
    skipped = stage.wait_round(run, 0, RoundState.SKIPPED)
    assert skipped.reason.startswith("non-finite: second leaves the range of float32")
    assert "the longest update is ben's, 6.71e+30: bound updates with algorithm.pre" in skipped.reason
    assert (stage.run(run).model, stage.run(run).state_data) == (digest(MODEL), {})


def test_what_would_overflow_the_second_moment_is_taken_once_updates_are_bounded(stage: Stage) -> None:
    more = 'algorithm.pre = ["normalise"]\nserver = { optimiser = "adam", learning_rate = 0.01 }\nlimits.norm = 1e40'
    run, (ben,) = stage.begin("ben", algorithm="fedavg", more=more)
    ben.reply(ben.order(), np.full(LAYOUT.size, 1e30, np.float32))
    stage.play(run, ben)
    assert stage.run(run).model != digest(MODEL)
