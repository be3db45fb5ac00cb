"""Nash-MTL (Navon et al., 2022, "Multi-Task Learning as a Bargaining Game", section 3.1)."""

import math
from dataclasses import dataclass

import numpy as np

from federation.aggregation.base import Rule, conclude
from federation.aggregation.geometry import inverse_norms, unit_gram
from federation.aggregation.interface import Combination, Matrix, Rows, Vector
from federation.aggregation.qp import UnsolvedError, min_norm
from federation.spec.options import option

_TOLERANCE = 1e-8
_ROUNDING = float(np.finfo(np.float64).eps)  # of the elements of C; that of x_i (C x)_i is (sum x_i)^2 times as large
_ITERATIONS = 200
_SHORTEST = 1e-12
_NEAR = 1e-4  # of the least gain: half the square of the distance to the minimum, in the metric of the function


@dataclass(frozen=True, kw_only=True)
class NashMTL(Rule):
    """The bargain that no client can improve by its own relative gain without costing the others more.

    The direction is g sum alpha_i u_i with alpha_i <u_i, sum alpha_j u_j> = m lambda0_i (equation 2 for a uniform
    prior), and g the median norm of the updates. Scaling an update scales its alpha back, so it changes nothing but g,
    which attackers in the minority cannot set. The bargain has norm sqrt(m); `max_norm` shortens it. alpha is the
    minimum of the convex function 1/2 alpha^T K alpha - m sum lambda0_i log alpha_i. `residual` is the largest relative
    deviation from the equation: at most 1e-8, or what the rounding of K leaves where the updates almost cancel each
    other. Without a common descent direction there is no bargain and no step. An update that is zero takes no part.
    """

    name = "nash-mtl"
    private = "gram"

    max_norm: float = option(
        1.0, "the most that the direction's norm may be, in median norms of the updates; 0 is no bound", "[0, inf)"
    )

    def combine(self, rows: Rows) -> Combination:
        """Returns the bargain's coefficients, or no step where no direction is good for every client.

        Raises:
            UnsolvedError: Newton's method did not reach the promised residual.
        """
        K, prior = rows.gram, rows.prior
        part = (np.diag(K) > 0) & (prior > 0)
        cosines = unit_gram(K)[np.ix_(part, part)]
        if not part.any() or min_norm(cosines).stationary:
            return conclude(K, np.zeros(len(K)), prior)
        shares = prior[part] / prior[part].sum()
        x, residual, iterations = _bargain(cosines, part.sum() * shares)
        alpha = np.zeros(len(K))
        alpha[part] = x * inverse_norms(K)[part]
        norm = math.sqrt(part.sum())  # alpha^T K alpha = m
        factor = min(1.0, self.max_norm / norm) if self.max_norm else 1.0
        factor *= float(np.median(rows.norms[part]))
        return conclude(K, factor * alpha, alpha / alpha.sum(), residual=residual, iterations=float(iterations))


def _bargain(C: Matrix, gains: Vector) -> tuple[Vector, float, int]:
    """The x > 0 with x_i (C x)_i = gains_i, its largest relative deviation, and the number of Newton steps.

    Newton's method with a line search, on the convex function 1/2 x^T C x - sum gains_i log x_i. The cosines C, (m, m),
    have a common descent direction; the gains, (m,), are positive.
    """
    x: Vector = np.sqrt(gains / len(C))
    best, least = x, math.inf
    for iteration in range(_ITERATIONS):
        slope = C @ x - gains / x
        residual = float(np.abs(slope * x / gains).max())
        if residual >= least and least <= max(_TOLERANCE, _ROUNDING * float(best.sum()) ** 2):
            return best, least, iteration  # the rest is rounding
        if residual < least:
            best, least = x, residual
        step = np.linalg.solve(C + np.diag(gains / x**2), slope)
        descent = float(step @ slope)
        length = min(1.0, 0.99 / max(float((step / x).max()), 1e-300))  # x stays positive
        if descent > _NEAR * float(gains.min()):  # nearer, the whole step converges, and the values are too alike
            value = _value(C, gains, x)
            while length > _SHORTEST and _value(C, gains, x - length * step) > value - 0.25 * length * descent:
                length /= 2
        x = x - length * step
    raise UnsolvedError(f"nash-mtl: a residual of {least:.1e} after {_ITERATIONS} steps; {_TOLERANCE:.0e} is promised")


def _value(C: Matrix, gains: Vector, x: Vector) -> float:
    return float(x @ C @ x) / 2 - float(gains @ np.log(x))
