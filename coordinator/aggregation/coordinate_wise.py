"""Coordinate-wise median and trimmed mean (Yin et al., 2018, "Byzantine-Robust Distributed Learning", Algorithm 1).

They look at every coordinate by itself and have no coefficients. Every update counts the same, whatever the prior.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule, TooFewUpdatesError
from coordinator.aggregation.rules import Combination, Coordinates, Rows


@dataclass(frozen=True, kw_only=True)
class Median(Rule):
    """Coordinate by coordinate, the median of the updates; the mean of the two in the middle of an even number."""

    name: ClassVar[str] = "median"

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        return _without(rows, (len(rows.prior) - 1) // 2)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Rule):
    """Coordinate by coordinate, the mean of the updates without the `byzantine` lowest and highest values."""

    name: ClassVar[str] = "trimmed-mean"

    byzantine: int = field(
        default=1,
        metadata={
            "help": "f, the attackers allowed for: f values are left out at each end; 2 f + 1 updates are needed"
        },
    )

    def __post_init__(self) -> None:
        if self.byzantine < 0:
            raise HyperparameterError(f"byzantine must not be negative; got {self.byzantine}")

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        m = len(rows.prior)
        if m <= 2 * self.byzantine:
            raise TooFewUpdatesError(
                f"{self.name} with byzantine = {self.byzantine} needs at least {2 * self.byzantine + 1} updates; "
                f"there are {m}"
            )
        return _without(rows, self.byzantine)


def _without(rows: Rows, trim: int) -> Combination:
    m = len(rows.prior)
    return Combination(np.zeros(0), np.full(m, 1.0 / m), {}, {}, Coordinates(np.eye(m), trim))
