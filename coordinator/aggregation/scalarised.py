"""Scalarisation: fixed weights of the objectives, and otherwise FedAvg (the baseline of Askin et al., 2025)."""

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from coordinator.aggregation.fedavg import FedAvg
from coordinator.aggregation.objectives import EXACT_HELP, Service, training
from coordinator.aggregation.phases import RoundContext, RoundGenerator, Step, Training
from coordinator.aggregation.rules import HyperparameterError, Objectives
from coordinator.aggregation.stationarity import exact_gradients

WEIGHTS_HELP = (
    "of the objectives, in the task's order, not negative; none is equal weights; they are divided by their sum"
)


@dataclass(frozen=True, kw_only=True)
class Scalarised(FedAvg):
    """Clients train on sum_k lambda_k f_k with the same lambda in every round, and their updates are averaged.

    Whatever an objective's loss is measured in decides how much it counts.
    """

    name: ClassVar[str] = "scalarised"

    weights: tuple[float, ...] = field(default=(), metadata={"help": WEIGHTS_HELP})
    exact_stationarity: bool = field(default=False, metadata={"help": EXACT_HELP})

    def __post_init__(self) -> None:
        if self.weights and not (np.isfinite(self.weights).all() and min(self.weights) >= 0 < sum(self.weights)):
            raise HyperparameterError(f"weights must not be negative, nor all 0; got {list(self.weights)}")

    def fit(self, objectives: tuple[str, ...]) -> None:
        """See the base."""
        if self.weights and len(self.weights) != len(objectives):
            raise HyperparameterError(
                f"weights: {len(self.weights)} of them for {len(objectives)} objectives: {', '.join(objectives)}"
            )

    def round(self, context: RoundContext) -> RoundGenerator:
        """See the class."""
        given = self.weights or (1.0,) * len(context.objectives)
        wanted = dict(zip(context.objectives, (weight / sum(given) for weight in given), strict=True))
        exact = yield from exact_gradients(context, self.exact_stationarity)
        factors, busy = training(wanted, context.selected, context)
        replies = yield Training(weights=factors, clients=None if len(busy) == len(context.selected) else busy)
        service = Service.among(replies, context)
        weights = np.array([wanted[name] for name in service.objectives])
        objectives = Objectives(
            names=service.objectives,
            weights=weights,
            gram=None,
            mode="fixed",
            left_out=service.left_out,
            exact=exact.of(service.objectives),
        )
        combination = dataclasses.replace(self.decide(replies.rows(context)), objectives=objectives)
        return Step(replies, combination, consulted=exact.replies)
