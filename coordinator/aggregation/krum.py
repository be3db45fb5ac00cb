"""Krum and Multi-Krum (Blanchard et al., 2017, "Machine Learning with Adversaries", section 4)."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule, TooFewUpdatesError, conclude
from coordinator.aggregation.geometry import squared_distances
from coordinator.aggregation.rules import Combination, Matrix, Rows, Vector

_BYZANTINE_HELP = "f, the attackers that are allowed for; 2 f + 3 updates are needed"


@dataclass(frozen=True, kw_only=True)
class Krum(Rule):
    """The one update that lies closest to its m - f - 2 nearest others, by the sum of squared distances.

    Of equal ones, the first in the order of the clients' names.
    """

    name: ClassVar[str] = "krum"

    byzantine: int = field(default=1, metadata={"help": _BYZANTINE_HELP})

    def __post_init__(self) -> None:
        _must_not_be_negative("byzantine", self.byzantine)

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        return _average(rows, scores(rows.gram, self.name, self.byzantine), 1)


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Rule):
    """The average of the updates that Krum ranks best, by their prior."""

    name: ClassVar[str] = "multi-krum"

    byzantine: int = field(default=1, metadata={"help": _BYZANTINE_HELP})
    select: int = field(default=0, metadata={"help": "how many are averaged, at most m - f - 2; 0 is as many as that"})

    def __post_init__(self) -> None:
        _must_not_be_negative("byzantine", self.byzantine)
        _must_not_be_negative("select", self.select)

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        ranking = scores(rows.gram, self.name, self.byzantine)
        most = len(ranking) - self.byzantine - 2
        if self.select > most:
            raise TooFewUpdatesError(
                f"multi-krum with select = {self.select} and byzantine = {self.byzantine} needs at least "
                f"{self.select + self.byzantine + 2} updates; there are {len(ranking)}"
            )
        return _average(rows, ranking, self.select or most)


def scores(K: Matrix, name: str, byzantine: int) -> Vector:
    """The sum of the squared distances from each row to its m - f - 2 nearest others, shape (m,).

    Raises:
        TooFewUpdatesError: less than 2 f + 3 rows.
    """
    m = len(K)
    if m < 2 * byzantine + 3:
        raise TooFewUpdatesError(
            f"{name} with byzantine = {byzantine} needs at least {2 * byzantine + 3} updates; there are {m}"
        )
    nearest = np.sort(squared_distances(K), axis=1)  # the first is the row itself
    found: Vector = nearest[:, 1 : m - byzantine - 1].sum(axis=1)
    return found


def _average(rows: Rows, ranking: Vector, count: int) -> Combination:
    chosen = np.argsort(ranking, kind="stable")[:count]
    weights = np.zeros(len(ranking))
    prior = rows.prior[chosen]
    weights[chosen] = prior / prior.sum() if prior.sum() > 0 else 1.0 / count
    return conclude(rows.gram, weights, weights, selected=float(count))


def _must_not_be_negative(name: str, value: int) -> None:
    if value < 0:
        raise HyperparameterError(f"{name} must not be negative; got {value}")
