"""Norm clipping and centred clipping: averages in which no update reaches farther than a radius."""

from dataclasses import dataclass

import numpy as np

from federation.aggregation.base import Rule, conclude
from federation.aggregation.geometry import clipping, coordinates
from federation.aggregation.interface import Combination, Reads, Rows
from federation.spec.options import option


@dataclass(frozen=True, kw_only=True)
class NormClipping(Rule):
    """The average of the updates, longer ones shortened to `radius`: c_i = lambda0_i min(1, radius / ||u_i||).

    Sun et al., 2019, "Can You Really Backdoor Federated Learning?".
    """

    name = "norm-clipping"
    reads = Reads.NORMS

    radius: float = option(0.0, "the largest norm of an update; 0 is the median of the norms", "[0, inf)")

    def combine(self, rows: Rows) -> Combination:
        factors = clipping(rows.norms, self.radius)
        return conclude(rows.gram, rows.prior * factors, rows.prior, clipped=float((factors < 1).sum()))


@dataclass(frozen=True, kw_only=True)
class CentredClipping(Rule):
    """Moves a centre by what is within reach: v <- v + sum lambda0_i (u_i - v) min(1, r / ||u_i - v||).

    It starts at v = 0, the model as it is, and takes `iterations` such moves; one with a large radius is FedAvg. The
    paper starts at the last round's direction, which a rule without state does not have: hence more than one move.
    `moved` is the length of the last move, relative to the centre's. Karimireddy et al., 2021, "Learning from History
    for Byzantine Robust Optimization".
    """

    name = "centred-clipping"
    private = "gram"

    radius: float = option(
        0.0, "r, the length to which differences are shortened; 0 is their median in each iteration", "[0, inf)"
    )
    iterations: int = option(10, "moves of the centre", "[1, 10000]")

    def combine(self, rows: Rows) -> Combination:
        points = coordinates(rows.gram)
        coefficients = np.zeros(len(points))
        centre = before = coefficients @ points
        rounding = 8 * np.finfo(np.float64).eps * len(points)
        for _ in range(self.iterations):
            before = centre
            distances = np.linalg.norm(points - centre, axis=1)
            # Equal updates are treated alike. The size of other updates must not count: it would let some go unclipped.
            distances[distances <= rounding * np.maximum(rows.norms, np.linalg.norm(centre))] = 0.0
            pull = rows.prior * clipping(distances, self.radius)
            coefficients = coefficients * (1 - pull.sum()) + pull
            centre = coefficients @ points
        length = float(np.linalg.norm(centre))
        moved = float(np.linalg.norm(centre - before)) / length if length > 0 else 0.0
        total = coefficients.sum()
        weights = coefficients / total if total > 0 else rows.prior
        return conclude(rows.gram, coefficients, weights, moved=moved)
