"""AdaFed: as the paper writes it, and what it promises every client."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpareto.offline_aggregation import aggregate
from tests.federation.aggregation.scene import Matrix, Vector, coefficients_of, drawn_losses, matrix

problems = given(st.integers(2, 8), st.integers(0, 999), st.sampled_from([0.0, 0.5, 1.0, 2.0]))


def as_written(U: Matrix, losses: Vector, gamma: float) -> Vector:
    """Equations 5 and 6 in the full space, then the shortest vector of the convex hull of what they give."""
    orthogonal: list[Vector] = []
    for u, loss in zip(U, losses, strict=True):
        numerator, denominator = u.copy(), loss**gamma
        for g in orthogonal:
            ratio = (u @ g) / (g @ g)
            numerator -= ratio * g
            denominator -= ratio
        orthogonal.append(numerator / denominator)
    inverse = np.array([1 / (g @ g) for g in orthogonal])
    direction: Vector = (inverse / inverse.sum()) @ np.array(orthogonal)
    return direction


@problems
def test_the_direction_is_that_of_the_orthogonal_updates_in_any_order(m: int, seed: int, gamma: float) -> None:
    U, losses = matrix("random", m, 30, seed), drawn_losses(m, seed)
    result = aggregate("adafed", U, losses=losses, gamma=gamma)
    size = float(np.linalg.norm(result.direction))
    np.testing.assert_allclose(result.direction, as_written(U, losses, gamma), atol=1e-7 * size)
    np.testing.assert_allclose(result.direction, as_written(U[::-1], losses[::-1], gamma), atol=1e-7 * size)
    np.testing.assert_allclose(coefficients_of(result) @ U, result.direction, atol=1e-9 * size)


@problems
def test_every_client_gains_in_proportion_to_its_loss_to_the_power_gamma(m: int, seed: int, gamma: float) -> None:
    U, losses = matrix("random", m, 30, seed), drawn_losses(m, seed)
    result = aggregate("adafed", U, losses=losses, gamma=gamma, prior=np.random.default_rng(seed).dirichlet(np.ones(m)))
    squared = float(result.direction @ result.direction)
    np.testing.assert_allclose(U @ result.direction, squared * losses**gamma, rtol=1e-6)
    assert result.diagnostics["residual"] < 1e-7
    assert result.diagnostics["descent_share"] == 1.0


def test_updates_that_depend_on_each_other_gain_as_nearly_in_proportion_as_they_can() -> None:
    u, v = np.eye(4)[:2]
    twins = aggregate("adafed", [u, u, v], losses=[1.0, 3.0, 2.0])  # the twins gain the same: the mean of 1 and 3
    gains = np.array([u, u, v]) @ twins.direction
    np.testing.assert_allclose(gains / gains[2], [1.0, 1.0, 1.0])
    assert coefficients_of(twins)[0] == pytest.approx(coefficients_of(twins)[1])
    assert twins.diagnostics["residual"] == pytest.approx(1 / 3)


def test_the_rounding_of_an_update_that_another_repeats_is_no_direction() -> None:
    u, v = np.random.default_rng(1).standard_normal((2, 50)).astype(np.float32)
    found = aggregate("adafed", [u, np.float32(1.1) * u, v], losses=[1.0, 3.0, 2.0])
    assert found.diagnostics["residual"] > 0.1
    assert found.diagnostics["descent_min"] > 0.1
    assert np.abs(coefficients_of(found)).max() < 10


def test_an_update_that_is_zero_or_without_weight_takes_no_part() -> None:
    U, losses = matrix("random", 4, 20, 1), drawn_losses(4, 1)
    expected = aggregate("adafed", U, losses=losses).direction
    more = np.vstack([U, np.zeros(20), np.ones(20)])
    found = aggregate("adafed", more, losses=[*losses, 5.0, 50.0], prior=[0.2, 0.2, 0.2, 0.2, 0.2, 0.0])
    np.testing.assert_allclose(found.direction, expected, rtol=1e-9)


def test_where_nobody_has_anything_to_gain_there_is_no_step() -> None:
    assert not aggregate("adafed", matrix("random", 3, 10, 0), losses=[0.0] * 3).direction.any()
