"""FedAvg (McMahan et al., 2017), and FedProx's server, which is the same."""

from dataclasses import dataclass
from typing import ClassVar

from coordinator.aggregation.base import Rule, conclude
from coordinator.aggregation.rules import Combination, Rows


@dataclass(frozen=True, kw_only=True)
class FedAvg(Rule):
    """The plain average of the updates: c = lambda0."""

    name: ClassVar[str] = "fedavg"

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        return conclude(rows.gram, rows.prior, rows.prior)
