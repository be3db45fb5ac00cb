"""FedAvg-n: the average of normalised updates (FedMGDA+, section 6)."""

from dataclasses import dataclass
from typing import ClassVar

from coordinator.aggregation.base import Rule, conclude
from coordinator.aggregation.geometry import inverse_norms
from coordinator.aggregation.rules import Combination, Rows


@dataclass(frozen=True, kw_only=True)
class FedAvgN(Rule):
    """The average of the updates scaled to norm 1: c_i = lambda0_i / ||u_i||; a zero update contributes nothing.

    FedMGDA+ at epsilon = 0.
    """

    name: ClassVar[str] = "fedavg-n"

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        return conclude(rows.gram, rows.prior * inverse_norms(rows.gram), rows.prior)
