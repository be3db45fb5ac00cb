"""Coordinate-wise median and trimmed mean (Yin et al., 2018, "Byzantine-Robust Distributed Learning", Algorithm 1).

They look at every coordinate by itself and have no coefficients. Every update counts the same, whatever the prior.
"""

from dataclasses import dataclass

import numpy as np

from federation.aggregation.base import Rule
from federation.aggregation.interface import Combination, Coordinates, Reads, Rows, check_updates
from federation.spec.options import option

_BY_COORDINATES = "the direction is made coordinate by coordinate, so the Gram matrix does not tell its length"


@dataclass(frozen=True, kw_only=True)
class Median(Rule):
    """Coordinate by coordinate, the median of the updates; the mean of the two in the middle of an even number."""

    name = "median"
    reads = Reads.NOTHING
    no_auto = _BY_COORDINATES

    def combine(self, rows: Rows) -> Combination:
        return _without(rows, (len(rows.prior) - 1) // 2)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Rule):
    """Coordinate by coordinate, the mean of the updates without the `byzantine` lowest and highest values."""

    name = "trimmed-mean"
    reads = Reads.NOTHING
    no_auto = _BY_COORDINATES

    byzantine: int = option(
        1,
        "f, the assumed number of attackers: f values are left out at each end; 2 f + 1 updates are needed",
        "[0, inf)",
    )

    def combine(self, rows: Rows) -> Combination:
        f = self.byzantine
        check_updates(len(rows.prior), 2 * f + 1, f"{self.name} with byzantine = {f}")
        return _without(rows, f)


def _without(rows: Rows, trim: int) -> Combination:
    m = len(rows.prior)
    return Combination(np.zeros(0), np.full(m, 1.0 / m), {}, {}, Coordinates(np.eye(m), trim))
