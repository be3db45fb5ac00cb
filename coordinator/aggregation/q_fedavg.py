"""q-FedAvg (Li et al., 2020, "Fair Resource Allocation in Federated Learning", Algorithm 2)."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule, conclude
from coordinator.aggregation.rules import Combination, Rows

_LEAST_LOSS = 1e-10
_LARGEST = 1e12


@dataclass(frozen=True, kw_only=True)
class QFedAvg(Rule):
    """Minimises sum lambda0_i F_i^(q+1) / (q+1): the higher a client's loss F_i, the more it counts.

    c_i = lambda0_i L F_i^q / sum_j lambda0_j h_j with h_j = q F_j^(q-1) ||L u_j||^2 + L F_j^q, which bounds the
    curvature along the update, so that a step tuned for q = 0 serves every q. With q = 0 it is FedAvg, whatever L.
    F_i is the loss of the model before the client trained it, plus 1e-10; a negative one counts as 0, and without any
    positive loss nobody needs a step. Reported losses decide: a client that inflates its loss takes over.
    """

    name: ClassVar[str] = "q-fedavg"
    reads_losses: ClassVar[bool] = True

    q: float = field(
        default=1.0, metadata={"help": "how much high losses count; 0 is FedAvg, large is the worst client only"}
    )
    lipschitz: float = field(
        default=0.0,
        metadata={
            "help": "L, at most 1e12; larger is slower. 0 is 1 / train.learning_rate, where that is known, else 10"
        },
    )

    def __post_init__(self) -> None:
        if not (math.isfinite(self.q) and self.q >= 0):
            raise HyperparameterError(f"q must be finite and not negative; got {self.q!r}")
        if not 0 <= self.lipschitz <= _LARGEST:
            raise HyperparameterError(f"lipschitz must lie in [0, {_LARGEST:g}]; got {self.lipschitz!r}")

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        if rows.losses is None:
            raise ValueError("q-fedavg needs losses, one per row")
        losses = np.maximum(rows.losses, 0.0)
        if self.q > 0 and not losses.any():
            return conclude(rows.gram, np.zeros(len(losses)), rows.prior)
        losses = losses + _LEAST_LOSS
        # F^q overflows for large q; c depends on the ratios of its values only.
        largest = float(losses[rows.prior > 0].max())
        ratios = np.where(rows.prior > 0, losses / largest, 0.0)
        powers = ratios**self.q
        slopes = np.divide(self.q * powers, losses, out=np.zeros(len(losses)), where=powers > 0)
        L = self.lipschitz or (1.0 / rows.local_rate if rows.local_rate > 0 else 1.0)
        h = slopes * L**2 * np.diag(rows.gram) + L * powers
        shares = rows.prior * powers
        return conclude(rows.gram, L * shares / (rows.prior @ h), shares / shares.sum())
