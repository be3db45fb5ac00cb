"""The metrics of rounds: recomputed from what was signed, and compared with those on record."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from federation.aggregation.diagnostics import measure
from federation.aggregation.metrics.expected_metrics import Expected, RunMetrics, StepFacts
from federation.aggregation.metrics.step_rate import update_lengths
from federation.aggregation.phases import Replies, Step
from federation.record.bundle import BlobAbsent
from federation.record.results import not_finite
from federation.spec.run_sections import AUTO
from federation.v1.common_pb2 import StepManifest
from federation.work.evaluate.work import Evaluate
from federation.work.registry import encode
from verification.arithmetic import Matrix, panels
from verification.errors import VerificationError
from verification.model import ReplayState, combined_rows, stands_still
from verification.private import private_means
from verification.recorded_run import RecordedRun
from verification.replay import read_gram, recorded_reply
from verification.signed import SignedRound

LeftOut = Callable[[], Sequence[Collection[str]]]


@dataclass(frozen=True, kw_only=True)
class MetricFindings:
    """The metrics of one round by name: verified, measured by the coordinator alone, and not computable here.

    `problem` is the first difference, as text; empty if there is none. `unmeasured` is True if members should have been
    asked to measure the model, and none was.
    """

    verified: tuple[str, ...]
    measured: tuple[str, ...]
    unchecked: tuple[str, ...]
    why: str  # they could not be computed
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
    """

    number: int
    recorded: Mapping[str, float]
    signed: SignedRound
    made: Step | None
    at: ReplayState
    after: ReplayState
    cut_short: bool
    left_out: LeftOut


@dataclass
class RecordedMetrics:
    """Verifies the metrics of the rounds of a run, in their order."""

    run: RecordedRun
    _computed: RunMetrics = field(init=False)

    def __post_init__(self) -> None:
        run = self.run
        self._computed = RunMetrics(spec=run.spec, rule=run.rule, objectives=run.objectives, kinds=run.kinds)

    @property
    def is_private(self) -> bool:
        """True if updates are summed under masks."""
        return self._computed.private

    @property
    def evaluates_privately(self) -> bool:
        """True if members show no measurement of their own."""
        return self._computed.evaluates_privately

    def compare(self, measured: MeasuredRound) -> MetricFindings:
        """Compares the metrics of a round with those that follow from what was signed.

        Raises:
            VerificationError: none follow.
        """
        signed, recorded = measured.signed, measured.recorded
        self._check_asked(signed)
        model = measured.after.evaluated
        absent: list[str] = []
        expected = Expected()
        unmeasured = False
        if signed.step is not None:
            expected = self._of_step(measured, signed.step, absent)
        possible = [expected]
        if not measured.cut_short:
            if signed.step is not None and not signed.evaluation_orders:
                unmeasured = self._computed.is_measured(measured.number, model)
            expected |= self._computed.of_traffic(sum(signed.sent), signed.sent[1])
            found = [self._computed.of_skipped()] if signed.step is None else self._of_model(measured, model, absent)
            possible = [expected | one for one in found]
        problems = [one.problem(recorded) for one in possible]
        fitting = possible[problems.index("")] if "" in problems else possible[0]
        self._computed.ended(model, recorded)
        verified, only_measured, hidden = fitting.named(recorded)
        return MetricFindings(
            verified=verified,
            measured=only_measured if absent else (*only_measured, *hidden),
            unchecked=hidden if absent else (),
            why=absent[0] if absent else "",
            unmeasured=unmeasured,
            problem="" if "" in problems else problems[0],
        )

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
        if self._computed.evaluates_privately:
            return
        work = encode(self._computed.evaluation)
        for order in signed.evaluation_orders:
            if (order.kind, order.work) != (Evaluate.name, work):
                raise VerificationError(f"{order.client_id} was asked for other measurements than those of the run")

    def _of_step(self, measured: MeasuredRound, step: StepManifest, absent: list[str]) -> Expected:
        """The metrics of a step; adds to `absent` why some cannot be computed."""
        signed, made = measured.signed, measured.made
        if made is None:
            absent.append("the rule was not evaluated")
        K: Matrix | None = None
        direction: dict[str, float] | None = None
        try:
            K = read_gram(self.run.blobs, step.gram)
            if made is not None and made.combination.coordinates is not None and self.run.reads_updates:
                direction = self._measured(signed, step, made, K, measured.at)
        except BlobAbsent as error:
            absent.append(str(error))
        told = {name: recorded_reply(self.run, reply, reads=False) for name, reply in signed.replies.items()}
        combined = [told[name] for name in step.replies if name in told]
        named = [told[name] for name in (*step.consulted, *step.replies) if name in told]
        epsilons = [reply.manifest.privacy.epsilon for reply in signed.replies.values()]
        is_auto = self.run.spec.server.learning_rate == AUTO
        try:
            with np.errstate(all="ignore"):  # numbers of any size
                facts = StepFacts(
                    number=step.round,
                    K=K,
                    coefficients=np.array(step.coefficients),
                    rate=step.rate,
                    weights={part.objective: part.weight for part in step.weights},
                    updates=sum(len(reply.rows) for reply in combined),
                    lengths=update_lengths(K, combined, named, private=self.is_private) if is_auto else None,
                    made=made,
                    measured=direction,
                    epsilons=[epsilon for epsilon in epsilons if epsilon],
                )
                return self._computed.of_step(facts)
        except (ArithmeticError, ValueError) as error:
            raise VerificationError(f"no metrics follow from K: {error}") from error

    def _measured(
        self, signed: SignedRound, step: StepManifest, made: Step, K: Matrix, at: ReplayState
    ) -> dict[str, float]:
        """The diagnostics of a direction that is made coordinate by coordinate. Raises BlobAbsent."""
        coordinates = made.combination.coordinates
        if coordinates is None:
            raise ValueError("the direction is a combination of rows")
        rows = combined_rows(self.run, signed, step, at)
        matrix, trim = coordinates.matrix, coordinates.trim

        def products_of(_: slice, piece: Matrix) -> Matrix:
            values = np.sort(matrix @ piece, axis=0)
            direction = values[trim : len(values) - trim].mean(axis=0)
            return np.append(piece @ direction, direction @ direction)

        *products, square = sum(panels(products_of, rows), np.zeros(len(rows) + 1))
        still = stands_still(made, step, rows)
        norm = 0.0 if still else float(np.sqrt(square))
        found = measure(K, np.array(products) * (not still), norm, made.combination.weights)
        return found | {"stationary": float(still)}

    def _of_model(self, measured: MeasuredRound, model: str, absent: list[str]) -> list[Expected]:
        """The metrics of the new model; several where a member was revoked, and may have been left out or not."""
        computed, signed = self._computed, measured.signed
        if not signed.measures:
            return [computed.of_same_model(measured.number, model)]
        if computed.evaluates_privately:
            return self._of_means(measured, model, absent)
        for reply in signed.evaluations.values():
            if reply.manifest.base_model != model:
                raise VerificationError(f"{reply.manifest.client_id} evaluated another model than the round has made")
        told = [recorded_reply(self.run, reply, reads=False) for reply in signed.evaluations.values()]
        before = [(reply.manifest.client_id, reply.manifest.metrics) for reply in signed.replies.values()]
        return [
            computed.of_model(Replies([reply for reply in told if reply.client_id not in gone]), before)
            for gone in measured.left_out()
        ]

    def _of_means(self, measured: MeasuredRound, model: str, absent: list[str]) -> list[Expected]:
        """The metrics of a model that members have measured privately; none if the evaluation failed."""
        try:
            means = private_means(self.run, measured.signed, measured.number, model)
        except BlobAbsent as error:
            absent.append(str(error))
            return [self._computed.of_hidden_model()]
        except VerificationError:
            if "evaluated" in measured.recorded:
                raise
            return [Expected()]
        return [self._computed.of_means(means), *([Expected()] if any(measured.left_out()) else [])]
