"""FedFa (Huang et al., 2020, "Fairness and Accuracy in Federated Learning")."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from coordinator.aggregation.base import HyperparameterError, Rule, conclude
from coordinator.aggregation.rules import Combination, Rows, Vector
from coordinator.aggregation.server import FedFaMomentum, Optimiser


@dataclass(frozen=True, kw_only=True)
class FedFa(Rule):
    """Weighs clients by how little the model knows of them, and by how often they took part; with server momentum.

    Of accuracies A_i on their training splits and counts f_i of rounds, this one included: a_i = -log2(A_i / sum A +
    1e-6) and b_i = -log2(1 - f_i / sum f + 1e-5), each normalised to sum 1, and p = alpha a + (1 - alpha) b. Those with
    a low accuracy count more, and, through b, those who take part more often do. Where nobody is right about anything,
    a is uniform. The step has FedFa's momentum: see `FedFaMomentum`. Accuracies are those before training.
    """

    name: ClassVar[str] = "fedfa"
    reads_accuracies: ClassVar[bool] = True

    alpha: float = field(default=0.5, metadata={"help": "the share of accuracy in a weight; the rest is frequency"})
    gamma: float = field(default=0.5, metadata={"help": "how much of the server's momentum is left after a round"})
    eta: float = field(
        default=0.1,
        metadata={"help": "how much of the momentum a step has; the published code takes the clients' rate"},
    )
    sign: str = field(
        default="minus",
        metadata={"help": 'whether momentum is taken off, as in the published code ("minus"), or added ("plus")'},
    )

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise HyperparameterError(f"alpha must lie in [0, 1]; got {self.alpha!r}")
        self.optimiser()

    def cautions(self) -> tuple[str, ...]:
        """See the base."""
        return (
            *super().cautions(),
            "fedfa weighs clients by the accuracies that they report: a client that reports a low one gains influence; "
            "fedmgda+ reads neither losses nor accuracies",
        )

    def optimiser(self) -> Optimiser:
        """See the base."""
        return FedFaMomentum(gamma=self.gamma, eta=self.eta, sign=self.sign)

    def decide(self, rows: Rows) -> Combination:
        """See the class; the state is {"counts": {client: rounds}}."""
        if rows.accuracies is None or (rows.accuracies < 0).any():
            raise ValueError("fedfa needs accuracies, one per row and none of them negative")
        if not rows.clients:
            raise ValueError("fedfa needs the names of the clients, one per row")
        before: dict[str, int] = dict(rows.state.get("counts", {}))
        counts = before | {client: before.get(client, 0) + 1 for client in rows.clients}
        frequencies = np.array([counts[client] for client in rows.clients], dtype=np.float64)
        rare = _normalised(-np.log2(rows.accuracies / (rows.accuracies.sum() or 1.0) + 1e-6))
        often = _normalised(-np.log2(1.0 - frequencies / frequencies.sum() + 1e-5))
        answer = super().decide(replace(rows, prior=self.alpha * rare + (1.0 - self.alpha) * often))
        state: dict[str, Any] = {"counts": counts}
        return replace(answer, state=state)

    def combine(self, rows: Rows) -> Combination:
        """The mean of the updates by their prior, which `decide` has made p."""
        return conclude(rows.gram, rows.prior, rows.prior)


def _normalised(information: Vector) -> Vector:
    """To a sum of 1; uniform where there is none. That of a client that alone is right is 0, but for the 1e-6."""
    positive = np.maximum(information, 0.0)
    total = float(positive.sum())
    shares: Vector = positive / total if total > 0 else np.full(len(positive), 1.0 / len(positive))
    return shares
