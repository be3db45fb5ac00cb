"""FedMGDA's box shrinks with the rounds, and clients' weights keep the bounds that are preferred."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.aggregation.interface import Rows, TooFewUpdatesError
from federation.aggregation.registry import algorithm
from federation.aggregation.rules.fedmgda import FedMGDA, FedMGDAPlus
from tests.federation.aggregation import scene

NAMES = ("a", "b", "c")


def rows(U: scene.Matrix, round_: int = 0) -> Rows:
    return Rows(gram=U @ U.T, prior=np.full(3, 1 / 3), samples=np.ones(3), clients=NAMES, round=round_, rounds=10)


def shortest_on_a_grid(U: scene.Matrix, least: dict[str, float], largest: dict[str, float]) -> float:
    """The least length of a mean of three updates whose weights, multiples of 1/100, keep the bounds."""
    lengths = [
        float(np.linalg.norm(np.array(weights) @ U))
        for i, j in product(range(101), repeat=2)
        if i + j <= 100
        for weights in [(i / 100, j / 100, (100 - i - j) / 100)]
        if all(
            least.get(name, 0) <= weight <= largest.get(name, 1) for name, weight in zip(NAMES, weights, strict=True)
        )
    ]
    return min(lengths)


@pytest.mark.full
@given(st.integers(0, 100), st.sampled_from([0.0, 0.2, 0.5]), st.sampled_from([0.1, 0.3, 1.0]))
def test_the_direction_is_the_shortest_that_the_preferences_allow(seed: int, least: float, largest: float) -> None:
    U = np.random.default_rng(seed).standard_normal((3, 4)) + 0.5
    found = FedMGDA(preferences=(f"a >= {least}", f"b <= {largest}")).combine(rows(U))
    assert found.weights[0] >= least
    assert found.weights[1] <= largest
    length = float(np.linalg.norm(found.weights @ U))
    grid = shortest_on_a_grid(U, {"a": least}, {"b": largest})
    assert length <= grid + 1e-9
    assert length >= grid - 0.02 * np.linalg.norm(U, axis=1).max()


def test_epsilon_counts_from_the_prior_within_the_preferences() -> None:
    U = np.array([[4.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    fixed = FedMGDA(epsilon=0.0, preferences=("a >= 0.6",)).combine(rows(U))
    np.testing.assert_allclose(fixed.weights, [0.6, 0.2, 0.2], atol=1e-12)
    wider = FedMGDA(epsilon=0.1, preferences=("a >= 0.6",)).combine(rows(U))
    assert wider.weights[0] == pytest.approx(0.6)  # the shortest vector would have less of it
    assert FedMGDA(epsilon=0.1).combine(rows(U)).weights[0] == pytest.approx(1 / 3 - 0.1)


def test_a_preference_is_of_the_participants_of_a_round_and_one_that_leaves_no_weights_skips_it() -> None:
    rule = FedMGDAPlus(preferences=("z >= 0.9", "a <= 0.1"))
    assert rule.combine(rows(np.eye(3))).weights[0] == pytest.approx(0.1)
    bounded = FedMGDAPlus(preferences=tuple(f"{name} <= 0.3" for name in NAMES))
    with pytest.raises(TooFewUpdatesError, match=r"of the 3 clients of this round add up to 0\.9, less than 1"):
        bounded.combine(rows(np.eye(3)))


def test_zero_updates_that_are_dropped_take_their_preference_with_them() -> None:
    U = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = FedMGDA(drop_zero=True, preferences=("a >= 0.5",)).combine(rows(U))
    np.testing.assert_allclose(found.weights, [0, 0.5, 0.5], atol=1e-9)
    with pytest.raises(TooFewUpdatesError, match=r"not zero add up to 0\.4"):
        FedMGDA(drop_zero=True, preferences=("b <= 0.2", "c <= 0.2")).combine(rows(U))


@pytest.mark.parametrize("name", ["fedmgda", "fedmgda+"])
def test_epsilon_shrinks_as_a_power_of_the_round_and_the_weights_go_to_the_prior(name: str) -> None:
    U = np.array([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0], [-0.9, 0.0, 1.0]])
    rule = algorithm(name, {"epsilon": 0.3, "epsilon_decay": 0.5})
    for t in (0, 3, 99):
        fixed = algorithm(name, {"epsilon": 0.3 / (t + 1) ** 0.5})
        found = rule.combine(rows(U, t))  # type: ignore[attr-defined]
        np.testing.assert_array_equal(found.weights, fixed.combine(rows(U)).weights)  # type: ignore[attr-defined]
        assert np.abs(found.weights - 1 / 3).max() <= 0.3 / (t + 1) ** 0.5 + 1e-12


def test_least_weights_are_said_before_a_run_begins() -> None:
    (caution,) = FedMGDAPlus(preferences=("b >= 0.25", "a >= 0.5", "c <= 0.2")).cautions()
    assert caution.endswith("whatever these clients send: a 0.5, b 0.25")
    assert FedMGDAPlus(preferences=("c <= 0.2",)).cautions() == ()


def test_a_rule_with_preferences_has_no_bound_for_noise_and_none_for_alerts() -> None:
    rule = FedMGDAPlus(epsilon=0.1)
    assert rule.sensitivity(10) is not None
    assert replace(rule, preferences=("a >= 0.5",)).sensitivity(10) is None
    assert replace(rule, preferences=("a >= 0.5",)).largest_weights(np.full(3, 1 / 3)) is None
