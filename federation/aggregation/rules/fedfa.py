"""FedFa (Huang et al., 2020, "Fairness and Accuracy in Federated Learning")."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from federation.aggregation.base import Rule, conclude
from federation.aggregation.interface import Combination, Reads, Rows, Vector
from federation.aggregation.server_optimizers import FedFaMomentum, Optimizer
from federation.spec.options import option


@dataclass(frozen=True, kw_only=True)
class FedFa(Rule):
    """Weighs clients by low accuracy, and by how often they took part; with server momentum.

    Of accuracies A_i on their training splits and counts f_i of rounds, this one included: a_i = -log2(A_i / sum A +
    1e-6) and b_i = -log2(1 - f_i / sum f + 1e-5), each normalised to sum 1, and p = alpha a + (1 - alpha) b. Those with
    a low accuracy count more, and, through b, those that take part more often. Where all accuracies are 0, a is
    uniform. The step has FedFa's momentum: see `FedFaMomentum`. Accuracies are those before training. The state is
    {"counts": {client: rounds}}.
    """

    name = "fedfa"
    reads = Reads.NOTHING
    private = "sum"
    reads_accuracies = True

    alpha: float = option(0.5, "the share of accuracy in a weight; the rest is frequency", "[0, 1]")
    gamma: float = option(0.5, "how much of the server's momentum is left after a round", "[0, 1)")
    eta: float = option(
        0.1, "how much of the momentum a step has; the published code takes the clients' rate", "[0, inf)"
    )
    sign: Literal["minus", "plus"] = option(
        "minus", 'whether momentum is taken off, as in the published code ("minus"), or added ("plus")'
    )

    def cautions(self) -> tuple[str, ...]:
        return (
            *super().cautions(),
            "fedfa weighs clients by the accuracies that they report: a client that reports a low one gains influence; "
            "fedmgda+ reads neither losses nor accuracies",
        )

    def optimizer(self) -> Optimizer:
        return FedFaMomentum(gamma=self.gamma, eta=self.eta, sign=self.sign)

    def staged(self, rows: Rows) -> Combination:
        accuracies = rows.reported("accuracies", self.name)
        if (accuracies < 0).any():
            raise ValueError("fedfa needs accuracies, one per row and none of them negative")
        before: dict[str, int] = dict(rows.state.get("counts", {}))
        counts = before | {client: before.get(client, 0) + 1 for client in rows.names(self.name)}
        frequencies = np.array([counts[client] for client in rows.clients], dtype=np.float64)
        rare = _normalized(-np.log2(accuracies / (accuracies.sum() or 1.0) + 1e-6))
        often = _normalized(-np.log2(1.0 - frequencies / frequencies.sum() + 1e-5))
        answer = super().staged(replace(rows, prior=self.alpha * rare + (1.0 - self.alpha) * often))
        return replace(answer, state={"counts": counts})

    def combine(self, rows: Rows) -> Combination:
        return conclude(rows.gram, rows.prior, rows.prior)  # `staged` has made p the prior


def _normalized(information: Vector) -> Vector:
    """Scaled to a sum of 1; uniform where all are 0. Where only one client is right about anything, its value is 0."""
    positive = np.maximum(information, 0.0)
    total = float(positive.sum())
    shares: Vector = positive / total if total > 0 else np.full(len(positive), 1.0 / len(positive))
    return shares
