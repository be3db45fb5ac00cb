"""A rule of one's own."""

from dataclasses import dataclass

import numpy as np

from fedpareto import Combination, HyperparameterError, Rows, Rule, conclude, hyperparameter


@dataclass(frozen=True, kw_only=True)
class WorstFirst(Rule):
    """Averages the updates of the clients that report the highest losses."""

    reads_losses = True

    share: float = hyperparameter(0.5, "share of the clients that count, in (0, 1]")

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise HyperparameterError(f"share must lie in (0, 1]; got {self.share}")

    def combine(self, rows: Rows) -> Combination:
        m = len(rows.prior)
        highest = np.argsort(-rows.losses, kind="stable")[: max(1, round(self.share * m))]
        weights = np.zeros(m)
        weights[highest] = rows.prior[highest] / rows.prior[highest].sum()
        return conclude(rows.gram, weights, weights)
