"""FedMDFG (Pan et al., 2023, "FedMDFG: Federated Learning with Multi-Gradient Descent and Fair Guidance").

The text of the paper was not at hand. This follows the authors' code (https://github.com/zibinpan/FedMDFG, two
versions), with these differences. All step sizes are tried in one phase, not one after the other. Each loss must fall;
the code requires a loss below F + 1e-4 s <u_i, d>, which lets it rise. Both cosines of the test for fairness use the
Euclidean norm; the first version of the code divides one of them by the sum. Updates of earlier rounds (`tau`) are
scaled like those of the round. The code also adds the row of fairness below `theta` when the losses of some clients
rose above their average over the rounds; here this is left out. A zero update is refused before the rule is applied;
the code leaves such clients out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from federation.aggregation.base import conclude
from federation.aggregation.geometry import inverse_norms, unit_gram
from federation.aggregation.gram import combine
from federation.aggregation.interface import Combination, Matrix, Rows, TooFewUpdatesError, Vector
from federation.aggregation.phase_kinds import LineSearchPhase
from federation.aggregation.phases import Replies, RoundContext, RoundGenerator
from federation.aggregation.qp import min_norm
from federation.aggregation.rules.earlier_updates import Remembering
from federation.aggregation.rules.fedmgda import standstill
from federation.aggregation.server_optimizers import Optimizer, Sgd
from federation.spec.objective_names import JOINT
from federation.spec.options import option
from federation.work.search.work import step_metric

_ARMIJO = 1e-4  # of the decrease that the slope promises
_ROUNDING = 1e-5  # of the lengths that are added up, in updates of float32


@dataclass(frozen=True, kw_only=True)
class FedMDFG(Remembering):
    """A direction that is good for every client and for fairness, and a step size that clients have tried.

    All updates are scaled to their mean norm. The angle between the losses F and the vector of ones says how unfair the
    model is. Beyond `theta`, the gradient of -cos(F, 1), a combination of the updates, joins them as one more row. The
    direction is the shortest vector in the convex hull of the rows, given the length of the mean of the scaled updates.
    So it is a descent direction for each row, or zero. With `tau`, the last updates of absent clients are rows, too.

    Then the clients measure their training losses at the step sizes 2^s, 2^(s-1), ..., 2^-s, times the server's rate;
    at smaller ones too where the direction was lengthened a lot, and at none above 1 where absent clients have rows.
    The largest step counts at which every client's loss falls as its slope promises (Armijo), and the losses become
    fairer if they had to. If there is none, the largest one at which the sum of the losses falls; if there is none, the
    one with the least sum.
    """

    name = "fedmdfg"
    reads_losses = True
    no_auto = "the members choose the step's length, by their losses at multiples of the rate"

    theta: float = option(
        11.25, "degrees between the losses and equal losses up to which the model counts as fair", "(0, 90)"
    )
    s: int = option(5, "the step sizes that are tried: 2^s, 2^(s-1), ..., 2^-s", "[0, 20]")

    def cautions(self) -> tuple[str, ...]:
        return (
            *super().cautions(),
            standstill(self.name),
            f"{self.name} chooses its step size by the losses that clients report. A client that reports false losses "
            f"can choose any step size that is tried, at most {2.0**self.s:g} times server.learning_rate. A smaller s "
            "lowers this limit",
        )

    def optimizer(self) -> Optimizer:
        """The step along the direction itself, as the clients tried it."""
        return Sgd()

    @property
    def divides_by_rate(self) -> bool:
        return True

    def combine(self, rows: Rows) -> Combination:
        """The direction.

        Diagnostics: `angle` in degrees, `guided`, 1 where fairness was a row, `lengthened`, the factor by which the
        shortest vector was lengthened, and the `residual` of the quadratic program.
        """
        K, m = rows.gram, rows.current
        inverse = inverse_norms(K)
        present = np.flatnonzero(inverse[:m])
        if not len(present):
            return conclude(K, np.zeros(len(K)), rows.prior[:m], angle=0.0, guided=0.0, lengthened=1.0, residual=0.0)
        C = unit_gram(K)
        angle, guidance = unfairness(rows.reported("losses", self.name)[present])
        guided = angle > self.theta
        A = np.eye(len(K))[inverse > 0]
        if guided:
            row = np.zeros(len(K))
            row[present] = guidance
            A = np.vstack([A, row])
        directions = A @ C @ A.T
        # Updates that cancel each other in the row of fairness leave a square of rounding, which may be below zero.
        np.fill_diagonal(directions, np.maximum(np.diag(directions), 0.0))
        solution = min_norm(directions)
        unit = solution.weights @ A
        shortest, mean_length = (math.sqrt(max(0.0, float(x @ C @ x))) for x in (unit, rows.prior))
        # What is left of updates that cancel each other is their rounding: it must not grow to a whole step.
        standing = solution.stationary or shortest <= _ROUNDING * float(np.abs(unit).sum())
        lengthened = 1.0 if standing else mean_length / shortest
        mean = float(rows.norms[present].mean())
        coefficients = np.zeros(len(K)) if standing else mean * lengthened * unit * inverse
        shares = np.maximum(unit[:m], 0.0)
        weights = shares / shares.sum() if shares.any() else rows.prior[:m]
        return conclude(
            K,
            coefficients,
            weights,
            angle=angle,
            guided=float(guided),
            lengthened=lengthened,
            residual=solution.residual,
        )

    def round(self, context: RoundContext) -> RoundGenerator:
        step = yield from super().round(context)
        measured = step.combination.diagnostics
        if measured["stationary"]:
            return step
        sizes = step_sizes(self.s, measured["lengthened"], absent=bool(step.history))
        rates = tuple(context.server_rate * size for size in sizes)
        blocks = combine(step.combination.coefficients, step.rows, device=context.device)
        with np.errstate(over="ignore"):
            direction = np.concatenate([block.astype(np.float32) for block in blocks])
        clients = tuple(reply.client_id for reply in step.replies)
        tried = yield LineSearchPhase(direction=direction, steps=rates, clients=clients)
        losses_by_client = _measured_losses(tried, len(sizes))
        if not losses_by_client:
            raise TooFewUpdatesError(f"{self.name} needs losses along its direction, and no client reported one")
        slopes = (step.gram @ step.combination.coefficients)[: len(step.replies)] / context.local_rate
        indices = [index for index, reply in enumerate(step.replies) if reply.client_id in losses_by_client]
        index, agreed = choose(
            np.array(rates),
            np.array([reply.losses[JOINT] for reply in step.replies if reply.client_id in losses_by_client]),
            np.array([losses_by_client[clients[i]] for i in indices]).T,
            slopes[indices],
            fairer=bool(measured["guided"]),
        )
        diagnostics = measured | {
            "step": sizes[index],
            "steps_tried": float(len(sizes)),
            "tried_by": float(len(losses_by_client)),
            "agreed": float(agreed),
        }
        return replace(
            step,
            combination=replace(step.combination, diagnostics=diagnostics),
            consulted=(*step.consulted, *tried),
            size=sizes[index],
        )


def unfairness(losses: Vector) -> tuple[float, Vector]:
    """The angle between losses F, shape (m,), and (1, ..., 1) in degrees: 0 if all are equal.

    With it, the derivative of -cos(F, 1) by F, scaled to norm 1, shape (m,). Where that is 0, as for losses that are
    all 0, the angle is 0.
    """
    largest = float(np.abs(losses).max())
    nothing = 0.0, np.zeros(len(losses))
    if largest == 0:
        return nothing
    F = losses / largest
    F = F / np.linalg.norm(F)
    ones = np.full(len(F), 1.0 / math.sqrt(len(F)))
    cosine = float(np.clip(F @ ones, -1.0, 1.0))
    derivative: Vector = cosine * F - ones
    length = float(np.linalg.norm(derivative))
    if length <= 1e-12:  # but for rounding
        return nothing
    return math.degrees(math.acos(cosine)), derivative / length


def step_sizes(s: int, lengthened: float, *, absent: bool) -> tuple[float, ...]:
    """The step sizes to try, in descending order: 2^s, 2^(s-1), ..., 2^-s or below.

    Args:
        s: see `FedMDFG`.
        lengthened: the factor by which the shortest vector was lengthened; the least size is 2^-s of that vector.
        absent: clients of earlier rounds are absent, who cannot try a step: none above 1.
    """
    least = -s - max(0, math.floor(math.log2(lengthened) + 1e-9))
    return tuple(2.0**exponent for exponent in range(0 if absent else s, least - 1, -1))


def choose(steps: Vector, before: Vector, after: Matrix, slopes: Vector, *, fairer: bool) -> tuple[int, bool]:
    """The step that a line search chooses.

    Args:
        steps: in descending order, shape (k,).
        before: the losses of the n clients before the step, shape (n,).
        after: their losses after each step, shape (k, n); inf where there is none.
        slopes: by how much each loss falls for each unit of the step, to first order, shape (n,).
        fairer: the losses have to come nearer to equal losses.

    Returns:
        The index of the step, and True if it is good for every client.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        good = np.flatnonzero((before - after >= _ARMIJO * steps[:, None] * slopes).all(axis=1)).tolist()
        if fairer:
            angle = unfairness(before)[0]
            good = [index for index in good if unfairness(after[index])[0] < angle]
        if good:
            return int(good[0]), True
        sums, start = after.sum(axis=1), before.sum()
    lower = sums < start
    if lower.any():
        return int(np.argmax(lower)), False
    return len(sums) - 1 - int(np.argmin(sums[::-1])), False  # of equals, the smallest step


def _measured_losses(tried: Replies, count: int) -> dict[str, Sequence[float]]:
    """The losses at each step, inf where there is none, of the clients that report at least one."""
    by_client = {
        reply.client_id: [reply.metrics.get(step_metric(k), math.inf) for k in range(count)] for reply in tried
    }
    return {client: losses for client, losses in by_client.items() if np.isfinite(losses).any()}
