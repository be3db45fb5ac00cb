"""A rule of one's own."""

from dataclasses import dataclass

import numpy as np

from fedpareto import Combination, Reads, Rows, Rule, conclude, option


@dataclass(frozen=True, kw_only=True)
class WorstFirst(Rule):
    """Averages the updates of the clients that report the highest losses."""

    reads = Reads.NOTHING
    reads_losses = True

    share: float = option(0.5, "share of the clients that count", "(0, 1]")

    def combine(self, rows: Rows) -> Combination:
        m = len(rows.prior)
        highest = np.argsort(-rows.losses, kind="stable")[: max(1, round(self.share * m))]
        weights = np.zeros(m)
        weights[highest] = rows.prior[highest] / rows.prior[highest].sum()
        return conclude(rows.gram, weights, weights)
