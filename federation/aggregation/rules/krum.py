"""Krum and Multi-Krum (Blanchard et al., 2017, "Machine Learning with Adversaries", section 4)."""

from dataclasses import dataclass

import numpy as np

from federation.aggregation.base import Rule, conclude
from federation.aggregation.geometry import squared_distances
from federation.aggregation.interface import Combination, Rows, Vector, check_updates
from federation.spec.options import option


@dataclass(frozen=True, kw_only=True)
class Krum(Rule):
    """The one update that lies closest to its m - f - 2 nearest others, by the sum of squared distances.

    Of equal ones, the first in the order of the clients' names.
    """

    name = "krum"

    byzantine: int = option(1, "f, the assumed number of attackers; 2 f + 3 updates are needed", "[0, inf)")

    def combine(self, rows: Rows) -> Combination:
        return self._average(rows, 1)

    def _average(self, rows: Rows, count: int) -> Combination:
        """The average of the `count` updates of the lowest scores, by their prior."""
        m, f = len(rows.prior), self.byzantine
        check_updates(m, 2 * f + 3, f"{self.name} with byzantine = {f}")
        nearest = np.sort(squared_distances(rows.gram), axis=1)  # the first is the row itself
        scores: Vector = nearest[:, 1 : m - f - 1].sum(axis=1)
        chosen = np.argsort(scores, kind="stable")[:count]
        weights = np.zeros(m)
        prior = rows.prior[chosen]
        weights[chosen] = prior / prior.sum() if prior.sum() > 0 else 1.0 / count
        return conclude(rows.gram, weights, weights, selected=float(count))


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """The average of the updates that Krum ranks best, by their prior."""

    name = "multi-krum"
    private = "gram"

    select: int = option(0, "the number of averaged updates, at most m - f - 2; 0 is m - f - 2", "[0, inf)")

    def combine(self, rows: Rows) -> Combination:
        m, f = len(rows.prior), self.byzantine
        check_updates(m, 2 * f + 3, f"{self.name} with byzantine = {f}")
        check_updates(m, self.select + f + 2, f"multi-krum with select = {self.select} and byzantine = {f}")
        return self._average(rows, self.select or m - f - 2)
