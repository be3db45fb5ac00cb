"""FedMDFG: its direction against a solver of SciPy, its line search against brute force, and whole rounds of it."""

import json
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text

import fedpareto
from coordinator.rounds.runs.specification import cautions, parse_run
from federation.aggregation.rules.fedmdfg import choose, step_sizes, unfairness
from federation.spec.computation import MeasureAlong
from federation.spec.run_spec import SpecError
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import AssignmentManifest, SearchWork, SignedEnvelope, StepManifest
from federation.vectors import payload_rows, update_layout
from federation.work.base import Shape, WorkError
from federation.work.search.work import Search
from fedpareto.offline_aggregation import aggregate
from storage.database import Database
from storage.models import Reply
from storage.states import RoundState
from tests.federation.aggregation.scene import Matrix, Vector, coefficients_of, drawn_losses, matrix
from tests.running import SECONDS, refused
from tests.stage import LAYOUT, Player, Stage, answer, spec

NAMES = ("ann", "ben", "cleo")


def unit(vector: Vector) -> Vector:
    return np.asarray(vector / np.linalg.norm(vector))


def as_written(U: Matrix, losses: Vector, theta: float) -> tuple[Vector, bool]:
    """The direction from the updates themselves, with a general solver; and whether fairness was a row of it."""
    from scipy.optimize import minimize

    norms = np.linalg.norm(U, axis=1)
    G = U / norms[:, None] * norms.mean()
    ones = np.ones(len(U))
    cosine = losses @ ones / (np.linalg.norm(losses) * np.linalg.norm(ones))
    guided = math.degrees(math.acos(min(1.0, float(cosine)))) > theta
    rows = G
    if guided:
        h = cosine * losses / np.linalg.norm(losses) - ones / np.linalg.norm(ones)
        rows = np.vstack([G, h / np.linalg.norm(h) @ G])
    scale = norms.mean() ** 2
    found = minimize(
        lambda x: float(x @ rows @ rows.T @ x) / scale,
        np.full(len(rows), 1 / len(rows)),
        jac=lambda x: 2 * rows @ rows.T @ x / scale,
        bounds=[(0, 1)] * len(rows),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": lambda x: np.ones(len(x))},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    shortest = found.x @ rows
    return shortest / np.linalg.norm(shortest) * np.linalg.norm(G.mean(axis=0)), guided


# --- the direction


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 7), st.integers(0, 10**6), st.sampled_from([5.0, 11.25, 40.0]))
@pytest.mark.full
def test_the_direction_is_that_of_a_general_solver_with_the_row_of_fairness(m: int, seed: int, theta: float) -> None:
    U, losses = matrix("random", m, 30, seed), drawn_losses(m, seed + 1)
    found = aggregate("fedmdfg", U, losses=losses, theta=theta)
    expected, guided = as_written(U, losses, theta)
    assert found.diagnostics["guided"] == guided
    np.testing.assert_allclose(found.direction, expected, atol=2e-5 * float(np.linalg.norm(expected)))
    np.testing.assert_allclose(coefficients_of(found) @ U, found.direction, atol=1e-9)
    assert found.diagnostics["residual"] <= 1e-9


@given(st.integers(2, 7), st.integers(0, 10**6))
def test_the_direction_opposes_no_client_and_makes_unequal_losses_more_equal(m: int, seed: int) -> None:
    U, losses = matrix("random", m, 30, seed), drawn_losses(m, seed + 1)
    found = aggregate("fedmdfg", U, losses=losses, theta=1e-3)
    assert found.diagnostics["descent_min"] >= -1e-9
    norms = np.linalg.norm(U, axis=1)
    scaled = (U @ found.direction) / norms  # how fast each loss falls, by the scaled updates
    size = 1e-6 / max(1.0, float(np.abs(scaled).max()))
    assert unfairness(losses - size * scaled)[0] <= unfairness(losses)[0] + 1e-12


def test_where_losses_are_equal_fairness_is_no_row_and_short_updates_are_not_weaker() -> None:
    U = matrix("random", 4, 20, 3)
    found = aggregate("fedmdfg", U, losses=np.full(4, 2.0))
    assert (found.diagnostics["guided"], found.diagnostics["angle"]) == (0.0, 0.0)
    shortest = aggregate("fedmgda", U, pre=["normalize"]).direction
    np.testing.assert_allclose(unit(found.direction), unit(shortest), atol=1e-9)
    U[0] *= 0.01
    weaker = aggregate("fedmdfg", U, losses=np.full(4, 2.0)).direction
    np.testing.assert_allclose(unit(weaker), unit(found.direction), atol=1e-9)


def test_the_guidance_is_the_derivative_of_the_cosine() -> None:
    losses, size = drawn_losses(5, 8), 1e-6
    angle, guidance = unfairness(losses)
    shares = [math.cos(math.radians(unfairness(losses + size * e)[0])) for e in np.eye(5)]
    by_hand = -(np.array(shares) - math.cos(math.radians(angle))) / size
    np.testing.assert_allclose(unit(by_hand), guidance, atol=1e-4)
    assert guidance[int(np.argmax(losses))] > 0 > guidance[int(np.argmin(losses))]


# --- the line search


def brute_force(steps: Vector, before: Vector, after: Matrix, slopes: Vector, fairer: bool) -> int:
    def cosine(losses: Vector) -> float:
        return float(losses.sum() / np.linalg.norm(losses) / math.sqrt(len(losses)))

    for k, step in enumerate(steps):
        descends = all(before[i] - after[k, i] >= 1e-4 * step * slopes[i] for i in range(len(before)))
        if descends and (not fairer or cosine(after[k]) > cosine(before)):
            return k
    sums = [float(losses.sum()) for losses in after]
    lower = [k for k, total in enumerate(sums) if total < before.sum()]
    return lower[0] if lower else min(range(len(sums)), key=lambda k: (sums[k], -k))


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 10**6), st.booleans(), st.floats(-1, 1))
def test_the_step_is_that_of_brute_force(n: int, k: int, seed: int, fairer: bool, shift: float) -> None:
    rng = np.random.default_rng(seed)
    steps, before = np.exp2(np.arange(k, 0, -1.0)), rng.uniform(0.5, 2.0, n)
    after, slopes = before + rng.normal(shift / 5, 0.1, (k, n)), rng.uniform(0.0, 1.0, n)
    place, agreed = choose(steps, before, after, slopes, fairer=fairer)
    assert place == brute_force(steps, before, after, slopes, fairer)
    assert not agreed or (after[place] <= before).all()


def test_a_step_without_a_finite_loss_is_never_chosen_if_another_has_one() -> None:
    steps, before, slopes = np.array([4.0, 2.0, 1.0]), np.ones(2), np.ones(2)
    after = np.array([[math.inf, 0.1], [3.0, 0.1], [5.0, 0.1]])
    assert choose(steps, before, after, slopes, fairer=False) == (1, False)  # the least sum
    assert choose(steps, before, np.full((3, 2), math.inf), slopes, fairer=True) == (2, False)  # the smallest step


def test_the_steps_go_down_with_a_direction_that_was_lengthened_and_not_up_for_the_absent() -> None:
    assert step_sizes(2, 1.0, absent=False) == (4.0, 2.0, 1.0, 0.5, 0.25)
    assert step_sizes(2, 1.0, absent=True) == (1.0, 0.5, 0.25)
    assert step_sizes(1, 4.0, absent=False) == (2.0, 1.0, 0.5, 0.25, 0.125)
    assert step_sizes(0, 0.3, absent=False) == (1.0,)
    assert len(step_sizes(20, 1e5, absent=False)) <= 64


# --- what cannot be run, and what to know


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('server.optimizer = "adam"', "server.optimizer: fedmdfg brings its own"),
        ("train.measure = false", "train.measure: fedmdfg needs what clients measure"),
        ('algorithm.pre = ["nnm"]\nalgorithm.tau = 1', 'algorithm.tau: not together with the stage "nnm"'),
    ],
)
def test_a_specification_in_which_the_line_search_cannot_work_is_refused(more: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_run(spec("clash", "digits", algorithm="fedmdfg", more=more))


def test_an_operator_is_told_the_largest_step_that_a_client_with_false_losses_can_choose() -> None:
    found, rule = parse_run(spec("lies", "digits", algorithm="fedmdfg", more="algorithm.s = 2"))
    for words in ("bias attack", "standstill", "at most 4 times server.learning_rate"):
        assert any(words in caution for caution in cautions(found, rule)), words


@pytest.mark.parametrize("steps", [(), (1.0,) * 65, (0.0,), (-1.0,), (math.nan,), (math.inf,)])
def test_a_search_without_steps_or_with_impossible_ones_is_no_work(steps: tuple[float, ...]) -> None:
    with pytest.raises(WorkError, match="between 1 and 64 positive numbers are taken"):
        Search(steps=steps).rows(Shape(LAYOUT, ("loss",), ("loss",)))


def test_a_model_of_the_search_that_is_not_finite_has_no_loss() -> None:
    along = MeasureAlong(direction=np.full(3, 1e38, np.float32), steps=(10.0, 1.0), names=("step/0", "step/1"))
    ((name, model),) = along.models(np.zeros(3, np.float32))
    assert name == "step/1"
    np.testing.assert_array_equal(model, np.full(3, -1e38, np.float32))


# --- rounds with clients that a test plays


def begin(stage: Stage, more: str = "") -> tuple[str, dict[str, Player]]:
    """A run of one round whose clients have trained."""
    text = f"selection.minimum = 3\nalgorithm.s = 2\nevaluate.every = 0\n{more}"
    run, players = stage.begin(*NAMES, algorithm="fedmdfg", more=text)
    for at, player in enumerate(players):
        player.losses = {"loss": 1.0 + at}
    answer(*players)
    return run, {player.name: player for player in players}


def steps_of(order: AssignmentManifest) -> list[float]:
    return list(SearchWork.FromString(order.work).steps)


def losses_at(*values: float) -> dict[str, float]:
    return {f"step/{place}": value for place, value in enumerate(values)}


def finished(stage: Stage, run: str, players: dict[str, Player]) -> tuple[StepManifest, dict[str, float]]:
    """The signed step of the one round, and its metrics; the clients evaluate what they are asked to."""
    stage.play(run, *players.values())
    return stage.step(run), stage.rounds(run)[0].metrics


def test_the_clients_are_sent_the_direction_and_the_step_that_they_agree_on_is_made(stage: Stage) -> None:
    run, players = begin(stage, "server.learning_rate = 0.5\nalgorithm.theta = 60.0")
    orders = {name: player.order() for name, player in players.items()}
    for name, order in orders.items():
        assert (order.kind, list(order.rows), len(order.inputs)) == ("search", [], 1)
        assert steps_of(order)[:5] == [2.0, 1.0, 0.5, 0.25, 0.125]
        (item,) = order.inputs
        sent = payload_rows(stage.blobs.read(item.digest), update_layout([("direction", LAYOUT.size)]))["direction"]
        start = players[name].losses["loss"]
        falls = [5.0, start - 0.5 if name != "ben" else 5.0, start - 0.5]
        players[name].reply(order, metrics=losses_at(*falls, *[start - 0.1] * (len(steps_of(order)) - 3)))
    step, metrics = finished(stage, run, players)
    assert (step.rate, metrics["step"], metrics["step/rate"]) == (0.5, 1.0, 0.5)  # the first that is good for all
    assert (metrics["agreed"], metrics["tried_by"], metrics["guided"]) == (1.0, 3.0, 0.0)
    assert metrics["steps_tried"] == len(steps_of(orders["ann"]))
    envelopes = {name: update.envelope_digest for name, update in stage.replies(run, 0, 1).items()}
    assert list(step.consulted) == [envelopes[name] for name in NAMES]
    (round_,) = stage.rounds(run)
    made = stage.parameters(round_.base_model) - 0.5 * sent
    np.testing.assert_allclose(stage.parameters(round_.result_model), made, rtol=1e-5, atol=1e-6)
    U = np.array([read_vector_of(stage, run, name) for name in NAMES])
    np.testing.assert_allclose(np.array(step.coefficients) @ U, sent, rtol=1e-5, atol=1e-6)
    expected, _ = as_written(U, np.array([1.0, 2.0, 3.0]), 60.0)
    np.testing.assert_allclose(sent, expected, atol=1e-4 * float(np.linalg.norm(expected)))


def read_vector_of(stage: Stage, run: str, client: str) -> Vector:
    """A client's update of the first round, from the blob store."""
    return stage.parameters(stage.replies(run)[client].payload).astype(np.float64)


def test_the_members_part_in_a_round_is_that_of_its_update(stage: Stage) -> None:
    run, players = begin(stage)
    for player in players.values():
        player.reply(player.order(), metrics=losses_at(0.1))
    finished(stage, run, players)
    found = stage._admin.GetRound(admin.GetRoundRequest(run=run, round=0), timeout=SECONDS)
    assert [part.client_id for part in found.participations] == list(NAMES)
    assert all(part.update_norm > 0 and math.isfinite(part.cosine) for part in found.participations)
    assert sum(part.weight for part in found.participations) == pytest.approx(1.0)


def test_clients_that_leave_during_the_search_have_no_say_in_the_step_and_their_updates_count(stage: Stage) -> None:
    run, players = begin(stage)
    orders = {name: player.order() for name, player in players.items()}
    count = len(steps_of(orders["ann"]))
    for name in ("ann", "cleo"):
        players[name].reply(orders[name], metrics=losses_at(9.0, *[0.1] * (count - 1)))
    players["ben"].decline(orders["ben"], "failed")  # it would not have agreed
    step, metrics = finished(stage, run, players)
    assert (step.rate, metrics["tried_by"]) == (2.0, 2.0)
    assert (len(step.replies), len(step.consulted)) == (3, 2)
    assert stage.outcomes(run, 0, 1)["ben"] == ("DECLINED", "failed")


def test_a_search_that_too_few_answer_skips_the_round(stage: Stage) -> None:
    run, players = begin(stage, "limits.skipped_rounds = 2")
    orders = {name: player.order() for name, player in players.items()}
    players["ann"].reply(orders["ann"], metrics=losses_at(0.5))
    for name in ("ben", "cleo"):
        players[name].decline(orders[name], "failed")
    skipped = stage.wait_round(run, 0, RoundState.SKIPPED)
    assert skipped.reason == "quorum: 1 of 3 members replied (search), 2 are needed"


def test_a_search_without_any_loss_skips_the_round(stage: Stage) -> None:
    run, players = begin(stage)
    answer(*players.values())
    skipped = stage.wait_round(run, 0, RoundState.SKIPPED)
    assert skipped.reason == "aggregation: fedmdfg needs losses along its direction, and no client reported one"


def test_a_loss_of_the_search_that_is_not_finite_is_refused(stage: Stage) -> None:
    run, players = begin(stage)
    orders = {name: player.order() for name, player in players.items()}
    for name in ("ben", "cleo"):
        players[name].reply(orders[name], metrics=losses_at(*[0.1] * len(steps_of(orders[name]))))
    with refused("INVALID_ARGUMENT", "non-finite"):
        players["ann"].submit(orders["ann"], metrics=losses_at(math.nan, 0.1))
    step, metrics = finished(stage, run, players)
    assert metrics["tried_by"] == 2.0
    assert len(step.replies) == 3


def test_a_restart_during_the_search_chooses_the_same_step(stage: Stage) -> None:
    run, players = begin(stage)
    orders = {name: player.order() for name, player in players.items()}
    count = len(steps_of(orders["ann"]))
    falls = losses_at(9.0, 9.0, *[0.1] * (count - 2))
    players["ann"].reply(orders["ann"], metrics=falls)
    stage.restart()
    for name in ("ben", "cleo"):
        again = players[name].orders()
        assert not again or [order.assignment_id for _, order in again] == [orders[name].assignment_id]
        players[name].reply(orders[name], metrics=falls)
    step, metrics = finished(stage, run, players)
    assert (step.rate, metrics["tried_by"]) == (1.0, 3.0)


# --- rounds of simulated clients

SIMULATED = """\
name = "fair"
task = "digits"
rounds = 3
algorithm = { name = "fedmdfg", theta = 1.0 }
train = { steps = 1, batch_size = 0, learning_rate = 0.1 }
evaluate.splits = ["train", "test"]
simulation = { clients = 5, partition = "shards:2" }
"""


def test_clients_try_the_very_model_that_is_made_and_the_step_follows_from_the_record(tmp_path: Path) -> None:
    fedpareto.simulate(SIMULATED, backend="loop", threads=1, home=tmp_path / "home", progress=lambda _: None)
    url = f"sqlite:///{tmp_path / 'home' / 'coordinator.db'}"
    with closing(Database.open(url)) as database, database.read() as session:
        updates = {update.envelope_digest: update for update in session.scalars(select(Reply))}
        rounds = session.execute(text("select metrics, step from rounds order by number")).all()
        losses = "select number, loss from evaluations join rounds using (round_id) where split = 'train'"
        evaluated = session.execute(text(f"{losses} order by number, client_id")).all()
    for number, (metrics, signed) in enumerate(rounds):
        measured = json.loads(metrics)
        step = StepManifest.FromString(SignedEnvelope.FromString(signed).manifest)
        trained, tried = ([updates[name] for name in names] for names in (step.replies, step.consulted))
        before = np.array([update.losses["loss"] for update in trained])
        count = int(measured["steps_tried"])
        after = np.array([[update.metrics[f"step/{k}"] for update in tried] for k in range(count)])
        rates = np.exp2(5.0 - np.arange(count))
        along = np.array([(update.cosine or 0.0) * (update.norm or 0.0) for update in trained])
        slopes = along * measured["direction_norm"] / 0.1
        place = brute_force(rates, before, after, slopes, bool(measured["guided"]))
        assert step.rate == measured["step/rate"] == rates[place]
        scored = [loss for at, loss in evaluated if at == number]
        np.testing.assert_allclose(after[place], scored, rtol=1e-4)
    assert any(json.loads(metrics)["guided"] for metrics, _ in rounds)
