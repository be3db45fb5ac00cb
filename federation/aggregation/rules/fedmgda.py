"""FedMGDA, FedMGDA+ (Hu et al., 2022, Algorithm 1), and FedMGDA+ in the smallest box that opposes no client."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from federation.aggregation.base import Rule
from federation.aggregation.diagnostics import describe
from federation.aggregation.geometry import inverse_norms, unit_gram
from federation.aggregation.interface import Combination, Matrix, Rows, TooFewUpdatesError, Vector
from federation.aggregation.qp import RESIDUAL_TOLERANCE, InfeasibleBoxError, Solution, box, min_norm, nearest
from federation.aggregation.rules.client_preferences import MIXING, WORDS, ClientPreferences
from federation.spec.options import option

DROP_ZERO = (
    "leave zero updates out, and those a million times shorter than the median, as already satisfied; otherwise one "
    "zero update stops FedMGDA"
)
EPSILON_DECAY = (
    "p of epsilon_t = epsilon / (t + 1)^p in round t from 0: above 0, epsilon goes to 0; 0 leaves it as it is"
)
_ZERO = 1e-6  # of the median norm: a shorter update counts as zero
_STANDSTILL = 1e-7  # of the median norm: a direction that moves nothing
_NO_HARM = -1e-9  # a cosine: a zero after rounding
_WIDTH = 2.0**-20  # the precision of the box of FedMGDA+auto


@dataclass(frozen=True, kw_only=True)
class FedMGDA(Rule):
    """The shortest weighted mean d of the updates u_i with |lambda_i - lambda0_i| <= epsilon (eq. 25).

    With epsilon = 1, the default, nothing bounds a weight: d is the shortest vector in the convex hull of the updates,
    and <d, u_i> >= ||d||^2 for every client. It is zero exactly at a Pareto stationary point, where no direction is
    good for every client; no step is taken there. With epsilon = 0, d is FedAvg's. In between, every weight is bounded
    by lambda0_i + epsilon, and d may be against some clients: see `descent_min`. A direction of at most 1e-7 of the
    median norm of the updates counts as zero.
    """

    name = "fedmgda"
    private = "gram"

    epsilon: float = option(1.0, "how far a weight may be from lambda0, in [0, 1]; 0 is FedAvg, 1 no bound", "[0, 1]")
    drop_zero: bool = option(False, DROP_ZERO)
    epsilon_decay: float = option(0.0, EPSILON_DECAY, "[0, 10]")
    preferences: tuple[str, ...] = option((), WORDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_preferences(self.preferences, [stage.name for stage in self.stages], self.refusal)

    def cautions(self) -> tuple[str, ...]:
        unbounded = self.epsilon == 1 and not self.epsilon_decay
        trusted = ClientPreferences.parse(self.preferences).cautions()
        return (*super().cautions(), *((standstill(self.name),) if unbounded else ()), *trusted)

    def largest_weights(self, prior: Vector) -> Vector | None:
        return None if self.epsilon == 1 or self.preferences else box(prior, self.epsilon)[1]

    def combine(self, rows: Rows) -> Combination:
        epsilon = shrunk(self.epsilon, self.epsilon_decay, rows.round)
        preferred = preferred_bounds(self.preferences, rows, self.name)
        solution = solve(
            rows.gram, rows.prior, epsilon=epsilon, drop_zero=self.drop_zero, cap=rows.cap, preferred=preferred
        )
        # With all weight on an update of almost no length nothing cancels, and still the model hardly moves.
        shortest = math.sqrt(max(0.0, float(solution.weights @ rows.gram @ solution.weights)))
        if shortest <= _STANDSTILL * float(np.median(rows.norms)):
            solution = replace(solution, stationary=True)
        return combination(rows.gram, solution, np.ones(len(rows.prior)))


@dataclass(frozen=True, kw_only=True)
class FedMGDAPlus(Rule):
    """The shortest weighted mean of the g_i = u_i / ||u_i|| with |lambda_i - lambda0_i| <= epsilon (eq. 25).

    c_i = lambda_i / ||u_i||. Scaling an update changes nothing, so none can be made to count for more. With epsilon = 1
    the direction is a descent direction for all clients; a smaller epsilon moves towards FedAvg-n (epsilon = 0), bounds
    every client's weight by lambda0_i + epsilon, and may cost that guarantee: see `descent_min`. The default, "auto",
    is epsilon = 1/m for the m rows of the round, and half of that in a private round; the paper leaves the choice open.
    """

    name = "fedmgda+"
    private = "gram"

    epsilon: float | Literal["auto"] = option(
        "auto",
        "how far a weight may be from lambda0, in [0, 1]; 0 is FedAvg-n, 1 no bound, auto 1/m for m updates",
        "[0, 1]",
    )
    drop_zero: bool = option(False, DROP_ZERO)
    epsilon_decay: float = option(0.0, EPSILON_DECAY, "[0, 10]")
    preferences: tuple[str, ...] = option((), WORDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_preferences(self.preferences, [stage.name for stage in self.stages], self.refusal)

    def cautions(self) -> tuple[str, ...]:
        unbounded = self.epsilon == 1 and not self.epsilon_decay
        trusted = ClientPreferences.parse(self.preferences).cautions()
        return (*super().cautions(), *((standstill(self.name),) if unbounded else ()), *trusted)

    def sensitivity(self, updates: int) -> float | None:
        """2 min(1, 1/m + epsilon), plus a term for the residual of the program.

        Let s <= t be the client's weights before and after, and v, v' the directions. Weights of the others can be
        moved between the two solutions so that both keep their bounds; the conditions of optimality at these points
        add up to ||v - v'||^2 <= e . (v' - v) with ||e|| <= 2 t. A residual r moves a direction by at most sqrt(2 r)
        more. Dropping zero updates, and preferences, change the bounds of others, so then there is no bound.
        """
        if self.stages or self.drop_zero or self.preferences:
            return None
        epsilon = 1.0 / updates if self.epsilon == "auto" else self.epsilon
        return 2.0 * min(1.0, 1.0 / updates + epsilon) + 2.0 * math.sqrt(2.0 * RESIDUAL_TOLERANCE)

    def largest_weights(self, prior: Vector) -> Vector | None:
        epsilon = 1.0 / len(prior) if self.epsilon == "auto" else self.epsilon
        return None if epsilon >= 1 or self.preferences else box(prior, epsilon)[1]

    def combine(self, rows: Rows) -> Combination:
        width = 1.0 if rows.cap is None else 0.5
        first = width / rows.current if self.epsilon == "auto" else self.epsilon
        epsilon = shrunk(first, self.epsilon_decay, rows.round)
        preferred = preferred_bounds(self.preferences, rows, self.name)
        solution = solve(
            unit_gram(rows.gram),
            rows.prior,
            epsilon=epsilon,
            drop_zero=self.drop_zero,
            cap=rows.cap,
            preferred=preferred,
        )
        return combination(rows.gram, solution, inverse_norms(rows.gram))


@dataclass(frozen=True, kw_only=True)
class FedMGDAAuto(Rule):
    """FedMGDA+ with the smallest epsilon for which <d, g_i> >= 0 for every client: epsilon is found, not given.

    Where plain normalised averaging helps every client it is FedAvg-n (epsilon = 0); it moves towards FedMGDA+
    without a box only as far as conflicts force it. epsilon is found by bisection on one K. The inner products need not
    be monotone in epsilon, but the box whose answer is returned was checked itself, and epsilon = 1 always descends.
    The diagnostics hold `epsilon` and the number of `programs` solved. This choice of the box is ours.
    """

    name = "fedmgda+auto"
    private = "gram"

    drop_zero: bool = option(False, DROP_ZERO)

    def cautions(self) -> tuple[str, ...]:
        return (*super().cautions(), standstill(self.name))  # the box bounds nothing where one opposes all others

    def combine(self, rows: Rows) -> Combination:
        unit, scale = unit_gram(rows.gram), inverse_norms(rows.gram)

        def answer(epsilon: float) -> Combination:
            solution = solve(unit, rows.prior, epsilon=epsilon, drop_zero=self.drop_zero, cap=rows.cap)
            return combination(rows.gram, solution, scale)

        def harmless(epsilon: float) -> Combination | None:
            """None where the answer opposes a client, or the cap leaves no weights in the box."""
            with suppress(TooFewUpdatesError):
                found = answer(epsilon)
                return found if found.diagnostics["descent_min"] >= _NO_HARM else None
            return None

        epsilon, best, programs = 0.0, harmless(0.0), 1
        if best is None:
            low, epsilon, best, programs = 0.0, 1.0, answer(1.0), 2
            while epsilon - low > _WIDTH:
                middle = (low + epsilon) / 2
                tried = harmless(middle)
                programs += 1
                if tried is None:
                    low = middle
                else:
                    epsilon, best = middle, tried
        return replace(best, diagnostics=best.diagnostics | {"epsilon": epsilon, "programs": float(programs)})


def standstill(name: str) -> str:
    """The caution for a rule whose weights are not bounded: one client can put 0 into the convex hull."""
    return (
        f"{name} without a box around lambda0: one client that sends the negative mean of the others brings every step "
        "to a standstill; fedmgda+ with an epsilon below 1, such as 0.1, bounds each client's weight"
    )


def shrunk(epsilon: float, decay: float, round_: int) -> float:
    """epsilon_t = epsilon / (t + 1)^decay, from round 0 on: it goes to 0 (Hu et al., 2022, theorem 1b)."""
    return float(epsilon / (round_ + 1.0) ** decay)


def check_preferences(texts: tuple[str, ...], stages: Sequence[str], refusal: type[ValueError]) -> None:
    """Checks that preferences can be read, and that rows stay those of single clients. Raises `refusal`."""
    try:
        ClientPreferences.parse(texts)
    except ValueError as error:
        raise refusal(str(error)) from None
    if texts and (mixing := [name for name in stages if name in MIXING]):
        raise refusal(
            f"preferences: after the stage {mixing[0]} an update is no longer that of one client: leave it out"
        )


def preferred_bounds(texts: tuple[str, ...], rows: Rows, rule: str) -> tuple[Vector, Vector] | None:
    """The bounds of the rows' weights by preferences, (m,) and (m,); None without any. Raises TooFewUpdatesError."""
    return ClientPreferences.parse(texts).bounds(rows.names(rule)) if texts else None


def solve(
    K: Matrix,
    prior: Vector,
    *,
    epsilon: float,
    drop_zero: bool,
    cap: float | None = None,
    preferred: tuple[Vector, Vector] | None = None,
) -> Solution:
    """The min-norm weights within `epsilon` of the prior, and at most `cap`.

    With `preferred`, the least and the largest weight of each row, (m,) and (m,), epsilon counts from the prior that
    is moved into these bounds, so that some weights always meet both. Zero rows take part, or get weight 0 with
    `drop_zero`; a preference for such a row then has no effect.

    Raises:
        TooFewUpdatesError: no weights within the box and of at most `cap` add up to 1.
    """
    norms = np.sqrt(np.diag(K))
    used = (norms > 0) & (norms > _ZERO * np.median(norms)) if drop_zero else np.ones(len(prior), dtype=bool)
    if used.all() or prior[used].sum() == 0:
        if preferred is not None:
            prior = nearest(prior, *preferred)
        lower, upper = box(prior, epsilon)
        if preferred is not None:
            lower, upper = np.maximum(lower, preferred[0]), np.minimum(upper, preferred[1])
        if cap is not None:
            lower, upper = np.minimum(lower, cap), np.minimum(upper, cap)
            prior = np.clip(prior, lower, upper)
        try:
            return min_norm(K, prior=prior, lower=lower, upper=upper)
        except InfeasibleBoxError as error:
            raise TooFewUpdatesError(
                f"no weights of at most {cap or 1:.4g} that differ from lambda0 by at most {epsilon:.4g} add up to 1: "
                "the lambda0 of a client is too large"
            ) from error
    rest = None if preferred is None else (preferred[0][used], preferred[1][used])
    if rest is not None and rest[1].sum() < 1:
        raise TooFewUpdatesError(
            f"preferences: the largest weights of the clients whose updates are not zero add up to {rest[1].sum():g}"
        )
    solution = solve(
        K[np.ix_(used, used)],
        prior[used] / prior[used].sum(),
        epsilon=epsilon,
        drop_zero=False,
        cap=cap,
        preferred=rest,
    )
    weights = np.zeros(len(prior))
    weights[used] = solution.weights
    return replace(solution, weights=weights)


def combination(K: Matrix, solution: Solution, scale: Vector) -> Combination:
    """The answer for weights of rows scaled by `scale`; at a stationary point all coefficients are 0: no step."""
    coefficients = np.zeros(len(K)) if solution.stationary else solution.weights * scale
    diagnostics = describe(K, coefficients, solution.weights) | {
        "residual": solution.residual,
        "stationary": float(solution.stationary),
        "iterations": float(solution.iterations),
    }
    return Combination(coefficients, solution.weights, {}, diagnostics)
