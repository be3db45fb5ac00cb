"""The geometric median stays with the honest majority, however far away attackers are and whatever stands before it."""

import tracemalloc

import numpy as np
import pytest

from federation.aggregation.interface import Rows
from federation.aggregation.rules.geometric_median import GeometricMedian
from fedpareto.offline_aggregation import aggregate


def attacked(n: int, f: int, size: float, *, identical: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """n - f honest updates around a mean of norm 5.8, then f attackers of norm `size`: (U, honest rows)."""
    rng = np.random.default_rng(5)
    mean = rng.normal(size=40)
    mean *= 5.8 / np.linalg.norm(mean)
    honest = np.tile(mean, (n - f, 1)) if identical else mean + 0.1 * rng.normal(size=(n - f, 40))
    attack = rng.normal(size=(f, 40))
    attack *= size / np.linalg.norm(attack, axis=1, keepdims=True)
    return np.vstack([honest, attack]), honest


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_attackers_of_any_size_do_not_move_the_median_behind_nearest_neighbour_mixing(size: float) -> None:
    U, honest = attacked(11, 2, size)
    found = aggregate("geometric-median", U, pre=["nnm"], byzantine=2)
    np.testing.assert_allclose(found.direction, honest.mean(axis=0), atol=1e-12)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_attackers_of_any_size_do_not_move_the_median_of_identical_updates(size: float) -> None:
    U, honest = attacked(11, 5, size, identical=True)
    found = aggregate("geometric-median", U)
    np.testing.assert_allclose(found.direction, honest[0], atol=1e-12)
    assert found.weights[6:].tolist() == [0.0] * 5


def test_the_place_of_more_than_half_of_the_prior_is_the_median_even_if_fewer_rows_are_there() -> None:
    U = np.array([[1.0, 0.0], [1.0, 0.0], [9.0, 2.0], [-3.0, 5.0], [0.0, 7.0]])
    found = aggregate("geometric-median", U, prior=np.array([0.3, 0.3, 0.2, 0.1, 0.1]))
    np.testing.assert_allclose(found.direction, [1.0, 0.0], atol=1e-12)


def test_two_places_of_equal_prior_are_treated_alike() -> None:
    U = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    np.testing.assert_allclose(aggregate("geometric-median", U).direction, [0.5, 0.5], atol=1e-12)


def test_memory_grows_with_the_square_of_the_number_of_updates_alone() -> None:
    """At m = 300 an array of m x m x m numbers takes 216 MB, one of m x m .7 MB."""
    U = np.random.default_rng(1).normal(size=(300, 320))
    K = U @ U.T
    rows = Rows(gram=K, prior=np.full(300, 1 / 300), samples=np.ones(300))
    tracemalloc.start()
    try:
        found = GeometricMedian().combine(rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.diagnostics["residual"] <= 1e-7
    assert peak < 25 * K.nbytes


def test_updates_on_one_line_have_a_median_though_the_curvature_is_singular() -> None:
    U = np.outer(np.array([-3.0, -1.0, 0.5, 2.0, 9.0]), np.array([1.0, 2.0, 2.0]) / 3)
    np.testing.assert_allclose(aggregate("geometric-median", U).direction, U[2], atol=1e-3)
