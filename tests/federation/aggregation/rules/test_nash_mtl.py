"""Nash-MTL solves the paper's equation (Navon et al., 2022, equation 2), at any spread of norms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.aggregation.qp import min_norm
from fedpareto.offline_aggregation import aggregate
from tests.federation.aggregation.scene import coefficients_of, matrix


def spread_out(m: int, spread: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(m, 3 * m)) * spread ** rng.uniform(0, 1, (m, 1))


@settings(max_examples=50)
@given(st.integers(1, 12), st.sampled_from([1.0, 10.0, 1e6]), st.integers(0, 10**6))
def test_every_client_gains_the_same_in_proportion_to_its_weight(m: int, spread: float, seed: int) -> None:
    U = spread_out(m, spread, seed)
    found = aggregate("nash-mtl", U, max_norm=0.0)
    gains = coefficients_of(found) * (U @ found.direction)
    np.testing.assert_allclose(gains, np.full(m, gains.mean()), rtol=1e-8)


def test_a_prior_divides_the_gains() -> None:
    U = spread_out(4, 10.0, 1)
    prior = np.array([0.4, 0.3, 0.2, 0.1])
    found = aggregate("nash-mtl", U, prior=prior)
    gains = coefficients_of(found) * (U @ found.direction)
    np.testing.assert_allclose(gains / gains.sum(), prior, rtol=1e-8)


KINDS = st.sampled_from(["random", "conflicting", "badly scaled"])


@settings(max_examples=50)
@given(st.builds(matrix, KINDS, st.integers(2, 9), st.integers(1, 12), st.integers(0, 999)))
def test_the_direction_is_good_for_every_client_or_there_is_none(U: np.ndarray) -> None:
    found = aggregate("nash-mtl", U)
    units = U / np.linalg.norm(U, axis=1, keepdims=True)
    assert found.diagnostics["stationary"] == float(min_norm(units @ units.T).stationary)
    assert found.diagnostics["stationary"] or (U @ found.direction > 0).all()


def test_scaling_one_update_does_not_turn_the_direction() -> None:
    U = spread_out(5, 1.0, 2)
    before = aggregate("nash-mtl", U).direction
    U[3] *= 1e6
    after = aggregate("nash-mtl", U).direction
    cosine = before @ after / np.linalg.norm(before) / np.linalg.norm(after)
    assert cosine == pytest.approx(1.0, abs=1e-9)
    assert np.linalg.norm(after) <= 2 * np.linalg.norm(before)


def test_the_norm_is_bounded_in_median_norms() -> None:
    U = spread_out(5, 10.0, 3)
    median = np.median(np.linalg.norm(U, axis=1))
    assert np.linalg.norm(aggregate("nash-mtl", U, max_norm=0.5).direction) == pytest.approx(0.5 * median)
    assert np.linalg.norm(aggregate("nash-mtl", U, max_norm=0.0).direction) == pytest.approx(np.sqrt(5) * median)


def test_a_zero_update_takes_no_part() -> None:
    U = spread_out(4, 1.0, 4)
    without = aggregate("nash-mtl", U)
    found = aggregate("nash-mtl", np.vstack([U, np.zeros(U.shape[1])]))
    np.testing.assert_allclose(found.direction, without.direction, rtol=1e-9)
    assert found.weights[4] == 0


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
def test_a_client_that_almost_cancels_the_others_does_not_make_the_bargain_unsolvable(gap: float) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        U = rng.standard_normal((5, 6))
        U[4] = -U[:4].mean(axis=0) + gap * rng.standard_normal(6)
        found = aggregate("nash-mtl", U)
        assert found.diagnostics["stationary"] or (U @ found.direction > 0).all()
