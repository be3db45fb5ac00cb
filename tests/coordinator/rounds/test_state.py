"""What a run keeps from round to round beside its model: an optimiser's vectors, a mean of models, the rule's state."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.aggregation.interface import Rows
from federation.aggregation.server_optimizers import FedAdam
from federation.digests import digest
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import to_bytes
from storage.models import Model, Round, Run
from storage.records import canonical
from storage.retention import collect
from storage.states import RoundState
from tests.federation.aggregation.scene import rule_named
from tests.running import SECONDS
from tests.stage import LAYOUT, MODEL, Player, Stage, answer, reply, vector

NAMES = ("ann", "ben", "cleo")
BASE = np.linspace(-1, 1, LAYOUT.size, dtype=np.float32)


def begin(stage: Stage, name: str, *, rounds: int = 3, more: str = "") -> tuple[str, list[Player]]:
    return stage.begin(*NAMES, rounds=rounds, algorithm=name, more=f"selection.minimum = 3\n{more}")


def sent(stage: Stage, run: str, number: int) -> NDArray[np.float64]:
    """U of a round, in the order of the clients."""
    orders = stage.orders(run, number)
    return np.array([vector(name, orders[name]) for name in NAMES], dtype=np.float64)


def narrow(values: NDArray[np.float64]) -> NDArray[np.float32]:
    return values.astype(np.float32)


def first_round(players: list[Player]) -> list[AssignmentManifest]:
    """The players train and evaluate as ever; returns what they are asked in the second round."""
    for _ in ("train", "evaluate"):
        answer(*players)
    return [player.order() for player in players]


def cancelling(stage: Stage, name: str, more: str, factors: tuple[int, ...]) -> tuple[Run, Run, Round]:
    """A run before and after a round in which everybody sends this much of one update, and the round."""
    run, players = begin(stage, name, rounds=2, more=more)
    orders = first_round(players)
    before = stage.run(run)
    u = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    for player, order, factor in zip(players, orders, factors, strict=True):
        player.reply(order, factor * u)
    stage.play(run, *players)
    return before, stage.run(run), stage.rounds(run)[1]


def collected(stage: Stage) -> None:
    """As if a day had passed: whatever the last round and the run's state do not name goes."""
    later = datetime.now(UTC) + timedelta(days=1)
    collect(stage.served.database, stage.blobs, now=later, grace_seconds=1, keep_rounds=1)


def exported(stage: Stage, run: str, number: int | None = None) -> str:
    """The digest of the model that an operator gets, of the run or of one of its rounds."""
    return next(stage._admin.ExportModel(admin.ExportModelRequest(run=run, round=number), timeout=SECONDS)).digest


@pytest.mark.full
def test_an_optimisers_vectors_are_kept_committed_to_and_collected_when_they_are_left(stage: Stage) -> None:
    server = 'server = { optimizer = "adam", learning_rate = 0.05, beta1 = 0.8, tau = 0.01 }'
    run, players = begin(stage, "fedavg", more=server)
    stage.play(run, *players)
    optimizer = FedAdam(beta1=0.8, tau=0.01)
    model = BASE
    slots = {slot: np.full(LAYOUT.size, optimizer.initial(slot)) for slot in optimizer.slots}
    state: dict[str, Any] = {}
    states: list[dict[str, Any]] = [{}]
    for round_ in stage.rounds(run):
        direction = np.full(3, 1 / 3) @ sent(stage, run, round_.number)
        step, after = optimizer.apply(direction, slots)
        model = narrow(model - 0.05 * step)
        slots = {slot: narrow(values).astype(np.float64) for slot, values in after.items()}
        assert round_.result_model == digest(to_bytes(LAYOUT, model))
        vectors = {slot: digest(to_bytes(LAYOUT, narrow(values))) for slot, values in slots.items()}
        state = {"rule": {}, "vectors": vectors, "blobs": sorted(vectors.values())}
        manifest = stage.step(run, round_.number)
        assert manifest.state_before == digest(canonical(states[-1]).encode())
        assert manifest.state_after == digest(canonical(state).encode())
        states.append(state)
    assert stage.run(run).state_data == state
    collected(stage)
    assert all(stage.blobs.exists(blob) for blob in states[-1]["blobs"])
    assert not any(stage.blobs.exists(blob) for before in states[1:-1] for blob in before["blobs"])


def test_a_stationary_round_changes_nothing_and_says_so(stage: Stage) -> None:
    before, after, last = cancelling(stage, "fedmgda", 'server.optimizer = "momentum"', (1, -1, 1))
    assert set(before.state_data["vectors"]) == {"momentum"}
    assert (last.reason, last.metrics["stationary"], stage.step(last.run_id, 1).rate) == ("stationary", 1.0, 0.0)
    assert (after.model, after.state_data) == (before.model, before.state_data)


def test_the_mean_of_all_models_is_what_is_evaluated_and_deployed(stage: Stage) -> None:
    run, players = begin(stage, "afl", more="server.learning_rate = 0.5")
    stage.play(run, *players)
    rule, state = rule_named("afl"), dict[str, Any]()
    model, average, averages = BASE, np.zeros(LAYOUT.size, dtype=np.float32), []
    for round_ in stage.rounds(run):
        U, updates = sent(stage, run, round_.number), stage.replies(run, round_.number)
        losses = np.array([updates[name].losses["loss"] for name in NAMES])
        shares, samples = np.full(3, 1 / 3), np.full(3, 10.0)
        rows = Rows(gram=U @ U.T, prior=shares, samples=samples, losses=losses, clients=NAMES, state=state)
        decided = rule.decide(rows)
        state = decided.state
        model = narrow(model - 0.5 * (decided.coefficients @ U))
        average = narrow(average + (model.astype(np.float64) - average) / (round_.number + 1))
        averages.append(digest(to_bytes(LAYOUT, average)))
        np.testing.assert_allclose(stage.parameters(round_.result_model), model, rtol=1e-5, atol=1e-6)
        measured = {row.model for row in stage.evaluations(run, round_.number).values()}
        (asked,) = {a.base_model for a in stage.assignments(run, round_.number, 1).values()}
        assert measured == {asked}
        np.testing.assert_allclose(stage.parameters(asked), average, rtol=1e-5, atol=1e-6)
        assert exported(stage, run, round_.number) == asked
    row = stage.run(run)
    assert row.state_data["vectors"] == {"average": asked}
    assert row.state_data["averaged"] == 3
    assert row.model != asked
    assert stage.look(lambda session: session.get_one(Model, asked).parameters) == LAYOUT.size
    told = stage._admin.GetRun(admin.GetRunRequest(run=run), timeout=SECONDS).run
    assert (told.model, told.averaged) == (asked, True)
    assert exported(stage, run) == asked
    collected(stage)
    assert stage.blobs.exists(asked)


def test_a_round_that_was_skipped_leaves_the_mean_as_it_was(stage: Stage) -> None:
    run, players = begin(stage, "afl")
    reply(dict(zip(players, first_round(players), strict=True)))
    answer(*players)
    for player in players:
        player.order()
    stage.pass_deadline()
    skipped = stage.wait_round(run, 2, RoundState.SKIPPED)
    assert exported(stage, run, 2) == exported(stage, run, 1) == exported(stage, run)
    assert exported(stage, run, 1) not in (exported(stage, run, 0), skipped.base_model)


def test_a_stationary_round_counts_its_model_once_more_in_the_mean(stage: Stage) -> None:
    before, after, last = cancelling(stage, "afl", "algorithm.gamma_lambda = 1e-300", (1, 1, -2))
    assert (last.reason, after.model, after.state_data["averaged"]) == ("stationary", before.model, 2)
    # The first model is counted twice: the mean stays.
    first, second = (stage.parameters(row.state_data["vectors"]["average"]) for row in (before, after))
    np.testing.assert_array_equal(first, second)


def test_a_median_has_no_coefficients_but_cosines(stage: Stage) -> None:
    run, players = begin(stage, "median", rounds=1, more="server.learning_rate = 0.5")
    stage.play(run, *players)
    (round_,) = stage.rounds(run)
    U = sent(stage, run, 0)
    direction = np.median(U, axis=0)
    assert round_.result_model == digest(to_bytes(LAYOUT, narrow(BASE - 0.5 * direction)))
    assert list(stage.step(run, round_.number).coefficients) == []
    updates = stage.replies(run)
    cosines = U @ direction / np.linalg.norm(U, axis=1) / np.linalg.norm(direction)
    for name, cosine in zip(NAMES, cosines, strict=True):
        assert updates[name].coefficient is None
        assert updates[name].weight == pytest.approx(1 / 3)
        assert updates[name].cosine == pytest.approx(cosine)
    assert round_.metrics["descent_min"] == pytest.approx(cosines.min())
    assert round_.metrics["direction_norm"] == pytest.approx(np.linalg.norm(direction))


def test_updates_whose_median_is_zero_are_no_step(stage: Stage) -> None:
    run, players = begin(stage, "median", rounds=1, more='server.optimizer = "yogi"')
    for i, player in enumerate(players):
        player.reply(player.order(), (np.arange(LAYOUT.size) % 3 == i).astype(np.float32))  # no two agree anywhere
    stage.play(run, *players)
    (round_,) = stage.rounds(run)
    assert (round_.reason, round_.result_model) == ("stationary", digest(MODEL))
    assert stage.run(run).state_data["vectors"] == {}
