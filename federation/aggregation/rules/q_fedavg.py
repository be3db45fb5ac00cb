"""q-FedAvg (Li et al., 2020, "Fair Resource Allocation in Federated Learning", Algorithm 2)."""

from dataclasses import dataclass

import numpy as np

from federation.aggregation.base import Rule, conclude
from federation.aggregation.interface import Combination, Reads, Rows
from federation.spec.options import option

_LEAST_LOSS = 1e-10


@dataclass(frozen=True, kw_only=True)
class QFedAvg(Rule):
    """Minimises sum lambda0_i F_i^(q+1) / (q+1): the higher a client's loss F_i, the more it counts.

    c_i = lambda0_i L F_i^q / sum_j lambda0_j h_j with h_j = q F_j^(q-1) ||L u_j||^2 + L F_j^q, which bounds the
    curvature along the update, so that a step tuned for q = 0 serves every q. With q = 0 it is FedAvg, whatever L.
    F_i is the loss of the model before the client trained it, plus 1e-10; a negative one counts as 0, and without any
    positive loss there is no step. Reported losses decide: a client that inflates its loss takes over.
    """

    name = "q-fedavg"
    reads = Reads.NORMS
    private = "sum"
    reads_losses = True

    q: float = option(1.0, "how much high losses count; 0 is FedAvg, large is the worst client only", "[0, inf)")
    lipschitz: float = option(
        0.0,
        "L, at most 1e12; larger is slower. 0 is 1 / train.learning_rate, where that is known, else 10",
        "[0, 1e12]",
    )

    @property
    def divides_by_rate(self) -> bool:
        return self.q > 0 and self.lipschitz == 0

    def combine(self, rows: Rows) -> Combination:
        losses = np.maximum(rows.reported("losses", self.name), 0.0)
        if self.q > 0 and not losses.any():
            return conclude(rows.gram, np.zeros(len(losses)), rows.prior)
        losses = losses + _LEAST_LOSS
        # F^q overflows for large q; c depends only on the ratios of its values.
        largest = float(losses[rows.prior > 0].max())
        ratios = np.where(rows.prior > 0, losses / largest, 0.0)
        powers = ratios**self.q
        slopes = np.divide(self.q * powers, losses, out=np.zeros(len(losses)), where=powers > 0)
        L = self.lipschitz or (1.0 / rows.local_rate if rows.local_rate > 0 else 1.0)
        h = slopes * L**2 * rows.squares + L * powers
        shares = rows.prior * powers
        return conclude(rows.gram, L * shares / (rows.prior @ h), shares / shares.sum())
