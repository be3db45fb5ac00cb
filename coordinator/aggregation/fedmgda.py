"""FedMGDA: the common descent direction of least norm (Hu et al., 2022, Algorithm 1 on raw updates)."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule, describe
from coordinator.aggregation.qp import Solution, box, min_norm
from coordinator.aggregation.rules import Combination, Matrix, Rows, Vector

DROP_ZERO_HELP = (
    "leave zero updates out, and those a million times shorter than the median, as already satisfied; otherwise one "
    "zero update stops FedMGDA"
)
_ZERO = 1e-6  # of the median norm: what counts as a zero update
_STANDSTILL = 1e-7  # of the median norm: a direction that moves nothing


@dataclass(frozen=True, kw_only=True)
class FedMGDA(Rule):
    """The shortest weighted mean d of the updates u_i with |lambda_i - lambda0_i| <= epsilon (eq. 25).

    With epsilon = 1, the default, nothing bounds a weight: d is the shortest vector in the convex hull of the updates,
    and <d, u_i> >= ||d||^2 for every client. It is zero exactly at a Pareto stationary point, where no direction is
    good for every client; no step is taken there. With epsilon = 0, d is FedAvg's. In between, every weight is bounded
    by lambda0_i + epsilon, and d may be against some clients: see `descent_min`. A direction of at most 1e-7 of the
    median norm of the updates counts as zero.
    """

    name: ClassVar[str] = "fedmgda"

    epsilon: float = field(
        default=1.0,
        metadata={"help": "how far a weight may be from lambda0, in [0, 1]; 0 is FedAvg, 1 no bound"},
    )
    drop_zero: bool = field(default=False, metadata={"help": DROP_ZERO_HELP})

    def __post_init__(self) -> None:
        must_be_a_box(self.epsilon)

    def cautions(self) -> tuple[str, ...]:
        """Those of every rule, and that one client can stop the run where nothing bounds a weight."""
        return (*super().cautions(), standstill(self.name)) if self.epsilon == 1 else super().cautions()

    def combine(self, rows: Rows) -> Combination:
        """Finds the weights on the Gram matrix of the raw updates."""
        solution = solve(rows.gram, rows.prior, epsilon=self.epsilon, drop_zero=self.drop_zero)
        # All weight on an update next to nothing does not cancel anything, and still nobody is moved.
        shortest = math.sqrt(max(0.0, float(solution.weights @ rows.gram @ solution.weights)))
        if shortest <= _STANDSTILL * float(np.median(rows.norms)):
            solution = replace(solution, stationary=True)
        return combination(rows.gram, solution, np.ones(len(rows.prior)))


def must_be_a_box(epsilon: float, other: str = "") -> None:
    """Makes sure that epsilon is the half width of a box around lambda0.

    Args:
        epsilon: how far each weight may be from lambda0.
        other: what the hyper-parameter takes besides numbers, for the message.

    Raises:
        HyperparameterError: it is not in [0, 1].
    """
    if not (math.isfinite(epsilon) and 0 <= epsilon <= 1):
        raise HyperparameterError(f"epsilon must {other}lie in [0, 1]; got {epsilon!r}")


def standstill(name: str) -> str:
    """What to know of a rule whose weights are not bounded: one client can put 0 into the convex hull."""
    return (
        f"{name} without a box around lambda0: one client that sends the negative mean of the others brings every step "
        "to a standstill; fedmgda+ with an epsilon below 1, such as 0.1, bounds each client's weight"
    )


def solve(K: Matrix, prior: Vector, *, epsilon: float, drop_zero: bool) -> Solution:
    """The min-norm weights within `epsilon` of the prior; zero rows take part, or get weight 0 with `drop_zero`."""
    norms = np.sqrt(np.diag(K))
    kept = (norms > 0) & (norms > _ZERO * np.median(norms)) if drop_zero else np.ones(len(prior), dtype=bool)
    if kept.all() or prior[kept].sum() == 0:
        lower, upper = box(prior, epsilon)
        return min_norm(K, prior=prior, lower=lower, upper=upper)
    solution = solve(K[np.ix_(kept, kept)], prior[kept] / prior[kept].sum(), epsilon=epsilon, drop_zero=False)
    weights = np.zeros(len(prior))
    weights[kept] = solution.weights
    return Solution(weights, solution.residual, solution.iterations, solution.stationary)


def combination(K: Matrix, solution: Solution, scale: Vector) -> Combination:
    """The answer for weights of rows scaled by `scale`; at a stationary point all coefficients are 0: no step."""
    coefficients = np.zeros(len(K)) if solution.stationary else solution.weights * scale
    diagnostics = describe(K, coefficients, solution.weights) | {
        "residual": solution.residual,
        "stationary": float(solution.stationary),
        "iterations": float(solution.iterations),
    }
    return Combination(coefficients, solution.weights, {}, diagnostics)
