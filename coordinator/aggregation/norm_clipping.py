"""Norm clipping (Sun et al., 2019, "Can You Really Backdoor Federated Learning?")."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from coordinator.aggregation.base import HyperparameterError, Rule, conclude
from coordinator.aggregation.geometry import clipping
from coordinator.aggregation.rules import Combination, Rows


@dataclass(frozen=True, kw_only=True)
class NormClipping(Rule):
    """The average of the updates, longer ones shortened to `radius`: c_i = lambda0_i min(1, radius / ||u_i||)."""

    name: ClassVar[str] = "norm-clipping"

    radius: float = field(
        default=0.0, metadata={"help": "the norm that an update may have; 0 is the median of the norms"}
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.radius) and self.radius >= 0):
            raise HyperparameterError(f"radius must be finite and not negative; got {self.radius!r}")

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        factors = clipping(rows.norms, self.radius)
        return conclude(rows.gram, rows.prior * factors, rows.prior, clipped=float((factors < 1).sum()))
