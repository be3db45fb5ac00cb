"""Centred clipping (Karimireddy et al., 2021, "Learning from History for Byzantine Robust Optimization")."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule, conclude
from coordinator.aggregation.geometry import clipping, coordinates
from coordinator.aggregation.rules import Combination, Rows


@dataclass(frozen=True, kw_only=True)
class CentredClipping(Rule):
    """The centre v, moved by what is within reach: v <- v + sum lambda0_i (u_i - v) min(1, r / ||u_i - v||).

    It starts at v = 0, the model as it is, and takes `iterations` such moves; one with a large radius is FedAvg. The
    paper starts at the last round's direction, which a rule without state does not have: hence more than one move.
    """

    name: ClassVar[str] = "centred-clipping"

    radius: float = field(
        default=0.0,
        metadata={"help": "r, how far one update can pull; 0 is the median distance to the centre, move by move"},
    )
    iterations: int = field(default=10, metadata={"help": "moves of the centre"})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.radius) and self.radius >= 0):
            raise HyperparameterError(f"radius must be finite and not negative; got {self.radius!r}")
        if not 1 <= self.iterations <= 10_000:
            raise HyperparameterError(f"iterations must lie in [1, 10000]; got {self.iterations}")

    def combine(self, rows: Rows) -> Combination:
        """See the class; `moved` is the length of the last move, relative to the centre's."""
        points = coordinates(rows.gram)
        coefficients = np.zeros(len(points))
        centre = before = coefficients @ points
        for _ in range(self.iterations):
            before = centre
            pull = rows.prior * clipping(np.linalg.norm(points - centre, axis=1), self.radius)
            coefficients = coefficients * (1 - pull.sum()) + pull
            centre = coefficients @ points
        length = float(np.linalg.norm(centre))
        moved = float(np.linalg.norm(centre - before)) / length if length > 0 else 0.0
        total = coefficients.sum()
        weights = coefficients / total if total > 0 else rows.prior
        return conclude(rows.gram, coefficients, weights, moved=moved)
