"""FedCMOO-Pref (Askin et al., 2025, Appendix C), after EPO search (Mahapatra and Rajan, 2020): weights by a preference.

With preferences r, the goal is losses F with r_1 F_1 = ... = r_M F_M. The distance from the goal is the
Kullback-Leibler divergence of lhat = r F / sum(r F) from the uniform distribution,

    mu = sum_k lhat_k log(M lhat_k),    anchors a_k = r_k (log(M lhat_k) - mu),

and moving against grad F a lowers mu. A linear programme over the simplex picks the weights of the objectives.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from federation.aggregation.interface import HyperparameterError, Matrix, Vector
from federation.aggregation.qp import min_norm
from federation.errors import Error
from federation.sketches.base import clip_to_psd

_LEAST_SHARE = 1e-12  # of lhat, for its logarithm
_ROUNDING = 1e-14  # relative to the products whose sum is an element of G a
_TOLERANCE = 1e-7  # of a constraint, relative to its largest coefficient


class NoSolutionError(Error, ArithmeticError):
    """The linear programme has no solution, or all weights are equally good, or its solver failed."""


@dataclass(frozen=True)
class Programme:
    """Maximise objective^T lambda over the simplex, with (G lambda)_k >= least_k, or -inf for a k without a constraint.

    The mode is "balance" or "descent".
    """

    mode: str
    objective: Vector
    least: Vector


@dataclass(frozen=True)
class Preferred:
    """The weights of a round.

    Attributes:
        weights: lambda, shape (M,), sum 1.
        divergence: mu, from 0 to log M.
        mode: "balance" (towards the preference), "descent" (it is met: all losses down), or "min-norm" where the linear
            programme was not solved.
        note: why it was not solved, or "".
    """

    weights: Vector
    divergence: float
    mode: str
    note: str = ""


def preferred(
    G: Matrix,
    losses: ArrayLike,
    preference: ArrayLike,
    *,
    threshold: float = 1e-2,
    slack: float = 0.0,
    minimum: float = 0.2,
) -> Preferred:
    """The weights of the objectives that lead towards the preference, or down along it.

    G is made positive semi-definite first, and so the programme has a solution: the min-norm point meets its
    constraints. The preference is scaled to mean 1, since the programme's constraints depend on its scale.

    Args:
        G: Gram matrix of the objectives, (M, M).
        losses: F, (M,), meant to be positive; a negative one counts as 0.
        preference: r, (M,), positive, in any proportion.
        threshold: of mu, below which the preference counts as met.
        slack: objectives within this share of the largest r_k F_k count as largest, too (authors' code: 0.1).
        minimum: share of the weight that is spread evenly: lambda <- (1 - minimum) lambda + minimum / M, so that no
            weight is below minimum / M (authors' code: 0.2).

    Raises:
        HyperparameterError: cvxpy is not installed, or a preference is not positive.
        ValueError: shapes that do not fit, or values that are not finite.
    """
    r, F = np.asarray(preference, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    check_preference(r)
    M = len(r)
    if F.shape != (M,) or G.shape != (M, M):
        raise ValueError(f"losses of shape {F.shape} and G of shape {G.shape} for a preference over {M} objectives")
    if not (np.isfinite(F).all() and np.isfinite(G).all()):
        raise ValueError("losses and G must be finite")
    r = r / r.mean()
    mu = divergence(F, r)
    if M == 1:
        return Preferred(np.ones(1), mu, "descent")
    G = clip_to_psd(G)
    scale = float(np.diag(G).max())
    G = G / scale if scale > 0 else G
    linear = programme(G, F, r, threshold=threshold, slack=slack)
    mode, note = linear.mode, ""
    try:
        weights = solve(G, linear)
    except NoSolutionError as error:
        mode, note = "min-norm", f"{linear.mode}: {error}; min-norm weights instead"
        weights = min_norm(G).weights
    return Preferred((1 - minimum) * weights + minimum / M, mu, mode, note)


def check_preference(r: Vector) -> None:
    """Raises HyperparameterError unless there are preferences and all of them are positive numbers."""
    if r.ndim != 1 or not len(r) or not (np.isfinite(r) & (r > 0)).all():
        raise HyperparameterError(f"preference must be positive numbers, one for each objective; got {r.tolist()}")


def divergence(losses: Vector, preference: Vector) -> float:
    """The divergence mu of losses and preferences (M,): 0 where all r_k F_k are equal, log M where one has it all."""
    lhat = _shares(losses, preference)
    return max(0.0, float(lhat @ np.log(len(lhat) * lhat)))


def programme(G: Matrix, losses: Vector, preference: Vector, *, threshold: float, slack: float) -> Programme:
    """The linear programme of a round, for preferences as they are.

    With mu above the threshold ("balance"), lambda^T G a is maximised: the objectives with (G a)_k > 0 are free, but
    the largest r_k F_k must not rise; those with (G a)_k <= 0 must not rise faster than along the anchors. Where none
    is positive, no objective may rise. Else ("descent") the sum of G lambda is maximised, and no objective may rise.
    The arguments are those of `preferred`, with a positive semi-definite G.
    """
    M = len(losses)
    lhat, mu = _shares(losses, preference), divergence(losses, preference)
    if mu <= threshold:
        return Programme("descent", G.sum(axis=0), np.zeros(M))
    anchors = preference * (np.log(M * lhat) - mu)
    rates = G @ anchors
    falling = rates > _ROUNDING * (np.abs(G) @ np.abs(anchors))
    if not falling.any():
        return Programme("balance", rates, np.zeros(M))
    weighted = preference * losses
    largest = weighted >= weighted.max() - slack * abs(weighted.max())
    least = np.where(largest, 0.0, np.where(falling, -np.inf, rates))
    return Programme("balance", rates, least)


def solve(G: Matrix, linear: Programme) -> Vector:
    """A vertex that maximises the programme, (M,), the same bytes for the same input.

    The solver is the dual simplex of HiGHS as SciPy has it: it comes with every cvxpy, works with one thread, and ends
    at a vertex; an interior point method (CLARABEL) ends near one, or inside a face of equally good ones.

    Raises:
        NoSolutionError: infeasible, the same objective for all weights, or a solver that failed.
        HyperparameterError: cvxpy is not installed.
    """
    span = float(np.abs(linear.objective).max())
    if np.ptp(linear.objective) <= 1e-12 * span:
        raise NoSolutionError("all weights are equally good")
    check_cvxpy()
    import cvxpy  # noqa: PLC0415 - only where a preference is followed

    cp: Any = cvxpy

    bound = np.isfinite(linear.least)
    rows = np.abs(G).max(axis=1)
    scale = np.where(rows > 0, rows, 1.0)[bound]
    constraints, least = G[bound] / scale[:, None], linear.least[bound] / scale
    weights: Any = cp.Variable(len(G), nonneg=True)
    limits = [cp.sum(weights) == 1]
    if bound.any():
        limits.append(constraints @ weights >= least)
    problem = cp.Problem(cp.Maximize(linear.objective / span @ weights), limits)
    try:
        problem.solve(solver=cp.SCIPY, scipy_options={"method": "highs-ds"})
    except Exception as error:  # solvers raise exceptions of any class
        raise NoSolutionError(f"the linear programme failed: {error}") from error
    if problem.status != cp.OPTIMAL:
        raise NoSolutionError(f"the linear programme is {str(problem.status).replace('_', ' ')}")
    solution = np.maximum(np.asarray(weights.value, dtype=np.float64), 0.0)
    solution /= solution.sum()
    if (constraints @ solution < least - 10 * _TOLERANCE).any():
        raise NoSolutionError("the solution of the linear programme breaks its constraints")
    return solution


def check_cvxpy() -> None:
    """Raises HyperparameterError unless cvxpy is installed; the message says how to install it."""
    if find_spec("cvxpy") is None:  # to load it takes a second, which checking a specification need not
        raise HyperparameterError(
            'name: cvxpy, which follows preferences, is not installed here: pip install "fedpareto[preference]"'
        )


def _shares(losses: Vector, preference: Vector) -> Vector:
    """lhat, (M,), at least 1e-12 each; uniform where every loss is zero."""
    weighted = np.maximum(preference * losses, 0.0)
    total = float(weighted.sum())
    if total == 0:
        return np.full(len(losses), 1.0 / len(losses))
    return np.maximum(weighted / total, _LEAST_SHARE)
