"""Scalarisation: fixed weights of the objectives, and otherwise FedAvg (the baseline of Askin et al., 2025)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from federation.aggregation.interface import Combination, HyperparameterError
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import PrivateSetting, RoundContext, RoundGenerator, Step
from federation.aggregation.rules.fedavg import FedAvg
from federation.aggregation.rules.objectives import MeasuredRule, ObjectiveService, exact_gradients, one_each, training
from federation.aggregation.secure.objectives import combined_step, mean_of
from federation.spec.options import option
from federation.work.secure.sessions import TRAIN


@dataclass(frozen=True, kw_only=True)
class Scalarised(MeasuredRule, FedAvg):
    """Clients train on sum_k lambda_k f_k with the same lambda in every round, and their updates are averaged.

    The unit of an objective's loss decides how much it counts.
    """

    name = "scalarised"

    weights: tuple[float, ...] = option(
        (), "weights of the objectives, in the task's order, not negative, divided by their sum; empty: equal weights"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and not (np.isfinite(self.weights).all() and min(self.weights) >= 0 < sum(self.weights)):
            raise HyperparameterError(f"weights must not be negative, nor all 0; got {list(self.weights)}")

    def fit(self, objectives: tuple[str, ...]) -> None:
        one_each("weights", self.weights, objectives)

    def round(self, context: RoundContext) -> RoundGenerator:
        proportions = self.weights or (1.0,) * len(context.objectives)
        shares = dict(zip(context.objectives, (weight / sum(proportions) for weight in proportions), strict=True))
        if context.private is not None:
            return (yield from self._private_round(context, context.private, shares))
        exact = yield from exact_gradients(context, self.exact_stationarity)
        factors, busy = training(shares, context.selected, context)
        replies = yield TrainingPhase(weights=factors, clients=None if len(busy) == len(context.selected) else busy)
        service = ObjectiveService.among(replies, context)
        weights = np.array([shares[name] for name in service.objectives])
        objectives = service.weighed(weights, gram=None, mode="fixed", exact=exact.of(service.objectives))
        combination = replace(self.decide(self.rows_of(replies, context)), objectives=objectives)
        drawn = self.gram_rows(context, len(replies))
        return Step(replies, combination, consulted=exact.replies, gram_rows=drawn)

    def _private_round(
        self, context: RoundContext, private: PrivateSetting, shares: Mapping[str, float]
    ) -> RoundGenerator:
        """One session: the mean update on the weighted sum of the objectives, all of which every member serves."""
        mean, total = yield from mean_of(context, private, TRAIN, context.parameters, measure=True)
        service = ObjectiveService.among(total.survivors, context)
        weights = np.array([shares[name] for name in service.objectives])
        objectives = service.weighed(weights, gram=None, mode="fixed")
        return combined_step(Combination(np.ones(1), np.ones(1), {}, {}, objectives=objectives), mean, [total])
