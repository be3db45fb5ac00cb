"""FMGDA and FSMGDA (Yang et al., 2023, "Federated Multi-Objective Learning", Algorithm 1)."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from coordinator.aggregation.base import describe
from coordinator.aggregation.fedmgda import combination, solve
from coordinator.aggregation.objectives import ObjectiveRule, Service, weights_after, weights_before
from coordinator.aggregation.phases import RoundContext, RoundGenerator, Step, Training
from coordinator.aggregation.qp import STATIONARY_TOLERANCE
from coordinator.aggregation.rules import Combination, HyperparameterError, Objectives, Rows
from coordinator.aggregation.stationarity import exact_gradients

SUMS_HELP = (
    "Delta is the sum of the gradients of the local steps, as in the paper; otherwise the update itself, which is "
    "train.learning_rate times that"
)


@dataclass(frozen=True, kw_only=True)
class FSMGDA(ObjectiveRule):
    """A row for each objective of each client, then the common descent direction of the objectives' means.

    Client i trains for each of its objectives alone; Delta_s is the mean over those that serve s; lambda is the
    min-norm point of {Delta_s}; the direction is sum_s lambda_s Delta_s. With full gradients (train.batch_size = 0) it
    is FMGDA, with A = I FedMGDA.
    """

    name: ClassVar[str] = "fsmgda"

    sums: bool = field(default=False, metadata={"help": SUMS_HELP})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages:
            raise HyperparameterError(f"pre: {self.name} sends several rows for each client; stages are for one each")

    def combine(self, rows: Rows) -> Combination:
        """Each row as an objective of its own."""
        return combination(
            rows.gram, solve(rows.gram, rows.prior, epsilon=1.0, drop_zero=False), np.ones(len(rows.prior))
        )

    def round(self, context: RoundContext) -> RoundGenerator:
        """See the class."""
        exact = yield from exact_gradients(context, self.exact_stationarity)
        replies = yield Training(separate=True)
        service = Service.among(replies, context)
        rows = [(reply.client_id, name) for reply in replies for name in reply.names]
        K = replies.gram
        factors = self.factors(dict(zip(rows, np.sqrt(np.diag(K)).tolist(), strict=True)))
        W = np.zeros((len(service.objectives), len(rows)))
        for at, (client, name) in enumerate(rows):
            W[service.objectives.index(name), at] = service.weight(client, name) * factors[client, name]
        G = W @ K @ W.T
        seen = G if self.scope == "all" else W @ replies.gram_over(self.columns(context)) @ W.T
        before = weights_before(context.state, context.objectives, service.objectives)
        weights = self.weigh(seen, before, context)
        scaled = weights * self.scales(seen)
        length = float(scaled @ np.sqrt(np.maximum(np.diag(G), 0.0)))
        stationary = bool(scaled @ G @ scaled <= STATIONARY_TOLERANCE * length**2)
        rate = 0.0 if stationary else 1.0 / context.local_rate if self.sums else 1.0
        coefficients, shares = rate * scaled @ W, weights @ W
        diagnostics = describe(K, coefficients, shares) | {"stationary": float(stationary)}
        found = Combination(
            coefficients,
            shares,
            weights_after(context.state, context.objectives, service.objectives, weights),
            diagnostics,
            objectives=Objectives(
                names=service.objectives,
                weights=weights,
                gram=G,
                mode=self.weights,
                left_out=service.left_out,
                exact=exact.of(service.objectives),
            ),
        )
        return Step(replies, found, consulted=exact.replies)
