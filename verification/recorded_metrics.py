"""The metrics of rounds: recomputed from what was signed, and compared with those on record."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from federation.aggregation.diagnostics import measure
from federation.aggregation.metrics.round_metrics import Named, RoundMetrics
from federation.aggregation.metrics.run_metrics import Earlier, RunMetrics, StepFacts
from federation.aggregation.phases import Replies, Step
from federation.record.bundle import BlobAbsent
from federation.record.metric_definitions import Basis
from federation.record.results import not_finite
from federation.v1.common_pb2 import StepManifest
from federation.work.registry import encode
from verification.arithmetic import Matrix, products_along
from verification.errors import VerificationError
from verification.model import ReplayState, combined_rows, stands_still
from verification.private import private_means
from verification.recorded_run import RecordedRun
from verification.replay import read_compared, recorded_reply
from verification.signed import SignedRound

LeftOut = Callable[[], Sequence[Collection[str]]]


class MetricFindings(NamedTuple):
    """The metrics of one round.

    Attributes:
        named: those on record, by what is known of them.
        unmeasured: True if members should have been asked to measure the model, and none was.
        problem: the first difference, as text; empty if there is none.
    """

    named: Named
    unmeasured: bool
    problem: str


@dataclass(frozen=True, kw_only=True)
class MeasuredRound:
    """A round with its metrics.

    Attributes:
        number: of the round.
        recorded: its metrics on record.
        signed: its signed content.
        made: the step that the rule gives; None without a step, or if the rule could not be evaluated.
        at: the state of the run before the round.
        after: the state after it.
        cut_short: True if the round has not ended, or the run has ended within it: the metrics are those of its step.
        left_out: gives the sets of members, revoked after they had measured the model, of which one was left out.
        measures: True if the round has a model to measure: after its step, or because it does nothing else.
    """

    number: int
    recorded: Mapping[str, float]
    signed: SignedRound
    made: Step | None
    at: ReplayState
    after: ReplayState
    cut_short: bool
    left_out: LeftOut
    measures: bool


class RecordedMetrics:
    """Verifies the metrics of the rounds of a run, in their order."""

    def __init__(self, run: RecordedRun) -> None:
        self.run, self._earlier = run, Earlier()
        facts = run.spec, run.rule, run.objectives, run.kinds
        self.computed = RunMetrics(*facts, conceals=run.spec.privacy.client_noise > 0)

    def compare(self, measured: MeasuredRound) -> MetricFindings:
        """Compares the metrics of a round with those that follow from what was signed.

        Raises:
            VerificationError: none follow.
        """
        signed, recorded, computed, earlier = measured.signed, measured.recorded, self.computed, self._earlier
        self._check_asked(signed)
        model = measured.after.evaluated if measured.measures else None
        expected = RoundMetrics() if signed.step is None else self._of_step(measured, signed.step)
        possible, unmeasured = [expected], False
        if not measured.cut_short:
            expected |= computed.of_traffic(sum(signed.sent), signed.sent[1])
            found = [computed.of_skipped()] if model is None else self._of_model(measured, model)
            possible = [expected | one for one in found]
            asked = bool(signed.evaluation_orders)
            unmeasured = model is not None and not asked and computed.is_measured(measured.number, model, earlier)
        problems = [one.problem(recorded) for one in possible]
        fitting = problems.index("") if "" in problems else 0
        earlier.add(measured.number, model, recorded)
        return MetricFindings(possible[fitting].named(recorded), unmeasured, problems[fitting])

    def _check_asked(self, signed: SignedRound) -> None:
        """Checks that members were asked for the task's objectives and measurements, and replied with numbers.

        Raises VerificationError.
        """
        for reply in signed.answers:
            if problem := not_finite(reply):
                raise VerificationError(f"a reply of {reply.client_id} was accepted, and {problem}")
        for order in signed.orders:
            if unknown := {*order.objectives} - {*self.run.objectives}:
                raise VerificationError(
                    f"{order.client_id} was asked for {min(unknown)}, which the {self.run.source} does not name"
                )
        if self.computed.evaluates_privately:
            return
        work = self.run.measurement
        for order in signed.evaluation_orders:
            if (order.kind, order.work) != (work.name, encode(work)):
                raise VerificationError(f"{order.client_id} was asked for other measurements than those of the run")

    def _of_step(self, measured: MeasuredRound, step: StepManifest) -> RoundMetrics:
        """The metrics of a step."""
        signed, made, why = measured.signed, measured.made, ""
        K: Matrix | None = None
        direction: dict[str, float] | None = None
        try:
            K = read_compared(self.run, step)
            streamed = made is not None and (step.gram_rows or made.combination.coordinates is not None)
            if made is not None and streamed and self.run.reads_updates:
                direction = self._measured(signed, step, made, K, measured.at)
        except BlobAbsent as error:
            why = str(error)
        told = {name: recorded_reply(self.run, reply, reads=False) for name, reply in signed.replies.items()}
        combined = [told[name] for name in step.replies if name in told]
        named = [told[name] for name in (*step.consulted, *step.replies) if name in told]
        epsilons = [reply.manifest.privacy.epsilon for reply in signed.replies.values()]
        try:
            with np.errstate(all="ignore"):  # numbers of any size
                facts = StepFacts(
                    number=step.round,
                    steps=self._earlier.steps + 1,
                    K=K,
                    coefficients=np.array(step.coefficients),
                    rate=step.rate,
                    weights={part.objective: part.weight for part in step.weights},
                    replies=combined,
                    told=named,
                    made=made,
                    measured=direction,
                    epsilons=[epsilon for epsilon in epsilons if epsilon],
                    why=why,
                    drawn=bool(step.gram_rows),
                )
                return self.computed.of_step(facts)
        except (ArithmeticError, ValueError) as error:
            raise VerificationError(f"no metrics follow from K: {error}") from error

    def _measured(
        self, signed: SignedRound, step: StepManifest, made: Step, K: Matrix, at: ReplayState
    ) -> dict[str, float]:
        """The diagnostics of a direction of which K does not say all. Raises BlobAbsent."""
        rows, answer = combined_rows(self.run, signed, step, at), made.combination
        by = answer.coefficients if answer.coordinates is None else answer.coordinates
        *products, square = products_along(by, rows)
        still = stands_still(made, step, rows)
        norm = 0.0 if still else float(np.sqrt(square))
        squares = np.array(step.squared_norms) if step.gram_rows else None
        found = measure(K, np.array(products) * (not still), norm, answer.weights, squares)
        return found | {"stationary": float(still)}

    def _of_model(self, measured: MeasuredRound, model: str) -> list[RoundMetrics]:
        """The metrics of the new model; several where a member was revoked, and may have been left out or not."""
        computed, signed, earlier = self.computed, measured.signed, self._earlier
        if not signed.measures:
            return [computed.of_same_model(measured.number, model, earlier)]
        if computed.spec.describes and computed.evaluates_privately:
            return [RoundMetrics()]
        if computed.evaluates_privately:
            return self._of_means(measured, model)
        for reply in signed.evaluations.values():
            if reply.manifest.base_model != model:
                raise VerificationError(f"{reply.manifest.client_id} evaluated another model than that of the round")
        told = [recorded_reply(self.run, reply, reads=False) for reply in signed.evaluations.values()]
        before = [(reply.manifest.client_id, reply.manifest.metrics) for reply in signed.replies.values()]
        return [
            computed.of_model(Replies([reply for reply in told if reply.client_id not in gone]), before, earlier)
            for gone in measured.left_out()
        ]

    def _of_means(self, measured: MeasuredRound, model: str) -> list[RoundMetrics]:
        """The metrics of a model that members have measured privately; none if the evaluation failed."""
        try:
            means = private_means(self.run, measured.signed, measured.number, model)
        except BlobAbsent as error:
            return [RoundMetrics.hiding(str(error), Basis.MODEL)]
        except VerificationError:
            if "evaluated" in measured.recorded:
                raise
            return [RoundMetrics()]
        found = self.computed.of_means(means, self._earlier)
        return [found, *([RoundMetrics()] if any(measured.left_out()) else [])]
