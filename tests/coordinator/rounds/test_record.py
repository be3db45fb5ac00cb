"""What a round leaves behind: a third party recomputes it, byte by byte, from signed envelopes and payloads alone."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.rounds.step import _longest
from federation.aggregation.gram import apply_step, combine, gram
from federation.aggregation.interface import Combination
from federation.aggregation.metrics.step_rate import server_rate
from federation.aggregation.phases import Past, PhaseReply, Replies, Step
from federation.digests import digest
from federation.trust.envelope import envelope_digest, verify
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from federation.vectors import model_row, to_bytes, update_layout, update_rows
from fedpareto.offline_aggregation import aggregate
from storage.states import RoundState
from tests.federation.aggregation.scene import coefficients_of
from tests.few import few, few_of
from tests.stage import LAYOUT, MODEL, Player, Stage, measurements, vector


def play(
    stage: Stage, text: str, *, samples: tuple[int, ...] = (10, 20, 30), rounds: int = 2
) -> tuple[str, list[Player]]:
    algorithm, _, more = text.partition("\n")
    more += "\nselection.minimum = 3\nserver = { learning_rate = 0.7, decay = 0.5 }"
    run, players = stage.begin("ann", "ben", "cleo", rounds=rounds, samples=samples, algorithm=algorithm, more=more)
    stage.play(run, *players)
    return run, players


BY_SAMPLES = 'algorithm.prior = "samples"'
RULES = ["fedavg", f"fedavg\n{BY_SAMPLES}", "fedmgda", "fedmgda+\nalgorithm.epsilon = 0.1", f"fedmgda+\n{BY_SAMPLES}"]


@pytest.mark.parametrize("rule", few_of(RULES, RULES[-1]))
def test_a_third_party_recomputes_every_step_from_the_signed_record(stage: Stage, rule: str) -> None:
    run, players = play(stage, rule)
    keys = {player.name: player.member.files.signing_key.public_key() for player in players}
    model = digest(MODEL)
    for round_ in stage.rounds(run):
        step = stage.step(run, round_.number)
        assert (step.federation_id, step.run_id, step.round) == ("test", run, round_.number)
        assert (step.base_model, step.result_model) == (model, round_.result_model)
        assert step.algorithm == rule.partition("\n")[0]
        # Who took part, in the order of the rows, each with its own signature over what it sent.
        updates = stage.replies(run, round_.number).values()
        envelopes = {row.envelope_digest: SignedEnvelope.FromString(row.envelope) for row in updates}
        assert all(envelope_digest(envelope) == name for name, envelope in envelopes.items())
        manifests = []
        for name in step.replies:
            claimed = ReplyManifest.FromString(envelopes[name].manifest)
            manifests.append(verify(envelopes[name], ReplyManifest, keys[claimed.client_id]))
        assert [manifest.client_id for manifest in manifests] == ["ann", "ben", "cleo"]
        assert all((m.run_id, m.round, m.base_model) == (run, round_.number, model) for m in manifests)
        # The Gram matrix and the new model, from the payloads.
        rows = []
        for manifest in manifests:
            stage.blobs.verify(manifest.payload)
            rows.append(update_rows(stage.blobs.local(manifest.payload))["loss"])
        samples = np.array([manifest.samples for manifest in manifests], dtype=np.float64)
        prior = samples / samples.sum() if "samples" in rule else np.full(3, 1 / 3)
        epsilon: dict[str, Any] = {"epsilon": 0.1} if "epsilon" in rule else {}
        again = coefficients_of(aggregate(step.algorithm, rows, prior=prior, samples=samples, **epsilon))
        assert again.tolist() == list(step.coefficients)
        assert step.rate == server_rate(0.7, 0.5, round_.number, 2)
        matrix = np.array([stage.parameters(m.payload) for m in manifests], dtype=np.float64)
        stored = io.BytesIO()
        np.save(stored, gram(rows), allow_pickle=False)
        assert digest(stored.getvalue()) == step.gram == round_.gram
        K = np.load(io.BytesIO(stage.blobs.read(step.gram)))
        assert (K.dtype, K.shape) == (np.float64, (3, 3))
        np.testing.assert_allclose(K, matrix @ matrix.T, rtol=1e-12, atol=1e-12)
        made = io.BytesIO(LAYOUT.header)
        made.seek(0, io.SEEK_END)
        combined = combine(np.array(step.coefficients), rows)
        apply_step(model_row(stage.blobs.local(model)), step.rate, combined, made.write)
        assert digest(made.getvalue()) == step.result_model
        # And by arithmetic that shares no line with the coordinator's.
        base = stage.parameters(model).astype(np.float64)
        expected = (base - step.rate * (np.array(step.coefficients) @ matrix)).astype(np.float32)
        np.testing.assert_allclose(stage.parameters(step.result_model), expected, rtol=1e-6, atol=1e-7)
        model = step.result_model
    assert stage.run(run).model == model
    assert model != digest(MODEL)


def test_an_assignment_names_the_signed_step_that_made_its_model(stage: Stage) -> None:
    run, _ = play(stage, "fedmgda+", rounds=2)
    steps = [envelope_digest(SignedEnvelope.FromString(round_.step or b"")) for round_ in stage.rounds(run)]
    named = {
        (number, phase): {order.previous_step for order in stage.orders(run, number, phase).values()}
        for number in (0, 1)
        for phase in (0, 1)
    }
    # A round trains from the step before it, and evaluates its own.
    assert named == {(0, 0): {""}, (0, 1): {steps[0]}, (1, 0): {steps[0]}, (1, 1): {steps[1]}}


def test_the_facts_of_a_round_are_those_of_the_submitted_vectors(stage: Stage) -> None:
    run, _ = play(stage, "fedmgda+\nalgorithm.epsilon = 0.2", rounds=1)
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


def test_the_scores_of_a_round_are_those_that_the_clients_measured(stage: Stage) -> None:
    names = ("ann", "ben", "cleo", "dan")
    run, players = stage.begin(*names, more="selection = { minimum = 4, quorum = 0.5 }")
    before = {"ann": 1.0, "ben": 2.0, "cleo": 3.0}
    after = {"ann": 1.0, "ben": 2.5, "cleo": 0.5, "dan": 0.1}  # as it was, worse, better; dan did not train
    test = {"ann": 0.9, "ben": 0.8, "cleo": 0.1, "dan": 0.6}
    *_, dan = players
    for player in players[:3]:
        player.reply(player.order(), metrics={"train/loss": before[player.name]})
    dan.decline(dan.order(), "busy")
    for player in players:
        told = {"train/loss": after[player.name], "test/accuracy": test[player.name]}
        player.reply(player.order(), metrics=told)
    round_ = stage.wait_round(run, 0)
    accuracies = np.array(list(test.values()))
    expected = {
        "accuracy/mean": accuracies.mean(),
        "accuracy/std": accuracies.std(),
        "accuracy/variance": accuracies.var(),
        "accuracy/worst": 0.1,
        "accuracy/best": 0.9,
        "accuracy/worst5": 0.1,
        "accuracy/best5": 0.9,
        "accuracy/p5": np.percentile(accuracies, 5),
        "accuracy/p95": np.percentile(accuracies, 95),
        "improved": 2 / 3,
        "evaluated": 4.0,
        "loss/train": np.mean(list(after.values())),
    }
    assert {name: round_.metrics[name] for name in expected} == pytest.approx(expected)
    evaluations, orders = stage.evaluations(run), stage.orders(run, 0, 1)
    assert set(evaluations) == {(name, split) for name in names for split in ("train", "test")}
    for name in names:
        measured = measurements(name, orders[name])
        row = evaluations[name, "test"]
        assert (row.accuracy, row.samples, row.model) == (test[name], 2, round_.result_model)
        assert row.loss == measured["test/loss"]
        assert (evaluations[name, "train"].loss, evaluations[name, "train"].samples) == (after[name], 8)


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


@few("adam")
@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad"])
def test_a_second_moment_beyond_float32_skips_the_round_names_the_client_and_leaves_no_trace(
    stage: Stage, optimizer: str
) -> None:
    more = f'selection.minimum = 2\nserver = {{ optimizer = "{optimizer}", learning_rate = 0.01 }}\nlimits.norm = 1e40'
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more=more)
    ann.answer()
    ben.reply(ben.order(), np.full(LAYOUT.size, 1e30, np.float32))
    skipped = stage.wait_round(run, 0)
    assert skipped.state is RoundState.SKIPPED
    assert skipped.reason.startswith("non-finite: second leaves the range of float32")
    assert "the longest update is ben's, 6.71e+30: bound updates with algorithm.pre" in skipped.reason
    assert (stage.run(run).model, stage.run(run).state_data) == (digest(MODEL), {})


def test_what_would_overflow_the_second_moment_is_taken_once_updates_are_bounded(stage: Stage) -> None:
    more = 'algorithm.pre = ["normalize"]\nserver = { optimizer = "adam", learning_rate = 0.01 }\nlimits.norm = 1e40'
    run, (ben,) = stage.begin("ben", algorithm="fedavg", more=more)
    ben.reply(ben.order(), np.full(LAYOUT.size, 1e30, np.float32))
    stage.play(run, ben)
    assert stage.run(run).model != digest(MODEL)
