"""Averages of the updates: as they are, or each scaled to norm 1."""

from dataclasses import dataclass
from typing import ClassVar

from federation.aggregation.base import Opened, Rule, conclude
from federation.aggregation.geometry import inverse
from federation.aggregation.interface import Combination, Reads, Rows


@dataclass(frozen=True, kw_only=True)
class FedAvg(Rule):
    """The plain average of the updates: c = lambda0 (McMahan et al., 2017). FedProx has the same server."""

    name = "fedavg"
    reads = Reads.NOTHING
    private: ClassVar[Opened] = "sum"

    def combine(self, rows: Rows) -> Combination:
        return conclude(rows.gram, rows.prior, rows.prior)


@dataclass(frozen=True, kw_only=True)
class FedAvgN(Rule):
    """The average of the updates scaled to norm 1: c_i = lambda0_i / ||u_i||; a zero update contributes nothing.

    FedMGDA+ at epsilon = 0 (Hu et al., 2022, section 6).
    """

    name = "fedavg-n"
    reads = Reads.NORMS
    private = "sum"

    def sensitivity(self, updates: int) -> float | None:
        return None if self.stages else 2.0 / updates

    def combine(self, rows: Rows) -> Combination:
        return conclude(rows.gram, rows.prior * inverse(rows.norms), rows.prior)
