"""The metrics that a round must have on record, computed again from signed facts, and compared with those that it has.

Sums of float64 depend on their order in the last bits, and so on the processor, and two solvers may find different
weights of one direction. So each number is compared with a tolerance.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from federation.aggregation.base import Algorithm
from federation.aggregation.diagnostics import describe
from federation.aggregation.interface import Matrix, Objectives, Vector
from federation.aggregation.metrics.model_metrics import Measurements, improved, scores, scores_of_means, watched
from federation.aggregation.metrics.step_metrics import agreement, of_objectives
from federation.aggregation.metrics.step_rate import bound, direction_length, scheduled_rate
from federation.aggregation.phases import Replies, Step
from federation.aggregation.secure.evaluation import Means
from federation.record.metric_definitions import Basis, basis
from federation.spec.accounting import gaussian_epsilon
from federation.spec.run_sections import AUTO
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import MetricKind, kind_of
from federation.work.evaluate.work import Evaluate

RELATIVE = 1e-9  # of a metric of signed numbers
WEIGHTS = 1e-6  # of a metric of the rule's weights, or of a private round
LENGTH = 1e-8  # of a direction, relative to the longest update
SQUARE = 1e-9  # of the square of a shortest vector, relative to the square of the longest update
_ABSOLUTE = 1e-12  # of any metric
_SAME = 1e-7  # by which the coefficients of one solution differ, relative to the largest
_STRAIGHT = -1e-9  # a cosine above counts as not against the direction


@dataclass(frozen=True)
class Span:
    """The value of a metric that follows from signed facts, and the least and the largest that pass for it."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, relative: float = RELATIVE, absolute: float = 0.0) -> "Span":
        """A value with its tolerance."""
        error = max(relative * abs(value), absolute, _ABSOLUTE)
        return cls(value, value - error, value + error)

    @classmethod
    def of_length(cls, value: float, square: float) -> "Span":
        """A length whose square has this tolerance."""
        low, high = value**2 - square, value**2 + square
        return cls(value, math.sqrt(max(low, 0.0)) - _ABSOLUTE, math.sqrt(high) + _ABSOLUTE)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The metrics that a round must have on record.

    Attributes:
        spans: those that follow from signed facts; non-finite ones are not recorded.
        measured: those that only the coordinator measured; True for one that must be there.
        hidden: returns True for the name of a metric that may be on record and cannot be computed here.
    """

    spans: Mapping[str, Span] = field(default_factory=dict)
    measured: Mapping[str, bool] = field(default_factory=dict)
    hidden: Callable[[str], bool] = lambda name: False

    def __or__(self, other: "Expected") -> "Expected":
        return Expected(
            spans={**self.spans, **other.spans},
            measured={**self.measured, **other.measured},
            hidden=lambda name: self.hidden(name) or other.hidden(name),
        )

    def problem(self, recorded: Mapping[str, float]) -> str:
        """The first difference of the metrics on record, as text; empty if there is none."""
        for name, span in self.spans.items():
            if not math.isfinite(span.value):
                if name in recorded:
                    return f"the record says {name} = {recorded[name]!r}; what was signed gives no finite number"
            elif name not in recorded:
                return f"the record lacks {name}; what was signed gives {span.value!r}"
            elif not span.low <= recorded[name] <= span.high:
                return f"the record says {name} = {recorded[name]!r}; what was signed gives {span.value!r}"
        for name, needed in self.measured.items():
            if needed and name not in recorded:
                return f"the record lacks {name}"
        for name, value in recorded.items():
            if name not in self.spans and name not in self.measured and not self.hidden(name):
                return f"the record says {name} = {value!r}; nothing that was signed gives this number"
        return ""

    def named(self, recorded: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The names on record, sorted: those that follow, those that are only measured, and the hidden ones."""
        names = sorted(recorded)
        verified = tuple(name for name in names if name in self.spans)
        measured = tuple(name for name in names if name in self.measured)
        return verified, measured, tuple(name for name in names if name not in {*verified, *measured})


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts about a step from which its metrics follow.

    Attributes:
        number: of the round.
        K: the signed Gram matrix, shape (m, m); None where it is not kept.
        coefficients: as signed, shape (m,), or (0,) for a rule that works coordinate by coordinate.
        rate: as signed.
        weights: of the objectives, as signed.
        updates: the number of rows of this round.
        lengths: of the members' updates; None where they are not known.
        made: the step that the rule gives; None where it could not be evaluated.
        measured: the diagnostics of a direction that is made coordinate by coordinate; None where they are not known.
        epsilons: those that accepted replies state of their clients' samples.
    """

    number: int
    K: Matrix | None
    coefficients: Vector
    rate: float
    weights: Mapping[str, float]
    updates: int
    lengths: Sequence[float] | None
    made: Step | None
    measured: Mapping[str, float] | None
    epsilons: Sequence[float]


@dataclass(kw_only=True)
class RunMetrics:
    """Computes the metrics of the rounds of a run again, in their order.

    Attributes:
        spec: of the run.
        rule: of the run.
        objectives: of the task, in its order.
        kinds: the metrics of the task, beside loss and accuracy.
    """

    spec: RunSpec
    rule: Algorithm
    objectives: tuple[str, ...]
    kinds: tuple[MetricKind, ...]
    _steps: int = 0
    _stops: list[float] = field(default_factory=list)
    _measured: dict[str, list[Measurements]] = field(default_factory=dict)  # of evaluated models, by digest

    @property
    def private(self) -> bool:
        """True if updates are summed under masks."""
        return self.spec.privacy.secure != "off"

    @property
    def evaluates_privately(self) -> bool:
        """True if members show no measurement of their own."""
        return self.private and "evaluation" not in self.spec.privacy.disclose

    @property
    def evaluation(self) -> Evaluate:
        """The work of members that measure a model in the clear."""
        return Evaluate(splits=self.spec.evaluated, metrics=self.kinds)

    # --- the step

    def of_step(self, facts: StepFacts) -> Expected:
        """The metrics of a step. Call it once for each step of the run, in their order."""
        self._steps += 1
        privacy, spans = self.spec.privacy, {"step/rate": self._rate(facts)}
        if facts.epsilons:
            spans["epsilon/samples"] = Span.of(max(facts.epsilons))
        if privacy.client_noise:
            epsilon = gaussian_epsilon(privacy.client_noise, self._steps, privacy.client_delta)
            return Expected(spans=spans | {"epsilon/clients": Span.of(epsilon, WEIGHTS)})
        if facts.made is None:
            expected = Expected(hidden=lambda name: basis(name) is Basis.RULE or name in ("iterations", "residual"))
        else:
            expected = self._of_rule(facts, facts.made)
        if not self.private:
            expected |= _of_gram(facts)
        elif facts.made is None:
            expected |= Expected(hidden=lambda name: basis(name) is Basis.STEP)
        if len(self.objectives) > 1:
            spans |= {f"weight/{name}": Span.of(weight) for name, weight in facts.weights.items()}
        return expected | Expected(spans=spans)

    def _rate(self, facts: StepFacts) -> Span:
        """The rate; with "auto" to the bit. Where it cannot be computed, the signed one, which is 0 without a step."""
        rate, unknown = scheduled_rate(self.spec, facts.number), facts.made is None
        if facts.made is not None:
            rate *= facts.made.size
        if self.spec.server.learning_rate == AUTO:
            if facts.lengths and facts.K is not None:
                rate *= bound(facts.lengths, direction_length(facts.K, facts.coefficients))
                return Span(rate, rate, rate)
            unknown = True
        return Span.of(facts.rate if unknown and facts.rate else rate)

    def _of_rule(self, facts: StepFacts, made: Step) -> Expected:
        """The diagnostics of the rule, and the metrics of the objectives that it has weighed."""
        found = dict(made.combination.diagnostics)
        hidden: Callable[[str], bool] = _nothing
        if made.combination.coordinates is not None:
            if facts.measured is None:
                hidden = frozenset({"direction_norm", "descent_min", "descent_share", "stationary"}).__contains__
                weights = made.combination.weights
                found["entropy"] = describe(np.zeros((len(weights),) * 2), np.zeros(len(weights)), weights)["entropy"]
            else:
                found |= facts.measured
        elif not self.private and not _same(facts.coefficients, made.combination.coefficients):
            hidden = _follows_from_weights  # of other weights of the same direction
        numbers = {name: Span.of(value, WEIGHTS, _ABSOLUTE) for name, value in found.items() if not hidden(name)}
        if len(self.objectives) > 1 and (decided := made.combination.objectives) is not None:
            numbers |= _of_objectives(decided)
        measured = {name: math.isfinite(found[name]) for name in numbers if basis(name) is Basis.COORDINATOR}
        spans = {name: span for name, span in numbers.items() if name not in measured}
        return Expected(spans=spans, measured=measured, hidden=hidden)

    # --- the model

    def of_model(self, replies: Replies, before: Iterable[tuple[str, Measurements]]) -> Expected:
        """The metrics of a model that members have measured in the clear.

        Args:
            replies: their replies.
            before: the replies that the step depends on, as of `improved`.
        """
        found = scores(replies, self.objectives, self.kinds)
        if not self.rule.averages:
            found |= improved(before, replies)
        return _exact(found | self._stop([reply.metrics for reply in replies]))

    def of_means(self, means: Means) -> Expected:
        """The metrics of a model of which only means over the members are known."""
        found = scores_of_means(means.metrics, means.members, self.objectives, self.kinds)
        if means.noise:
            found["evaluation/noise"] = means.noise
        return _exact(found | self._stop([means.metrics]))

    def of_same_model(self, number: int, model: str) -> Expected:
        """The metrics of a model that members could have measured privately, and were not asked to.

        Members measure a model once: the value by which the run is stopped stands.
        """
        if not (self.evaluates_privately and self.spec.evaluates_after(number)):
            return Expected()
        return _exact(self._stop(self._measured.get(model, [])))

    def is_measured(self, number: int, model: str) -> bool:
        """True if members are asked to measure the model of the round with this number, which has a step.

        In a private run they measure a model once.
        """
        return self.spec.evaluates_after(number) and not (self.evaluates_privately and model in self._measured)

    def of_hidden_model(self) -> Expected:
        """The metrics of a model whose measurements cannot be read here."""
        return Expected(hidden=lambda name: basis(name) is Basis.MODEL)

    def _stop(self, measured: Sequence[Measurements]) -> dict[str, float]:
        return watched(self.spec.stop, kind_of(self.spec.stop.metric, self.kinds), measured, self._stops)

    # --- the round

    def of_traffic(self, up: int, refused: int) -> Expected:
        """The bytes of a round that ended; those of models depend on earlier runs."""
        spans = {"bytes/up": Span.of(float(up)), "bytes/refused": Span.of(float(refused))}
        return Expected(spans=spans, measured={"bytes/down": True})

    def of_skipped(self) -> Expected:
        """The metrics of a round without a step, beside its bytes."""
        return Expected(measured={"required/missing": False} if self.spec.selection.required else {})

    def ended(self, model: str, recorded: Mapping[str, float]) -> None:
        """Remembers the metrics of a round for those after it; `model` is the one that was evaluated."""
        value, stop = recorded.get("stop/value"), self.spec.stop
        if value is not None:
            self._stops.append(value)
        if "evaluated" in recorded:
            self._measured[model] = [] if value is None else [{f"{stop.split}/{stop.metric}": value}]


def _nothing(name: str) -> bool:
    return False


def _follows_from_weights(name: str) -> bool:
    return basis(name) is Basis.RULE and name != "stationary"


def _exact(found: Mapping[str, float]) -> Expected:
    return Expected(spans={name: Span.of(value) for name, value in found.items()})


def _same(signed: Vector, computed: Vector) -> bool:
    scale = float(np.abs(computed).max(initial=0.0))
    return signed.shape == computed.shape and bool(np.allclose(signed, computed, rtol=0, atol=_SAME * scale))


def _of_gram(facts: StepFacts) -> Expected:
    """The metrics of K and of the signed coefficients."""
    K, m = facts.K, facts.updates
    if K is None:
        return Expected(hidden=lambda name: basis(name) is Basis.STEP)
    longest = math.sqrt(float(np.diag(K).max(initial=0.0)))
    spans = {name: Span.of(value) for name, value in agreement(K, m).items()}
    for name, scale in (("stationarity", float(np.diag(K[:m, :m]).max(initial=0.0))), ("stationarity/relative", 1.0)):
        if name in spans:
            spans[name] = Span.of_length(spans[name].value, SQUARE * scale)
    if len(facts.coefficients) != len(K) or not len(K):
        return Expected(spans=spans)
    found = describe(K, facts.coefficients, np.zeros(m))
    norm = found["direction_norm"]
    spans["direction_norm"] = Span.of(norm, absolute=LENGTH * longest)
    error = min(2.0, RELATIVE + (2 * LENGTH * longest / norm if norm > 0 else 0.0))
    spans["descent_min"] = Span.of(found["descent_min"], absolute=error)
    lengths = np.sqrt(np.diag(K)[:m])
    cosines = (K @ facts.coefficients)[:m][lengths > 0] / (lengths[lengths > 0] * (norm or 1.0))
    if len(cosines):
        low, high = (float((cosines >= _STRAIGHT + sign * error).mean()) for sign in (1, -1))
        spans["descent_share"] = Span(found["descent_share"], low - _ABSOLUTE, high + _ABSOLUTE)
    else:
        spans["descent_share"] = Span.of(found["descent_share"])
    if facts.made is not None:  # a rule of another package need not measure its direction
        unmeasured = {"direction_norm", "descent_min", "descent_share"} - facts.made.combination.diagnostics.keys()
        spans = {name: span for name, span in spans.items() if name not in unmeasured}
    return Expected(spans=spans)


def _of_objectives(decided: Objectives) -> dict[str, Span]:
    spans = {name: Span.of(value, WEIGHTS, WEIGHTS) for name, value in of_objectives(decided).items()}
    name, gram = "objective/stationarity", decided.gram if decided.exact is None else decided.exact
    if name in spans and gram is not None:
        spans[name] = Span.of_length(spans[name].value, SQUARE * float(np.diag(gram).max()))
    return spans
