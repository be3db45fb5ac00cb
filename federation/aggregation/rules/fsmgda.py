"""FMGDA and FSMGDA (Yang et al., 2023, "Federated Multi-Objective Learning", Algorithm 1)."""

from dataclasses import dataclass

import numpy as np

from federation.aggregation.diagnostics import describe
from federation.aggregation.gram import gram
from federation.aggregation.interface import Combination, HyperparameterError, Rows
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import PrivateSetting, RoundContext, RoundGenerator, Step
from federation.aggregation.qp import STATIONARY_TOLERANCE
from federation.aggregation.rules.fedmgda import combination, solve
from federation.aggregation.rules.objectives import ObjectiveRule, ObjectiveService, exact_gradients
from federation.aggregation.secure.objectives import combined_step, mean_of
from federation.spec.computation import Ability
from federation.spec.options import option
from federation.work.secure.sessions import TRAIN


@dataclass(frozen=True, kw_only=True)
class FSMGDA(ObjectiveRule):
    """A row for each objective of each client, then the common descent direction of the objectives' means.

    Client i trains for each of its objectives alone; Delta_s is the mean over those that serve s; lambda is the
    min-norm point of {Delta_s}; the direction is sum_s lambda_s Delta_s. With full gradients (train.batch_size = 0) it
    is FMGDA, with A = I FedMGDA.
    """

    name = "fsmgda"
    private = "sum"
    no_auto = "the rate is η_t of its paper, a factor of the objectives' mean gradients or updates"

    sums: bool = option(
        False,
        "Delta is the sum of the gradients of the local steps, as in the paper; otherwise the update itself, which is "
        "train.learning_rate times that",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages:
            raise HyperparameterError(f"pre: {self.name} sends several rows for each client; stages are for one each")

    def needs(self, objectives: tuple[str, ...]) -> frozenset[Ability]:
        return super().needs(objectives) - {Ability.WEIGHTS}  # each row is for one objective

    @property
    def divides_by_rate(self) -> bool:
        return self.sums

    def combine(self, rows: Rows) -> Combination:
        solution = solve(rows.gram, rows.prior, epsilon=1.0, drop_zero=False)
        return combination(rows.gram, solution, np.ones(len(rows.prior)))

    def round(self, context: RoundContext) -> RoundGenerator:
        if context.private is not None:
            return (yield from self._private_round(context, context.private))
        exact = yield from exact_gradients(context, self.exact_stationarity)
        replies = yield TrainingPhase(separate=True)
        service = ObjectiveService.among(replies, context)
        rows = [(reply.client_id, name) for reply in replies for name in reply.names]
        K = replies.gram
        factors = self.factors(dict(zip(rows, np.sqrt(np.diag(K)).tolist(), strict=True)))
        W = np.zeros((len(service.objectives), len(rows)))
        for at, (client, name) in enumerate(rows):
            W[service.objectives.index(name), at] = service.weight(client, name) * factors[client, name]
        G = W @ K @ W.T
        seen = G if self.scope == "all" else W @ replies.gram_over(self.columns(context)) @ W.T
        weights = self.weigh(seen, service.weights_before(context), context)
        scaled = weights * self.scales(seen)
        length = float(scaled @ np.sqrt(np.maximum(np.diag(G), 0.0)))
        stationary = bool(scaled @ G @ scaled <= STATIONARY_TOLERANCE * length**2)
        rate = 0.0 if stationary else 1.0 / context.local_rate if self.sums else 1.0
        coefficients, shares = rate * scaled @ W, weights @ W
        diagnostics = describe(K, coefficients, shares) | {"stationary": float(stationary)}
        state = service.state_after(context, weights)
        objectives = service.weighed(weights, gram=G, mode=self.weights, exact=exact.of(service.objectives))
        answer = Combination(coefficients, shares, state, diagnostics, objectives=objectives)
        return Step(replies, answer, consulted=exact.replies)

    def _private_round(self, context: RoundContext, private: PrivateSetting) -> RoundGenerator:
        """One session: the mean update of each objective, (M, d)."""
        M, d = len(context.objectives), context.parameters
        mean, total = yield from mean_of(context, private, TRAIN, M * d, measure=True)
        rows = mean.reshape(M, d)
        service = ObjectiveService.among(total.survivors, context)
        G = gram(list(rows))
        parts = [np.ascontiguousarray(rows[:, part]) for part in self.columns(context)]
        seen = G if self.scope == "all" else sum((gram(list(part)) for part in parts), np.zeros((1, 1)))
        weights = self.weigh(seen, service.weights_before(context), context)
        scaled = weights * self.scales(seen)
        rate = 1.0 / context.local_rate if self.sums else 1.0
        objectives = service.weighed(weights, gram=G, mode=self.weights)
        answer = Combination(np.ones(1), weights, service.state_after(context, weights), {}, objectives=objectives)
        return combined_step(answer, rate * scaled @ rows, [total])
