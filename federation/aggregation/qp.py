"""The quadratic program of the MGDA family (FedMGDA+, eq. 25): the shortest vector in a box of the simplex.

    minimise 1/2 lambda^T K lambda   over   sum lambda = 1,  lower <= lambda <= upper

PIQP's interior point guesses the active bounds; our primal active set starts there, ends exactly on a face, and works
from a bad guess, too. The result carries its optimality residual, computed from K itself.

Scaling: with s_i = sqrt(K_ii), x_i = lambda_i s_i / s_ref turns K into the matrix of cosines. s_ref is the least
sum lambda_i s_i that the box allows, so that the solution is of order 1 and norms may spread over many decades.

Ties: where several lambda give the same shortest vector (duplicated updates, more rows than dimensions), the one
nearest to the prior is wanted. A proximal term delta/2 ||x - x_prior||^2 picks it; delta is a few roundings of K, so
it moves nothing else, and it makes a singular K definite.
"""

from dataclasses import dataclass

import numpy as np
import piqp  # type: ignore[import-untyped]  # it has no stubs
from numpy.typing import NDArray

from federation.aggregation.interface import Matrix, Vector
from federation.errors import Error

RESIDUAL_TOLERANCE = 1e-9
# Of ||d||^2, relative to (sum lambda_i ||u_i||)^2: how far the rows cancel each other. Relative to the largest K_ii,
# one huge update outside the support would make every point look stationary.
STATIONARY_TOLERANCE = 1e-14

_EPS = float(np.finfo(np.float64).eps)
_SUM_TOLERANCE = 1e-12
_OPTIMAL = 4 * _EPS  # the residual of a prior that is kept  # no mutant: any bound near rounding will do
_SUM_ROUNDING = 2 * _EPS  # no mutant: any bound near rounding will do
_SMALLEST_NORM = 1e-5  # of s_ref; shorter rows are scaled as if they had this norm
_FAR = 1e3


class InfeasibleBoxError(Error, ValueError):
    """No lambda of the simplex lies within the bounds."""


class UnsolvedError(Error, ArithmeticError):
    """The promised residual could not be reached."""


@dataclass(frozen=True)
class Solution:
    """A certified solution.

    Attributes:
        weights: lambda, shape (m,).
        residual: the largest amount by which a pair of rows violates the optimality conditions, relative to the
            largest K_ii: shifting weight from i to j would gain K_i lambda - K_j lambda. At most 1e-9.
        iterations: of the active set.
        stationary: ||d||^2 = lambda^T K lambda is numerically zero: there is no direction.
    """

    weights: Vector
    residual: float
    iterations: int
    stationary: bool


def min_norm(
    K: Matrix, *, prior: Vector | None = None, lower: Vector | None = None, upper: Vector | None = None
) -> Solution:
    """Solves the program.

    Args:
        K: Gram matrix, shape (m, m), symmetric and positive semi-definite but for rounding.
        prior: lambda0, preferred among equally good solutions; None is 1/m.
        lower: bounds, shape (m,); None is 0.
        upper: bounds, shape (m,); None is 1.

    Raises:
        InfeasibleBoxError: the bounds cross, or leave no lambda with sum 1.
        UnsolvedError: K is so far from positive semi-definite that the residual stays above 1e-9.
        ValueError: shapes that do not fit, or values that are not finite.
    """
    m = len(K)
    lower = np.zeros(m) if lower is None else lower
    upper = np.ones(m) if upper is None else upper
    prior = np.ones(m) / m if prior is None else prior  # no mutant: the same for bounds 0 and 1
    _validate(K, prior, lower, upper)
    scale = float(np.diag(K).max())
    start = _into(prior, lower, upper)
    if kkt_residual(K, start, lower, upper) <= _OPTIMAL:  # among them: K = 0, one row, lower = upper
        return _solution(K, start, lower, upper, 0)
    face = _ActiveSet(K / scale, start, lower, upper)
    weights, iterations = face.solve()
    solution = _solution(K, weights, lower, upper, iterations)
    if solution.residual > RESIDUAL_TOLERANCE:
        raise UnsolvedError(
            f"the quadratic program over {m} rows stopped at a residual of {solution.residual:.1e} after "
            f"{iterations} iterations; {RESIDUAL_TOLERANCE:.0e} is promised. Is K a Gram matrix? "
            f"Its least eigenvalue is {np.linalg.eigvalsh(K / scale)[0]:.1e} of its largest diagonal element."
        )
    return solution


def not_negative(A: Matrix, b: Vector, prior: Vector, pull: float) -> Vector:
    """The x >= 0, shape (m,), of least ||A x - b||^2 + (pull ||x - prior||)^2.

    Args:
        A: shape (n, m).
        b: shape (n,).
        prior: shape (m,).
        pull: positive: it decides where A leaves a choice, and bounds x.

    Raises:
        UnsolvedError: the iteration does not end.
    """
    from scipy.optimize import nnls  # noqa: PLC0415 - loading takes 0.3 s, and few rounds need it

    damped = np.vstack([A, pull * np.eye(len(prior))])
    try:
        solution: Vector = nnls(damped, np.concatenate([b, pull * prior]))[0]
    except RuntimeError as error:
        raise UnsolvedError(f"non-negative least squares: {error}") from None
    return solution


def kkt_residual(K: Matrix, weights: Vector, lower: Vector, upper: Vector) -> float:
    """The residual of `weights`, relative to the largest K_ii (see `Solution.residual`); inf if they are infeasible."""
    if not (abs(weights.sum() - 1) <= _SUM_TOLERANCE and (weights >= lower).all() and (weights <= upper).all()):
        return float("inf")  # also for weights that are not numbers
    gradient = K @ weights
    # Where no weight can shrink, or none can grow, nothing is violated.
    violation = gradient[weights > lower].max(initial=-np.inf) - gradient[weights < upper].min(initial=np.inf)
    scale = float(np.diag(K).max())
    return max(0.0, float(violation) / scale) if scale > 0 else 0.0


def box(prior: Vector, epsilon: float) -> tuple[Vector, Vector]:
    """The box of FedMGDA+ around lambda0: |lambda_i - lambda0_i| <= epsilon, within [0, 1]."""
    return np.maximum(0.0, prior - epsilon), np.minimum(1.0, prior + epsilon)


def nearest(prior: Vector, lower: Vector, upper: Vector) -> Vector:
    """Weights of sum 1 within bounds that allow some, (m,) each: the prior, clipped, and the rest spread by room."""
    return _into(prior, lower, upper)


def _validate(K: Matrix, prior: Vector, lower: Vector, upper: Vector) -> None:
    m = len(K)
    if m == 0 or K.shape != (m, m):
        raise ValueError(f"K must be square with at least one row; it has shape {K.shape}")
    for name, values in (("prior", prior), ("lower", lower), ("upper", upper)):
        if values.shape != (m,) or not np.isfinite(values).all():
            raise ValueError(f"{name} must be {m} finite numbers; it has shape {values.shape}")
    if not np.isfinite(K).all():
        raise ValueError("K must be finite")
    if (np.diag(K) < 0).any():
        raise ValueError("K has a negative diagonal element: it is no Gram matrix")
    if (lower > upper).any():
        i = int(np.argmax(lower > upper))
        raise InfeasibleBoxError(f"bounds of row {i} cross: {lower[i]:g} > {upper[i]:g}")
    if lower.sum() > 1 + _SUM_TOLERANCE or upper.sum() < 1 - _SUM_TOLERANCE:
        raise InfeasibleBoxError(
            f"no weights of sum 1 lie within the box: its lower bounds sum to {lower.sum():g}, "
            f"its upper bounds to {upper.sum():g}"
        )


def _solution(K: Matrix, weights: Vector, lower: Vector, upper: Vector, iterations: int) -> Solution:
    norms: Vector = np.sqrt(np.diag(K))
    return Solution(
        weights=weights,
        residual=kkt_residual(K, weights, lower, upper),
        iterations=iterations,
        stationary=bool(weights @ K @ weights <= STATIONARY_TOLERANCE * (weights @ norms) ** 2)
        or _least_mean(norms, lower, upper) == 0,  # all the weight may lie on zero rows
    )


def _least_mean(norms: Vector, lower: Vector, upper: Vector) -> float:
    """The least sum lambda_i s_i in the box: the linear programme, solved greedily."""
    mean, left = float(lower @ norms), 1.0 - float(lower.sum())
    for i in np.argsort(norms):
        share = min(left, float(upper[i] - lower[i]))
        mean, left = mean + share * float(norms[i]), left - share
    return mean


def _into(weights: Vector, lower: Vector, upper: Vector, total: float = 1.0) -> Vector:
    """Clips into the box, then spreads the difference to a sum of `total` over the remaining room."""
    inside: Vector = np.clip(weights, lower, upper)
    missing = total - inside.sum()
    room: Vector = upper - inside if missing > 0 else inside - lower
    if abs(missing) > _SUM_ROUNDING and room.sum() > 0:
        inside = np.clip(inside + room * (missing / room.sum()), lower, upper)
    return inside


class _ActiveSet:
    """Primal active set in the scaled variables x; strictly convex thanks to the proximal term."""

    def __init__(self, K: Matrix, start: Vector, lower: Vector, upper: Vector) -> None:
        m = len(K)
        norms = np.sqrt(np.diag(K))
        reference = _least_mean(norms, lower, upper) or float(norms[norms > 0].min())
        norms = np.maximum(norms, _SMALLEST_NORM * reference)
        delta = 8 * _EPS * m
        self.a = reference / norms  # lambda = a x, so the sum constraint is a^T x = 1
        self.C = K / norms / norms[:, None] + delta * np.eye(m)
        self.lower, self.upper = lower / self.a, upper / self.a
        # A prior that lies decades from the solution must not pull at it.
        self.q = -delta * np.minimum(start / self.a, _FAR)
        self.box = lower, upper

    def solve(self) -> tuple[Vector, int]:
        """Weights with every bound that binds met exactly, and the number of iterations."""
        x, at_lower, at_upper = self._guess()
        limit = 101 + 20 * len(x)  # no mutant: far more than any matrix of the tests needs
        for iteration in range(1, limit):  # noqa: B007 - returned
            free = ~(at_lower | at_upper)
            target, nu = self._minimum_on_face(x, free)
            step, low, high = self._longest_step(x, target, free)
            if step < 1:  # no mutant: it is at most 1
                x = x + step * (target - x)
                x[low], x[high] = self.lower[low], self.upper[high]  # no mutant: they are there but for rounding
                at_lower[low] = at_upper[high] = True
                continue
            x = target
            slope = self.C @ x + self.q - nu * self.a
            violation = np.where(at_lower, -slope, slope)
            violation[free | (self.lower == self.upper)] = -np.inf
            released = int(np.argmax(violation))
            if violation[released] <= 8 * _EPS * np.abs(x).sum():  # no mutant: any bound near rounding will do
                break
            at_lower[released] = at_upper[released] = False
        lower, upper = self.box
        weights = np.where(at_lower, lower, np.where(at_upper, upper, x * self.a))
        weights[free] = _into(weights[free], lower[free], upper[free], 1.0 - weights[~free].sum())
        return weights, iteration

    def _guess(self) -> tuple[Vector, NDArray[np.bool_], NDArray[np.bool_]]:
        solver = piqp.DenseSolver()
        solver.settings.eps_abs = solver.settings.eps_rel = 1e-10
        solver.settings.max_iter = 100  # no mutant: a guess need not be good
        solver.setup(self.C, self.q, self.a[None, :], np.ones(1), None, None, None, self.lower, self.upper)
        solver.solve()
        guess = solver.result
        x = guess.x * self.a
        at_lower = (guess.x - self.lower) < guess.z_bl
        at_upper = (self.upper - guess.x) < guess.z_bu
        # Make the guess feasible: variables at a bound stay there if the others can take the rest.
        lower, upper = self.box
        x = np.where(at_lower, lower, np.where(at_upper, upper, np.clip(x, lower, upper)))
        free = ~(at_lower | at_upper)
        x[free] = _into(x[free], lower[free], upper[free], 1.0 - x[~free].sum())
        x = _into(x, lower, upper)
        return x / self.a, x <= lower, (x >= upper) & (x > lower)

    def _minimum_on_face(self, x: Vector, free: NDArray[np.bool_]) -> tuple[Vector, float]:
        """The minimiser with all bound variables held, and the price of the sum constraint.

        With nothing free the price is open. At 0, the vertex is optimal or a variable that violates it is released.
        """
        if not free.any():
            return x, 0.0
        bound = ~free
        a = self.a[free]
        rest = self.C[np.ix_(free, bound)] @ x[bound] + self.q[free]
        y = np.linalg.solve(self.C[np.ix_(free, free)], np.column_stack([-rest, a]))
        nu = (1.0 - self.a[bound] @ x[bound] - a @ y[:, 0]) / (a @ y[:, 1])
        target = x.copy()
        if len(a) > 1:  # a single free variable is held by the sum
            target[free] = y[:, 0] + nu * y[:, 1]
            # The two parts may cancel; the error of the sum is put back where it costs least.
            target[free] += y[:, 1] * ((1.0 - self.a @ target) / (a @ y[:, 1]))
        return target, float(nu)

    def _longest_step(
        self, x: Vector, target: Vector, free: NDArray[np.bool_]
    ) -> tuple[float, NDArray[np.bool_], NDArray[np.bool_]]:
        """The longest step towards the target within the box, and the bounds that end it."""
        move = target - x
        with np.errstate(divide="ignore", invalid="ignore"):
            down = np.where(free & (target < self.lower), (self.lower - x) / move, np.inf)
            up = np.where(free & (target > self.upper), (self.upper - x) / move, np.inf)
        step = max(0.0, min(1.0, float(down.min()), float(up.min())))  # no mutant: only rounding makes it negative
        return step, down <= step, up <= step  # no mutant: == differs by rounding, at upper bounds too seldom to test
