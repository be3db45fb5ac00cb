"""Stages before a rule: in Gram space as on the updates, in any order, before any rule."""

import math
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from federation.aggregation.base import Rule
from federation.aggregation.interface import Rows
from federation.aggregation.phases import Replies, RoundContext
from federation.aggregation.pre import STAGES, Arc, Bucket, Clip, Nnm, apply
from federation.aggregation.registry import ALGORITHMS, algorithm
from federation.aggregation.rules.krum import Krum
from federation.spec.run_spec import RunSpec
from fedpareto.offline_aggregation import aggregate
from tests.federation.aggregation import scene

# Those left out have no coefficients, or no single row for each client.
NAMES = tuple(name for name in ALGORITHMS if name not in {"median", "trimmed-mean", "fsmgda"})
OVER_OBJECTIVES = {"scalarised", "fedcmoo", "fedcmoo-pref"}  # whose rounds are in test_objective_rules
SEARCHING = {"fedmdfg"}  # whose rounds have a phase more, and are in test_fedmdfg
chains = st.lists(st.sampled_from(["normalize", "clip", "arc", "nnm", "bucket"]), unique=True)


def rows(U: scene.Matrix, *, t: int = 0) -> Rows:
    return scene.rows_of(U, losses=np.arange(len(U), dtype=np.float64) + 1, round=t)


def on_the_updates(stage: str, U: scene.Matrix) -> scene.Matrix:
    """The stages as their papers write them."""
    match stage:
        case "normalize":
            return U / scene.norms(U)[:, None]
        case "clip":
            return U * np.minimum(1, np.median(scene.norms(U)) / scene.norms(U))[:, None]
        case "arc":  # Allouah et al. (2025), Algorithm 2
            n, f = len(U), 1
            k = math.floor(2 * (f / n) * (n - f))
            C = sorted(scene.norms(U), reverse=True)[k]
            return np.array([min(1, C / np.linalg.norm(u)) * u for u in U])
        case "nnm":
            near = [np.argsort(((U - u) ** 2).sum(axis=1), kind="stable")[: len(U) - 1] for u in U]
            return np.array([U[chosen].mean(axis=0) for chosen in near])
        case _:
            order = np.random.default_rng([0, 0]).permutation(len(U))
            return np.array([U[order[i : i + 2]].mean(axis=0) for i in range(0, len(U), 2)])


@given(
    st.sampled_from(["random", "shifted", "conflicting", "badly scaled"]),
    st.integers(5, 9),
    st.integers(0, 999),
    chains,
)
def test_stages_in_gram_space_are_those_on_the_updates(kind: str, m: int, seed: int, pre: list[str]) -> None:
    U = scene.matrix(kind, m, 6, seed)
    staged = apply([STAGES[name]() for name in pre], rows(U))
    V = U
    for stage in pre:
        V = on_the_updates(stage, V)
    size = float(scene.norms(V).max())
    np.testing.assert_allclose(staged.matrix @ U, V, atol=1e-6 * size)
    np.testing.assert_allclose(staged.rows.gram, V @ V.T, atol=1e-6 * size**2)
    np.testing.assert_allclose(staged.shares.sum(axis=1), 1)
    assert staged.rows.prior.sum() == pytest.approx(1)


@given(scene.zoo, st.sampled_from(NAMES), chains)
@example(scene.matrix("low rank", 5, 1, 1), "fedmdfg", [])  # the row of fairness had a negative square, by rounding
def test_any_rule_behind_any_stages_answers_in_terms_of_the_updates(U: scene.Matrix, name: str, pre: list[str]) -> None:
    assume(len(U) >= (9 if "krum" in name else 5))
    result = aggregate(name, U, losses=np.arange(len(U)) + 1.0, accuracies=np.linspace(0, 1, len(U)), pre=pre)
    assert result.weights.sum() == pytest.approx(1, abs=1e-9)
    assert (result.weights >= 0).all()
    scale = float(np.abs(scene.coefficients_of(result)) @ scene.norms(U))
    np.testing.assert_allclose(result.direction, scene.coefficients_of(result) @ U, atol=1e-13 * scale)
    assert result.diagnostics["direction_norm"] == pytest.approx(np.linalg.norm(result.direction), abs=1e-7 * scale)


@given(scene.zoo)
def test_known_rules_are_stages_before_fedavg(U: scene.Matrix) -> None:
    size = max(1.0, float(scene.norms(U).max()))
    for rule, stage in (("fedavg-n", "normalize"), ("norm-clipping", "clip")):
        one, other = aggregate(rule, U), aggregate("fedavg", U, pre=[stage])
        np.testing.assert_allclose(other.direction, one.direction, atol=1e-9 * size)
        np.testing.assert_allclose(other.weights, one.weights)


@given(scene.zoo, st.integers(0, 99))
def test_buckets_leave_the_average_as_it_is(U: scene.Matrix, seed: int) -> None:
    prior = np.random.default_rng(seed).dirichlet(np.ones(len(U)))
    found = aggregate("fedavg", U, prior=prior, pre=["bucket"], bucket_size=3, bucket_seed=seed)
    np.testing.assert_allclose(scene.coefficients_of(found), 0.0 if found.diagnostics["stationary"] else prior)


@given(scene.zoo)
def test_mixing_with_nobody_left_out_is_the_mean_for_everybody(U: scene.Matrix) -> None:
    found = aggregate("fedmgda", U, pre=["nnm"], byzantine=0)
    if not found.diagnostics["stationary"]:
        np.testing.assert_allclose(found.direction, U.mean(axis=0), atol=1e-7 * scene.norms(U).max())


@given(st.integers(5, 9), st.integers(0, 999), st.randoms(use_true_random=False))
@pytest.mark.full
def test_the_order_of_the_clients_does_not_matter_to_mixing(m: int, seed: int, random: Random) -> None:
    U = scene.matrix("random", m, 6, seed)
    order = list(range(m))
    random.shuffle(order)
    one, other = (aggregate("fedmgda+", V, pre=["normalize", "nnm"], byzantine=2) for V in (U, U[order]))
    np.testing.assert_allclose(other.direction, one.direction, atol=1e-6)


def test_buckets_change_with_the_round_and_are_the_same_again() -> None:
    U = scene.matrix("random", 8, 4, 0)
    stages = [Bucket()]
    first, again, second = (apply(stages, rows(U, t=t)).matrix for t in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any()
    assert (first != apply([Bucket(bucket_seed=1)], rows(U)).matrix).any()


@given(st.integers(3, 21), st.integers(0, 999), st.data())
def test_adaptive_clipping_is_bounded_by_an_honest_norm_and_leaves_half_as_they_are(
    m: int, seed: int, data: st.DataObject
) -> None:
    f = data.draw(st.integers(0, (m - 1) // 2))
    U = scene.matrix("random", m, 6, seed)
    longest = float(scene.norms(U[f:]).max())
    U[:f] *= 10.0 ** np.linspace(3, 9, f)[:, None]
    factors = np.diag(apply([Arc(byzantine=f)], rows(U)).matrix)
    assert (factors * scene.norms(U) <= longest * (1 + 1e-12)).all()
    shortened = int((factors < 1).sum())
    assert shortened == math.floor(2 * Fraction(f, m) * (m - f))
    assert f <= shortened <= m / 2


def test_adaptive_clipping_shortens_to_nothing_where_all_but_attackers_are_zero() -> None:
    U = np.zeros((5, 4))
    U[0, 0] = 1e6
    assert apply([Arc()], rows(U)).matrix[0, 0] == 0.0


def test_losses_are_mixed_with_the_updates_so_that_an_inflated_one_counts_less() -> None:
    U = scene.matrix("nearly parallel", 6, 4, 0)
    told = np.array([1.0, 1, 1, 1, 1, 1e6])
    alone = aggregate("q-fedavg", U, losses=told)
    mixed = aggregate("q-fedavg", U, losses=told, pre=["nnm"], byzantine=2)
    assert alone.weights[5] > 0.99
    assert mixed.weights[5] < 0.3


@pytest.mark.parametrize("stage", [{"pre": ["bucket"], "bucket_size": 5}, {"pre": ["nnm"], "byzantine": 3}])
def test_the_mean_of_the_largest_losses_that_can_be_claimed_is_finite(stage: dict[str, Any]) -> None:
    for m in (7, 8):
        result = aggregate("q-fedavg", np.eye(m), losses=np.full(m, np.finfo(np.float64).max), **stage)
        assert np.isfinite(result.direction).all()


def test_a_sign_flip_stops_fedmgda_plus_and_mixing_in_front_of_it_undoes_that() -> None:
    rng = np.random.default_rng(0)
    common = rng.standard_normal(200)
    U = common + 0.7 * rng.standard_normal((10, 200))
    honest = U[:8].mean(axis=0)
    U[8:] = -honest

    def cosine(direction: scene.Vector) -> float:
        length = np.linalg.norm(direction) * np.linalg.norm(honest)
        return float(direction @ honest / length) if length else 0.0

    bare = aggregate("fedmgda+", U, epsilon=1.0)
    mixed = aggregate("fedmgda+", U, epsilon=1.0, pre=["normalize", "nnm"], byzantine=2)
    assert bare.diagnostics["stationary"] or np.linalg.norm(bare.direction) < 0.05
    assert cosine(mixed.direction) > 0.95
    assert np.linalg.norm(mixed.direction) > 0.5
    assert mixed.weights[8:].sum() < 0.25


def test_rows_that_cancel_in_a_mean_are_zero_not_rounding() -> None:
    u = np.random.default_rng(0).standard_normal(1000) / 3
    result = aggregate("fedmgda+", [u, -u], pre=["bucket"])
    assert result.diagnostics["stationary"] == 1
    assert not result.direction.any()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OVER_OBJECTIVES | SEARCHING])
def test_a_round_goes_through_the_stages(name: str) -> None:
    U = scene.matrix("random", 9, 6, seed=0)
    told = [{"losses": {"loss": 1.0 + i}, "metrics": {"train/accuracy": 0.1 * i}} for i in range(9)]
    replies = Replies([scene.reply(f"c{i}", u, **told[i]) for i, u in enumerate(U)])
    context = RoundContext(number=3, total=5)
    rule = algorithm(name, {"pre": ["normalize", "nnm"], "byzantine": 2})
    assert isinstance(rule, Rule)
    decided = scene.stepped(rule.round(context), replies).combination
    np.testing.assert_array_equal(decided.coefficients, rule.decide(replies.rows(context)).coefficients)
    assert not np.array_equal(decided.coefficients, rule.combine(replies.rows(context)).coefficients)


def test_a_run_specification_names_the_stages() -> None:
    text = 'name = "a"\ntask = "digits"\nrounds = 1\n[algorithm]\nname = "krum"\npre = ["clip", "nnm"]\nbyzantine = 3\n'
    asked = RunSpec.parse(text).algorithm
    rule = algorithm(asked.name, asked.hyperparameters)
    assert rule == Krum(byzantine=3, stages=(Clip(), Nnm(byzantine=3)))
