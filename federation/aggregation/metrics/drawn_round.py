"""The output of FMGDA and FSMGDA in their theorems: the model of a round that is drawn, and its distance from optimal.

The theorems for strongly convex losses (Yang et al., 2023, theorems 3 and 7) bound the mean of Delta_Q over x_1 to x_T
with weights in proportion to (1 - mu eta / 2)^(1 - t): the expectation for a model that is drawn with these
probabilities. Later rounds weigh more.

Here x_t is the model after t rounds. If x_1 is read as the initial model, the theorems hold for these models, too: as
those of the run that begins with the model after the first round.

"""

import math
from collections.abc import Sequence

import numpy as np

from federation.aggregation.interface import Vector
from federation.errors import ArgumentError


def round_weights(rounds: int, *, mu: float, eta: float) -> Vector:
    """The probability of each round, shape (rounds,), sum 1: (1 - mu eta / 2)^(1 - t) for t from 1.

    Args:
        rounds: T, at least 1.
        mu: the modulus of strong convexity of the losses, above 0.
        eta: the rate of a step in terms of the gradient, above 0: in FMOL's notation eta_t, times the local rate where
            the server's rate is a factor of updates.

    Raises:
        ArgumentError: a number out of range, or mu eta is not below 2.
    """
    if rounds < 1 or not (mu > 0 and eta > 0 and mu * eta < 2):
        raise ArgumentError(f"rounds >= 1, mu > 0, eta > 0 and mu eta < 2 are needed; got {rounds}, {mu:g}, {eta:g}")
    logarithms = -math.log1p(-mu * eta / 2) * np.arange(rounds)
    weights = np.exp(logarithms - logarithms[-1])  # the last is the largest: nothing overflows
    found: Vector = weights / weights.sum()
    return found


def draw_round(rounds: int, *, mu: float, eta: float, seed: int = 0) -> int:
    """Draws the round whose model is the output, numbered from 0 as in the record.

    `fedpareto admin export RUN --round N` writes the model after it.


    Args:
        rounds: of the run.
        mu: the modulus of strong convexity of the losses.
        eta: the rate of a step in terms of the gradient.
        seed: the same seed draws the same round.

    Raises:
        ArgumentError: as `round_weights`.
    """
    return int(np.random.default_rng(seed).choice(rounds, p=round_weights(rounds, mu=mu, eta=eta)))


def delta_q(weights: Sequence[float], losses: Sequence[float], optimal: Sequence[float]) -> float:
    """Delta_Q = sum over s of lambda_s (f_s(x) - f_s(x*)), FMOL's measure for strongly convex losses.

    Args:
        weights: lambda of the round that begins at x, shape (S,), sum 1.
        losses: of the objectives at x, (S,).
        optimal: of the objectives at the Pareto point x*, (S,).

    Returns:
        It may be negative where x is better than x* for an objective.

    Raises:
        ArgumentError: not the same number of each, or none.
    """
    if not 0 < len(weights) == len(losses) == len(optimal):
        raise ArgumentError(f"one of each for every objective; got {len(weights)}, {len(losses)}, {len(optimal)}")
    return math.fsum(w * (f - best) for w, f, best in zip(weights, losses, optimal, strict=True))
