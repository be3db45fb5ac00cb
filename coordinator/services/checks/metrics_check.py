"""Compares the metrics of rounds with those that follow from the signed messages on record."""

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.replies.revoked import REVOKED
from coordinator.services.checks.envelope_checks import CheckedRound, EnvelopeChecks
from coordinator.services.checks.private_means import private_means_of
from federation.aggregation.interface import HyperparameterError
from federation.aggregation.metrics.expected_metrics import Expected, RunMetrics, StepFacts
from federation.aggregation.metrics.replayed_step import Absent, replayed_step
from federation.aggregation.metrics.step_rate import scheduled_rate, update_lengths
from federation.aggregation.phases import PhaseReply, Replies, RoundContext, Selected, Step, Voided
from federation.aggregation.registry import algorithm
from federation.record.exchange import OpenedExchange
from federation.record.rounds import OpenedRound
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.sharing import BUFFERS
from federation.v1.common_pb2 import ReplyManifest, StepManifest
from federation.work.evaluate.work import Evaluate
from federation.work.registry import decode_statement, encode
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore
from storage.models import Assignment, Client, Phase, Round, Run
from storage.records import AVERAGE, memory_digest
from storage.states import ClientState, RoundState, RunState

_GRAM_BYTES = 1 << 28  # of a Gram matrix, 5,700 rows


@dataclass
class _OfRun:
    """The run whose rounds are compared, and its memory after the last one.

    `computed` is None if nothing can be compared any more: a message or the specification is wrong.
    """

    run_id: str
    computed: RunMetrics | None
    memory: Mapping[str, Any]


@dataclass
class MetricsCheck:
    """Compares the metrics of rounds, run by run and in their order. It keeps nothing of a round but a few numbers.

    Updates are not read: metrics of a rule that reads them are not compared, nor those of the rule in private rounds.
    """

    session: Session
    checks: EnvelopeChecks
    blobs: BlobStore
    _of: _OfRun | None = None

    def problem(self, row: Round, checked: CheckedRound) -> str:
        """The first difference of a round, as text; empty if there is none, or if its messages are not verified."""
        of = self._of
        if of is None or of.run_id != row.run_id:
            of = self._of = _OfRun(row.run_id, _computed(row.run), {})
        envelopes = (envelope.problem for envelope in checked.opened.envelopes)
        computed = None if any(problem is not None for problem in envelopes) else of.computed
        of.computed = None  # nothing of the run is compared any more, unless all of this round could be
        if computed is None:
            return ""
        if problem := self._other_work(computed, checked.opened):
            return problem
        try:
            with np.errstate(all="ignore"):  # numbers of any size
                expected = self._expected(computed, of.memory, row, checked.opened)
        except (ArithmeticError, ValueError) as error:
            return f"no metrics follow from what was signed: {error}"
        if checked.opened.step is not None:
            of.memory = row.state_after
        computed.ended(_model(row), row.metrics)
        of.computed = computed
        return expected.problem(row.metrics)

    def _expected(self, computed: RunMetrics, memory: Mapping[str, Any], row: Round, opened: OpenedRound) -> Expected:
        """The metrics that a round must have. Raises ValueError, ArithmeticError if none follow."""
        expected = Expected()
        if opened.step is not None:
            step = opened.step.manifest
            if memory_digest(memory) != step.state_before:
                raise ValueError("the state of the run before it is not the one that was signed")
            expected = self._of_step(computed, memory, opened, step)
        if row.state in (RoundState.COMPLETED, RoundState.SKIPPED) and not self._cut_short(row):
            accepted, refused = opened.sent
            expected |= computed.of_traffic(accepted + refused, refused)
            expected |= computed.of_skipped() if opened.step is None else self._of_model(computed, row, opened)
        return expected

    def _other_work(self, computed: RunMetrics, opened: OpenedRound) -> str:
        """Names a member that was asked for objectives or measurements of another task; empty if there is none."""
        for phase in opened.phases:
            for exchange in phase.exchanges:
                order = exchange.assignment.manifest
                if not {*order.objectives} <= {*computed.objectives}:
                    return f"{order.client_id} was asked for objectives that are not those of the run"
                measures = phase.evaluates and not computed.evaluates_privately
                if measures and (order.kind, order.work) != (Evaluate.name, encode(computed.evaluation)):
                    return f"{order.client_id} was asked for other measurements than those of the run"
        return ""

    def _cut_short(self, row: Round) -> bool:
        """True for the last round of a run that ended within it: then its bytes were not counted."""
        if row.run.state not in (RunState.STOPPED, RunState.FAILED) or "bytes/up" in row.metrics:
            return False
        later = select(Round.round_id).where(Round.run_id == row.run_id, Round.number > row.number)
        return self.session.scalar(later.limit(1)) is None

    def _of_step(
        self, computed: RunMetrics, memory: Mapping[str, Any], opened: OpenedRound, step: StepManifest
    ) -> Expected:
        K = self._gram(step.gram)
        replies = _replies(opened, step)
        told = {reply.envelope: reply for phase in replies.values() for reply in phase}
        combined = [told[name] for name in step.replies if name in told]
        rows = [len(reply.rows) for reply in combined]
        accepted = [manifest for _, manifest in _accepted(opened, decides=True)]
        epsilons = [manifest.privacy.epsilon for manifest in accepted if manifest.privacy.epsilon]
        made = None if computed.private else _made(computed, memory, opened, step, replies, K)
        return computed.of_step(
            StepFacts(
                number=step.round,
                K=K,
                coefficients=np.array(step.coefficients),
                rate=step.rate,
                weights={part.objective: part.weight for part in step.weights},
                updates=sum(rows),
                lengths=update_lengths(K, combined, told.values(), private=computed.private),
                made=made,
                measured=None,
                epsilons=epsilons,
            )
        )

    def _of_model(self, computed: RunMetrics, row: Round, opened: OpenedRound) -> Expected:
        if not any(phase.evaluates for phase in opened.phases):
            return computed.of_same_model(row.number, _model(row))
        if computed.evaluates_privately:
            return self._of_means(computed, row, opened)
        left_out = select(Assignment.client_id).join(Phase).join(Client, Client.client_id == Assignment.client_id)
        revoked = (Client.state == ClientState.REVOKED, Assignment.reason == REVOKED)
        gone = set(self.session.scalars(left_out.where(Phase.round_id == row.round_id, ~Phase.decides, *revoked)))
        told = [
            _reply(exchange, manifest)
            for exchange, manifest in _accepted(opened, decides=False)
            if manifest.client_id not in gone
        ]
        before = [(manifest.client_id, manifest.metrics) for _, manifest in _accepted(opened, decides=True)]
        return computed.of_model(Replies(told), before)

    def _of_means(self, computed: RunMetrics, row: Round, opened: OpenedRound) -> Expected:
        try:
            means = private_means_of(self.session, self.checks, self.blobs, row, _model(row), opened)
        except (BlobMissing, BlobCorrupt):
            return computed.of_hidden_model()
        names = {manifest.client_id for _, manifest in _accepted(opened, decides=False)}
        revoked = select(Client.client_id).where(Client.client_id.in_(names), Client.state == ClientState.REVOKED)
        gone = self.session.scalar(revoked.limit(1)) is not None and "evaluated" not in row.metrics
        return Expected() if means is None or gone else computed.of_means(means)

    def _gram(self, digest: str) -> NDArray[np.float64] | None:
        """A Gram matrix; None if it is not kept, or damaged."""
        try:
            K = np.load(io.BytesIO(self.blobs.read(digest, _GRAM_BYTES)), allow_pickle=False)
        except (BlobMissing, BlobCorrupt, ValueError, EOFError):
            return None  # what is damaged is named with the blobs
        return K if isinstance(K, np.ndarray) and K.dtype == np.float64 and K.shape == (len(K), len(K)) else None


def _computed(run: Run) -> RunMetrics | None:
    """Computes the metrics of a run; None if its specification or its algorithm cannot be read."""
    try:
        spec = RunSpec.parse(run.spec)
        rule = algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
    except (SpecError, HyperparameterError, LookupError):
        return None
    return RunMetrics(spec=spec, rule=rule, objectives=tuple(run.objectives), kinds=run.metrics)


def _model(row: Round) -> str:
    """The model of a round that members measure."""
    vectors: Mapping[str, str] = row.state_after.get("vectors", {})
    return vectors.get(AVERAGE, row.result_model or row.base_model)


def _accepted(opened: OpenedRound, *, decides: bool) -> Iterator[tuple[OpenedExchange, ReplyManifest]]:
    """The accepted replies that the step depends on, or those that measure the new model."""
    for phase in opened.phases:
        if phase.decides if decides else phase.evaluates:
            for exchange in phase.exchanges:
                for answer in exchange.accepted:
                    yield exchange, answer.reply.manifest


def _reply(exchange: OpenedExchange, manifest: ReplyManifest) -> PhaseReply:
    """A reply without the rows of its payload."""
    names = tuple(row.name for row in manifest.rows if row.name != BUFFERS)
    (answer,) = exchange.accepted
    return PhaseReply(
        client_id=manifest.client_id,
        samples=manifest.samples,
        losses=dict(manifest.losses),
        metrics=dict(manifest.metrics),
        rows=Absent(LookupError("updates are not read"), len(names)),  # type: ignore[arg-type] # cannot be read
        names=names,
        objectives=tuple(exchange.assignment.manifest.objectives),
        envelope=answer.reply.digest,
        payload=manifest.payload,
        statement=decode_statement(exchange.assignment.manifest.kind, manifest.statement),
    )


def _replies(opened: OpenedRound, step: StepManifest) -> dict[int, list[PhaseReply]]:
    """The replies that the step names, by phase; of a private round, too."""
    named = {*step.replies, *step.consulted}
    return {
        phase.number: [
            _reply(exchange, answer.reply.manifest)
            for exchange in phase.exchanges
            for answer in exchange.accepted
            if answer.reply.digest in named
        ]
        for phase in opened.phases
        if phase.decides
    }


def _made(
    computed: RunMetrics,
    memory: Mapping[str, Any],
    opened: OpenedRound,
    step: StepManifest,
    replies: Mapping[int, Iterable[PhaseReply]],
    K: NDArray[np.float64] | None,
) -> Step | None:
    """The step that the rule makes of the replies; None if it reads updates, or if none follows."""
    spec, number = computed.spec, step.round
    orders = [exchange.assignment.manifest for phase in opened.phases if phase.decides for exchange in phase.exchanges]
    samples = {manifest.client_id: manifest.samples for _, manifest in _accepted(opened, decides=True)}
    selected = {order.client_id: Selected(samples.get(order.client_id, 0), tuple(order.objectives)) for order in orders}
    lengths = [row.length for order in orders for row in order.rows if row.name != BUFFERS]
    revoked = frozenset([*step.revoked, *step.forgotten])
    context = RoundContext(
        number=number,
        total=spec.rounds,
        prior=spec.algorithm.prior,
        state=memory.get("rule", {}),
        recall=lambda payload: np.zeros(0, np.float32),  # its products with the others are in K
        objectives=computed.objectives,
        parameters=max(lengths, default=0),
        encoder=(slice(0, max(lengths, default=0)),),
        seed=spec.seed,
        local_rate=spec.train.rate(number, spec.rounds),
        server_rate=scheduled_rate(spec, number),
        selected=selected,
        draw=lambda purpose: tuple(sorted(selected)),
        revoked=lambda: revoked,
    )
    try:
        made, _ = replayed_step(computed.rule, context, {phase: list(told) for phase, told in replies.items()}, K)
    except (Voided, ArithmeticError, LookupError, ValueError):
        return None
    return made
