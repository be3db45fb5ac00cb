"""The metrics of rounds: recomputed from what was signed, and compared with those on record."""

from dataclasses import dataclass, field

import numpy as np

from federation.aggregation.diagnostics import measure
from federation.aggregation.metrics.expected_metrics import Expected, RunMetrics, StepFacts
from federation.aggregation.metrics.step_rate import step_lengths
from federation.aggregation.phases import PhaseReply, Replies, Step
from federation.record.bundle import BlobAbsent
from federation.record.results import not_finite
from federation.spec.sharing import BUFFERS
from federation.v1.common_pb2 import StepManifest
from federation.v1.record_pb2 import RoundRecord
from federation.work.evaluate.work import Evaluate
from federation.work.registry import encode
from verification.arithmetic import Matrix, panels
from verification.errors import VerificationError
from verification.log import RunLog
from verification.model import AVERAGE, ReplayState, combined_rows, stands_still
from verification.private import private_means
from verification.replay import BundleRunFacts, read_gram
from verification.signed import SignedReply, SignedRound

_CUT_SHORT = ("STOPPED", "FAILED")  # states of a run whose last round may have ended before its bytes were counted


@dataclass(frozen=True, kw_only=True)
class MetricFindings:
    """The metrics of one round by name: verified, measured by the coordinator alone, and not computable here.

    `unmeasured` is True if members should have been asked to measure the model, and none was.
    """

    verified: tuple[str, ...]
    measured: tuple[str, ...]
    unchecked: tuple[str, ...]
    why: str  # they could not be computed
    unmeasured: bool


@dataclass
class RecordedMetrics:
    """Verifies the metrics of the rounds of a run, in their order."""

    run: BundleRunFacts
    log: RunLog
    _computed: RunMetrics = field(init=False)

    def __post_init__(self) -> None:
        run = self.run
        self._computed = RunMetrics(spec=run.spec, rule=run.rule, objectives=run.objectives, kinds=run.kinds)

    def verify(
        self, record: RoundRecord, signed: SignedRound, made: Step | None, at: ReplayState, after: ReplayState
    ) -> MetricFindings:
        """Compares the metrics on record with those that follow from what was signed.

        Args:
            record: of the round.
            signed: the same, opened.
            made: the step that the rule gives; None without a step, or if the rule could not be evaluated.
            at: the state of the run before the round.
            after: the state after it.

        Raises:
            VerificationError: a metric differs, is missing, or follows from nothing.
        """
        for reply in signed.answers:
            if problem := not_finite(reply):
                raise VerificationError(f"a reply of {reply.client_id} was accepted, and {problem}")
        for order in signed.orders:
            if unknown := {*order.objectives} - {*self.run.objectives}:
                raise VerificationError(
                    f"{order.client_id} was asked for {min(unknown)}, which the bundle does not name"
                )
        recorded, about = dict(record.metrics), self.run.bundle.about
        model = after.vectors.get(AVERAGE, after.model)
        absent: list[str] = []
        expected = Expected()
        if signed.step is not None:
            expected = self._of_step(signed, signed.step, made, at, absent)
        last = record.number == about.rounds - 1 and about.state in _CUT_SHORT
        unmeasured = False
        if record.state == "OPEN" or (last and "bytes/up" not in recorded):
            possible = [expected]
        else:
            if signed.step is not None and not signed.measured:
                unmeasured = self._computed.is_measured(record.number, model)
            expected |= self._computed.of_traffic(sum(signed.sent), signed.sent[1])
            if signed.step is None:
                possible = [expected | self._computed.of_skipped()]
            else:
                found = self._of_model(record, signed, model, absent)
                possible = [expected | one for one in found]
        problems = [one.problem(recorded) for one in possible]
        if all(problems):
            raise VerificationError(problems[0])
        fitting = possible[problems.index("")]
        self._computed.ended(model, recorded)
        verified, measured, hidden = fitting.named(recorded)
        return MetricFindings(
            verified=verified,
            measured=measured if absent else (*measured, *hidden),
            unchecked=hidden if absent else (),
            why=absent[0] if absent else "",
            unmeasured=unmeasured,
        )

    def _of_step(
        self, signed: SignedRound, step: StepManifest, made: Step | None, at: ReplayState, absent: list[str]
    ) -> Expected:
        """The metrics of a step; adds to `absent` why some cannot be computed."""
        if made is None:
            absent.append("the rule was not evaluated")
        K: Matrix | None = None
        measured: dict[str, float] | None = None
        try:
            K = read_gram(self.run.bundle, step.gram)
            if made is not None and made.combination.coordinates is not None:
                measured = self._measured(signed, step, made, K, at)
        except BlobAbsent as error:
            absent.append(str(error))
        rows = [
            row
            for name in step.replies
            if name in signed.replies
            for row in signed.replies[name].manifest.rows
            if row.name != BUFFERS
        ]
        epsilons = [reply.manifest.privacy.epsilon for reply in signed.replies.values()]
        facts = StepFacts(
            number=step.round,
            K=K,
            coefficients=np.array(step.coefficients),
            rate=step.rate,
            weights={part.objective: part.weight for part in step.weights},
            updates=len(rows),
            lengths=None if made is None else step_lengths(made, K),
            made=made,
            measured=measured,
            epsilons=[epsilon for epsilon in epsilons if epsilon],
        )
        try:
            with np.errstate(all="ignore"):  # numbers of any size
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

    def _of_model(self, record: RoundRecord, signed: SignedRound, model: str, absent: list[str]) -> list[Expected]:
        """The metrics of the new model; several where a member was revoked, and may have been left out or not."""
        computed = self._computed
        if not signed.measures:
            return [computed.of_same_model(record.number, model)]
        replies = {reply.manifest.client_id: reply for reply in signed.evaluations.values()}
        accepted = {name: reply.order.assignment_id for name, reply in replies.items()}
        first = min((reply.order.phase for reply in replies.values()), default=0)
        asked = (order.assignment_id for order in signed.orders if order.phase >= first)
        gone = self.log.revoked_after(accepted, asked)
        if not computed.evaluates_privately:
            work = encode(computed.evaluation)
            for name, reply in replies.items():
                if reply.manifest.base_model != model:
                    raise VerificationError(f"{name} evaluated another model than the round has made")
                if (reply.order.kind, reply.order.work) != (Evaluate.name, work):
                    raise VerificationError(
                        f"{name} was asked for other measurements than the specification and the bundle name"
                    )
            told = {name: _told(reply) for name, reply in replies.items()}
            before = [(reply.manifest.client_id, reply.manifest.metrics) for reply in signed.replies.values()]
            counted = (
                Replies([told[name] for name in told if name not in gone[:left]]) for left in range(len(gone) + 1)
            )
            return [computed.of_model(one, before) for one in counted]
        try:
            found = [computed.of_means(private_means(self.run, signed, record.number, model))]
        except BlobAbsent as error:
            absent.append(str(error))
            return [computed.of_hidden_model()]
        except VerificationError:
            if "evaluated" in record.metrics:
                raise
            return [Expected()]  # the evaluation failed
        return [*found, *([Expected()] if gone else [])]


def _told(reply: SignedReply) -> PhaseReply:
    """A reply that has measurements alone."""
    manifest = reply.manifest
    return PhaseReply(
        client_id=manifest.client_id,
        samples=manifest.samples,
        losses=dict(manifest.losses),
        metrics=dict(manifest.metrics),
        objectives=tuple(reply.order.objectives),
    )
