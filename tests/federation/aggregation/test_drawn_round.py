"""The output of FMOL's theorems 3 and 7: a round drawn with (1 - mu eta / 2)^(1 - t), and Delta_Q."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

import fedpareto
from federation.aggregation.metrics.drawn_round import delta_q, draw_round, round_weights
from federation.aggregation.qp import min_norm
from federation.errors import ArgumentError


def test_the_probability_of_a_round_is_that_of_the_theorem_in_exact_arithmetic() -> None:
    powers = [Fraction(1) / (1 - Fraction(1, 10) * Fraction(3, 2) / 2) ** t for t in range(8)]
    expected = [float(power / sum(powers)) for power in powers]
    np.testing.assert_allclose(round_weights(8, mu=0.1, eta=1.5), expected, rtol=1e-13)
    assert np.isfinite(round_weights(100_000, mu=1.0, eta=1.9)).all()


def test_rounds_are_drawn_with_these_probabilities_and_a_seed_draws_the_same() -> None:
    assert fedpareto.draw_round is draw_round
    assert draw_round(50, mu=0.1, eta=1.0, seed=3) == draw_round(50, mu=0.1, eta=1.0, seed=3)
    drawn = Counter(draw_round(3, mu=0.5, eta=1.0, seed=seed) for seed in range(500))
    shares = [drawn[t] / 500 for t in range(3)]
    np.testing.assert_allclose(shares, round_weights(3, mu=0.5, eta=1.0), atol=0.07)


@pytest.mark.parametrize(("rounds", "mu", "eta"), [(0, 1, 1), (5, 0, 1), (5, 1, -1), (5, 2, 1), (5, float("nan"), 1)])
def test_a_number_out_of_range_is_refused(rounds: int, mu: float, eta: float) -> None:
    with pytest.raises(ArgumentError, match="mu eta < 2 are needed"):
        draw_round(rounds, mu=mu, eta=eta)


def test_delta_q_weighs_how_far_each_loss_is_from_optimal() -> None:
    assert delta_q([0.25, 0.75], [3.0, 1.0], [1.0, 0.5]) == pytest.approx(0.875)
    assert delta_q([1.0], [0.5], [1.0]) == -0.5
    with pytest.raises(ArgumentError, match="got 2, 1, 2"):
        delta_q([0.5, 0.5], [1.0], [1.0, 1.0])


def test_delta_q_of_a_drawn_model_falls_with_the_rounds_on_strongly_convex_losses() -> None:
    """f_s(x) = ||x - b_s||^2 / 2, mu = 1: multi-gradient descent with full gradients (theorem 3)."""
    b, eta = np.array([[1.0, 0.0], [-1.0, 0.5]]), 0.05

    def step(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gradients = x - b
        weights = min_norm(gradients @ gradients.T).weights
        return weights, x - eta * weights @ gradients

    x, path = np.array([4.0, 5.0]), []
    for _ in range(400):
        weights, after = step(x)
        path.append((weights, ((x - b) ** 2).sum(axis=1) / 2))
        x = after
    best = ((x - b) ** 2).sum(axis=1) / 2
    found = [
        float(round_weights(T, mu=1.0, eta=eta) @ [delta_q(w.tolist(), f.tolist(), best.tolist()) for w, f in path[:T]])
        for T in (10, 50, 100, 200)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1e-2 * found[0]
