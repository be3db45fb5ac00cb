"""The metrics that a round has: the coordinator records what this module says, and a verifier expects the same.

Which metrics a round has follows from the specification and from what happened in it. Their values are those of
`step_metrics`, `model_metrics` and `step_rate`, computed from what was signed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from federation.aggregation.base import Algorithm
from federation.aggregation.diagnostics import describe, entropy
from federation.aggregation.interface import Matrix, Objectives, Vector
from federation.aggregation.metrics.model_metrics import Measurements, improved, scores, scores_of_means, watched
from federation.aggregation.metrics.round_metrics import RELATIVE, RoundMetrics, Span
from federation.aggregation.metrics.step_metrics import agreement, of_objectives
from federation.aggregation.metrics.step_rate import bound, direction_length, scheduled_rate, update_lengths
from federation.aggregation.phases import PhaseReply, Replies, Step
from federation.aggregation.secure.evaluation import Means
from federation.record.metric_definitions import Basis, basis
from federation.spec.accounting import gaussian_epsilon
from federation.spec.run_sections import AUTO
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import MetricKind, kind_of

WEIGHTS = 1e-6  # of a metric of the rule's weights, or of a private round
LENGTH = 1e-8  # of a direction, relative to the longest update
SQUARE = 1e-9  # of the square of a shortest vector, relative to the square of the longest update
_SAME = 1e-7  # by which the coefficients of one solution differ, relative to the largest
_STRAIGHT = -1e-9  # a cosine above counts as not against the direction
_OF_COORDINATES = frozenset({"direction_norm", "descent_min", "descent_share", "stationary"})


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts about a step from which its metrics follow.

    Attributes:
        number: of the round.
        steps: of the run so far, with this one.
        K: the signed Gram matrix, shape (m, m), or of some rows; None where it is not kept.
        coefficients: as signed, shape (m,), or (0,) for a rule that works coordinate by coordinate.
        rate: as signed.
        weights: of the objectives, as signed.
        replies: those that the step combines, of this round.
        told: all replies of this round that the step depends on.
        made: the step that the rule gives; None where it could not be evaluated.
        measured: the diagnostics of a direction that is made coordinate by coordinate, or of rows of which K lacks
            some; None where they are not known.
        epsilons: those that accepted replies state of their clients' samples.
        why: K, or these diagnostics, are not known; empty where nothing is missing.
        drawn: True if K is of some rows alone.
    """

    number: int
    steps: int
    K: Matrix | None
    coefficients: Vector
    rate: float
    weights: Mapping[str, float]
    replies: Sequence[PhaseReply]
    told: Sequence[PhaseReply]
    made: Step | None
    measured: Mapping[str, float] | None
    epsilons: Sequence[float]
    why: str = ""
    drawn: bool = False


class LastMeasured(NamedTuple):
    """The newest round that has measured a model, and its `stop/value`; None without one."""

    number: int
    stop: float | None


@dataclass
class Earlier:
    """What the metrics of a round need from the record of earlier rounds.

    Attributes:
        steps: the number of steps.
        stops: each `stop/value`, in the order of the rounds.
        measured: the models that were measured, by digest.
    """

    steps: int = 0
    stops: list[float] = field(default_factory=list)
    measured: dict[str, LastMeasured] = field(default_factory=dict)

    def add(self, number: int, model: str | None, recorded: Mapping[str, float]) -> None:
        """Adds the round after the last one; `model` is the one that members measure after it, None without a step."""
        self.steps += model is not None
        value = recorded.get("stop/value")
        if value is not None:
            self.stops.append(value)
        if model is not None and "evaluated" in recorded:
            self.measured[model] = LastMeasured(number, value)


@dataclass(frozen=True)
class RunMetrics:
    """Says which metrics the rounds of a run have.

    Attributes:
        spec: of the run.
        rule: of the run.
        objectives: of the task, in its order.
        kinds: the metrics of the task, beside loss and accuracy.
        conceals: True if the run's noise protects clients, whose replies are then hidden.
    """

    spec: RunSpec
    rule: Algorithm
    objectives: tuple[str, ...]
    kinds: tuple[MetricKind, ...]
    conceals: bool = field(kw_only=True)

    @property
    def private(self) -> bool:
        """True if updates are summed under masks."""
        return self.spec.privacy.secure != "off"

    @property
    def evaluates_privately(self) -> bool:
        """True if members show no measurement of their own."""
        return self.spec.evaluates_privately

    # --- the step

    def of_step(self, facts: StepFacts) -> RoundMetrics:
        """The metrics of a step. The first call with noise for clients is slow."""
        privacy, found = self.spec.privacy, RoundMetrics(spans={"step/rate": self._rate(facts)})
        if not self.conceals:
            found |= self._of_direction(facts)
        spans: dict[str, Span] = {}
        if privacy.client_noise:
            epsilon = gaussian_epsilon(privacy.client_noise, facts.steps, privacy.client_delta)
            spans["epsilon/clients"] = Span.of(epsilon, WEIGHTS)
        if facts.epsilons:
            spans["epsilon/samples"] = Span.of(max(facts.epsilons))
        return found | RoundMetrics(spans=spans)

    def _of_direction(self, facts: StepFacts) -> RoundMetrics:
        """The metrics of the direction, and of the updates and the weights that it is made of."""
        if facts.made is None:
            bases = (Basis.RULE, Basis.STEP) if self.private else (Basis.RULE,)
            found = RoundMetrics.hiding("the rule was not evaluated", *bases, names=("iterations", "residual"))
        else:
            found = self._of_rule(facts, facts.made)
        if not self.private:
            found |= _of_gram(facts)
        if len(self.objectives) > 1:
            decided = None if facts.made is None else facts.made.combination.objectives
            found |= RoundMetrics(spans={} if decided is None else _of_objectives(decided))
            found |= RoundMetrics.exact({f"weight/{name}": weight for name, weight in facts.weights.items()})
        return found

    def _rate(self, facts: StepFacts) -> Span:
        """The rate; with "auto" to the bit. Where it cannot be computed, the signed one, which is 0 without a step."""
        rate, unknown = scheduled_rate(self.spec, facts.number), facts.made is None
        if facts.made is not None:
            rate *= facts.made.size
        if self.spec.server.learning_rate == AUTO:
            lengths = update_lengths(facts.K, facts.replies, facts.told, private=self.private)
            if lengths and facts.K is not None:
                rate *= bound(lengths, direction_length(facts.K, facts.coefficients))
                return Span(rate, rate, rate)
            unknown = True
        return Span.of(facts.rate if unknown and facts.rate else rate)

    def _of_rule(self, facts: StepFacts, made: Step) -> RoundMetrics:
        """The diagnostics of the rule."""
        answer, hidden = made.combination, RoundMetrics()
        found, streamed = dict(answer.diagnostics), answer.coordinates is not None or facts.drawn
        if streamed and facts.measured is not None:
            found |= facts.measured
        elif streamed:
            hidden = RoundMetrics.hiding(facts.why, names=_OF_COORDINATES)
            found = {name: value for name, value in found.items() if name not in _OF_COORDINATES}
            found["entropy"] = entropy(answer.weights)
        elif not self.private and not _same(facts.coefficients, answer.coefficients):
            hidden = RoundMetrics.hiding("", Basis.RULE)  # of other weights of the same direction
            kept = (name for name in found if name == "stationary" or basis(name) is not Basis.RULE)
            found = {name: found[name] for name in kept}
        spans = {
            name: Span.measured(value) if basis(name) is Basis.COORDINATOR else Span.of(value, WEIGHTS)
            for name, value in found.items()
        }
        return hidden | RoundMetrics(spans=spans)

    # --- the model

    def is_measured(self, number: int, model: str, earlier: Earlier) -> bool:
        """True if members are asked to measure the model of the round with this number, which has a step.

        In a private run they measure a model once.
        """
        return self.spec.evaluates_after(number, conceals=self.conceals) and not (
            self.evaluates_privately and model in earlier.measured
        )

    def of_model(self, replies: Replies, before: Iterable[tuple[str, Measurements]], earlier: Earlier) -> RoundMetrics:
        """The metrics of a model that members have measured in the clear.

        Args:
            replies: their replies.
            before: the replies that the step depends on, as of `improved`.
            earlier: the rounds before.
        """
        found = scores(replies, self.objectives, self.kinds)
        if not self.rule.averages:
            found |= improved(before, replies)
        return RoundMetrics.exact(found | self._stop([reply.metrics for reply in replies], earlier))

    def of_means(self, means: Means, earlier: Earlier) -> RoundMetrics:
        """The metrics of a model of which only means over the members are known."""
        found = scores_of_means(means.metrics, means.members, self.objectives, self.kinds)
        if means.noise:
            found["evaluation/noise"] = means.noise
        return RoundMetrics.exact(found | self._stop([means.metrics], earlier))

    def of_same_model(self, number: int, model: str, earlier: Earlier) -> RoundMetrics:
        """The metrics of a model that members have measured privately before: the value that stops the run stands."""
        known, stop = earlier.measured.get(model), self.spec.stop
        if (
            known is None
            or known.stop is None
            or not (self.evaluates_privately and self.spec.evaluates_after(number, conceals=self.conceals))
        ):
            return RoundMetrics()
        return RoundMetrics.exact(self._stop([{f"{stop.split}/{stop.metric}": known.stop}], earlier))

    def _stop(self, measured: Sequence[Measurements], earlier: Earlier) -> dict[str, float]:
        return watched(self.spec.stop, kind_of(self.spec.stop.metric, self.kinds), measured, earlier.stops)

    # --- the round

    @staticmethod
    def of_traffic(up: float, refused: float, down: float = 0.0) -> RoundMetrics:
        """The bytes of a round that ended; `down`, those of models, depends on earlier runs, and is measured."""
        exact = RoundMetrics.exact({"bytes/up": up, "bytes/refused": refused})
        return exact | RoundMetrics.measured({"bytes/down": down})

    def of_skipped(self, missing: int = 0) -> RoundMetrics:
        """The metrics of a round without a step, beside its bytes; `missing` is the number of required members."""
        if not self.spec.selection.required:
            return RoundMetrics()
        return RoundMetrics.measured({"required/missing": missing or math.nan})


def _same(signed: Vector, computed: Vector) -> bool:
    scale = float(np.abs(computed).max(initial=0.0))
    return signed.shape == computed.shape and bool(np.allclose(signed, computed, rtol=0, atol=_SAME * scale))


def _of_gram(facts: StepFacts) -> RoundMetrics:
    """The metrics of K and of the signed coefficients."""
    K, m = facts.K, sum(len(reply.rows) for reply in facts.replies)
    if K is None:
        return RoundMetrics.hiding(facts.why, Basis.STEP)
    longest = math.sqrt(float(np.diag(K).max(initial=0.0)))
    spans = {name: Span.of(value) for name, value in agreement(K, m).items()}
    for name, scale in (("stationarity", float(np.diag(K[:m, :m]).max(initial=0.0))), ("stationarity/relative", 1.0)):
        if name in spans:
            spans[name] = Span.of_length(spans[name].value, SQUARE * scale)
    if facts.drawn or len(facts.coefficients) != len(K) or not len(K):
        return RoundMetrics(spans=spans)
    found = describe(K, facts.coefficients, np.zeros(m))
    norm = found["direction_norm"]
    spans["direction_norm"] = Span.of(norm, absolute=LENGTH * longest)
    error = min(2.0, RELATIVE + (2 * LENGTH * longest / norm if norm > 0 else 0.0))
    spans["descent_min"] = Span.of(found["descent_min"], absolute=error)
    lengths = np.sqrt(np.diag(K)[:m])
    cosines = (K @ facts.coefficients)[:m][lengths > 0] / (lengths[lengths > 0] * (norm or 1.0))
    if len(cosines):
        low, high = (float((cosines >= _STRAIGHT + sign * error).mean()) for sign in (1, -1))
        spans["descent_share"] = Span.of_share(found["descent_share"], low, high)
    else:
        spans["descent_share"] = Span.of(found["descent_share"])
    if facts.made is not None:  # a rule of another package need not measure its direction
        unmeasured = {"direction_norm", "descent_min", "descent_share"} - facts.made.combination.diagnostics.keys()
        spans = {name: span for name, span in spans.items() if name not in unmeasured}
    return RoundMetrics(spans=spans)


def _of_objectives(decided: Objectives) -> dict[str, Span]:
    spans = {name: Span.of(value, WEIGHTS, WEIGHTS) for name, value in of_objectives(decided).items()}
    name, gram = "objective/stationarity", decided.gram if decided.exact is None else decided.exact
    if name in spans and gram is not None:
        spans[name] = Span.of_length(spans[name].value, SQUARE * float(np.diag(gram).max()))
    return spans
