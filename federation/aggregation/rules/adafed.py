"""AdaFed (Hamidi and Yang, 2024, "AdaFed: Fair Federated Learning via Adaptive Common Descent Direction")."""

import math
from dataclasses import dataclass

import numpy as np

from federation.aggregation.base import Rule, conclude
from federation.aggregation.geometry import inverse_norms, unit_gram
from federation.aggregation.interface import Combination, Matrix, Rows, Vector
from federation.spec.options import option

# Updates are float32: the remainder of one that depends on the others is at most about 1e-7 of its length. A direction
# that has to use such a remainder would take coefficients of millions.
_RESOLUTION = 1e-6
_LARGEST = 1e100


@dataclass(frozen=True, kw_only=True)
class AdaFed(Rule):
    """Every client gains in proportion to its loss to the power gamma: <d, u_i> = ||d||^2 F_i^gamma.

    The paper makes the updates orthogonal one after the other, with F_i^gamma in the denominators (equations 5 and 6),
    and takes the shortest vector in the convex hull of the results. That vector depends on no order: it is the shortest
    one in the affine hull of the rows u_i / F_i^gamma. In Gram space c = K^-1 p / (p^T K^-1 p) with p_i = F_i^gamma.
    Coefficients may be negative. With losses in other units the step has another length, as in the paper.

    The paper supposes that the updates are linearly independent. Where they are not, the gains are the nearest to the
    proportion that there are (least squares over the updates scaled to norm 1); if one of them would be negative, there
    is no step. `residual` is the largest deviation of a gain from the proportion, relative to the largest gain of an
    update of norm 1. An update that is zero takes no part, nor does one whose prior is 0; beyond that the prior does
    not count.
    """

    name = "adafed"
    private = "gram"
    reads_losses = True

    gamma: float = option(
        1.0, "how much more clients with high losses gain; 0 is the same gain for every client", "[0, inf)"
    )

    def combine(self, rows: Rows) -> Combination:
        K, losses = rows.gram, np.abs(rows.reported("losses", self.name))
        part = (np.diag(K) > 0) & (rows.prior > 0)
        largest = float(losses[part].max(initial=0.0))
        coefficients, residual = np.zeros(len(K)), 0.0
        if largest > 0:
            inverse = inverse_norms(K)[part]
            gains = (losses[part] / largest) ** self.gamma * inverse
            unit, residual = _shortest(unit_gram(K)[np.ix_(part, part)], gains)
            coefficients[part] = unit * inverse * _power(largest, -self.gamma)
        shares = np.maximum(coefficients, 0.0)
        weights = shares / shares.sum() if shares.any() else rows.prior
        return conclude(K, coefficients, weights, residual=residual)


def _shortest(C: Matrix, gains: Vector) -> tuple[Vector, float]:
    """The x with C x = gains / (gains^T C^-1 gains), and the deviation from it; zeros where a gain would be negative.

    C are cosines, (m, m); the gains, (m,), are not negative and not all 0.
    """
    size = float(gains.max())
    gains = gains / size
    values, vectors = np.linalg.eigh(C)
    significant = values > len(C) * _RESOLUTION**2
    x: Vector = vectors[:, significant] @ ((vectors[:, significant].T @ gains) / values[significant])
    reached = C @ x
    if reached.min() < -_RESOLUTION or reached.max() <= _RESOLUTION:
        return np.zeros(len(C)), float(np.abs(reached - gains).max())
    return x / float(x @ gains) / size, float(np.abs(reached - gains).max())


def _power(base: float, exponent: float) -> float:
    """The power, at most 1e100, so that squares are finite; a step of that length overflows the model anyway."""
    return math.exp(min(exponent * math.log(base), math.log(_LARGEST)))
