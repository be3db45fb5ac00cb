"""Verifies who was asked in a round, for which work, and that enough replied: what no rule's arithmetic depends on."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import DecodeError, Message

from federation.aggregation.phase_kinds import measuring_phase
from federation.aggregation.phases import AlgorithmPhase
from federation.record.bundle import has_unknown_fields
from federation.record.rounds import OpenedRound
from federation.spec.run_sections import replies_needed
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import MetricKind, kind_of
from federation.v1.common_pb2 import AssignmentManifest, RunState
from federation.v1.record_pb2 import Bundle, RoundRecord
from federation.v1.secure_pb2 import SecureReadyWork, SecureTerms
from federation.work.base import RowSchema, Work, WorkError, payload_layout
from federation.work.registry import Kind, encode, kind, statement_problem
from federation.work.secure.terms import SessionStage
from federation.work.statistics.work import Statistics
from verification.errors import VerificationError
from verification.recorded_run import RecordedRun

_STATES = tuple(name.removeprefix("RUN_STATE_") for name in RunState.keys()[1:])


@dataclass
class RunCourse:
    """The rounds of a run so far: how many were skipped in a row, and the metrics by which the run may end."""

    spec: RunSpec
    rounds: int = 0
    skipped: int = 0
    last: RoundRecord | None = None

    def check_goes_on(self, record: RoundRecord) -> None:
        """Checks that a round could follow the ones before. Raises VerificationError."""
        # Verify, 11: a further round could be one that the coordinator added when it knew the model.
        if self.rounds >= self.spec.rounds:
            raise VerificationError(f"the specification ends after {self.spec.rounds} rounds")
        if self.skipped >= self.spec.limits.skipped_rounds:
            raise VerificationError(f"the run should have failed after {self.skipped} skipped rounds in a row")
        self.rounds, self.last = self.rounds + 1, record
        self.skipped = self.skipped + 1 if record.state == "SKIPPED" else 0

    def check_ends(self, state: str, kind: MetricKind | None) -> None:
        """Checks that a run can have this state now; `kind` is that of the metric by which it may end.

        Raises VerificationError.
        """
        if state not in _STATES:
            raise VerificationError(
                f"the bundle says that the run is {state[:40]!r}; a run is one of {', '.join(_STATES)}"
            )
        if state != "COMPLETED":
            return
        if self.skipped >= self.spec.limits.skipped_rounds:
            raise VerificationError(
                f"the run is COMPLETED; after {self.skipped} skipped rounds in a row a run has FAILED"
            )
        metrics = {} if self.last is None else dict(self.last.metrics)
        try:
            reached = self.spec.stop.reached(kind, metrics)
        except (ValueError, OverflowError):  # a number that is not finite
            reached = ""
        if self.rounds < self.spec.rounds and not reached:
            raise VerificationError(
                f"the run is COMPLETED after {self.rounds} of {self.spec.rounds} rounds; its specification goes on"
            )


def check_description(about: Bundle, spec: RunSpec) -> None:
    """Checks the facts of a run in the manifest of a bundle that follow from its specification.

    Raises VerificationError.
    """
    names = tuple(about.objectives)
    if spec.measures and about.initial_model != spec.models[0]:
        raise VerificationError(
            f"the bundle says that the run began with {about.initial_model[:80]!r}; its "
            f"specification measures {spec.models[0]} first"
        )
    if about.name != spec.name:
        raise VerificationError(
            f"the bundle says that the run is called {about.name[:80]!r}; the specification says {spec.name!r}"
        )
    if not names or len(set(names)) < len(names) or names != (spec.objectives.names or names):
        raise VerificationError(f"the bundle has the objectives {list(names)}; the specification says otherwise")
    if len(metrics_of(about)) < len(about.metrics) or metrics_of(about) != (spec.evaluate.kinds or metrics_of(about)):
        raise VerificationError("the bundle has other metrics than the specification")


def metrics_of(about: Bundle) -> tuple[MetricKind, ...]:
    """The metrics of the task of a run, each once."""
    return tuple(
        {metric.name: MetricKind(metric.name, metric.better, metric.largest) for metric in about.metrics}.values()
    )


def watched(about: Bundle, spec: RunSpec) -> MetricKind | None:
    """The kind of the metric by which a run may end before its last round."""
    return kind_of(spec.stop.metric, metrics_of(about)) if spec.stop.metric else None


def check_in_order(record: RoundRecord, spec: RunSpec) -> None:
    """Checks the facts of a round that stand beside its envelopes. Raises VerificationError."""
    stepped, measured = record.HasField("step"), not spec.trains and record.state == "COMPLETED"
    if stepped and not spec.trains:
        raise VerificationError("it has a step, and the run only measures models or describes data")
    if record.document and not record.HasField("result"):
        raise VerificationError("it has a document, and no signed result")
    if record.HasField("result") != (measured and spec.describes):
        has = "a" if record.HasField("result") else "no"
        raise VerificationError(f"it has {has} result about data, and is {record.state[:40]} in a run of {spec.kind!r}")
    if record.state != ("COMPLETED" if stepped or measured else "SKIPPED"):
        raise VerificationError(
            f"it is {record.state[:40] or 'without a state'}, and has {'a' if stepped else 'no'} step"
        )
    if not stepped and record.state_after:
        raise VerificationError("it has no step, and a state after it")
    attempt, deciding = 0, True
    for number, phase in enumerate(record.phases):
        if phase.number != number:
            raise VerificationError(f"phase {phase.number} is at the place of phase {number}")
        if not attempt <= phase.attempt <= record.attempt:
            raise VerificationError(
                f"phase {number} is of attempt {phase.attempt}, after one of {attempt}, in {record.attempt + 1}"
            )
        # Verify, a verifier of your own, 4: after the evaluation the step is known; what is asked then cannot decide on
        # it.
        if phase.decides and not deciding:
            raise VerificationError(f"phase {number} decides on the step, after a phase that evaluates the model")
        if phase.decides and not spec.trains:
            raise VerificationError(f"phase {number} decides on a step, and the run makes none")
        if not phase.decides and not stepped and spec.trains:
            raise VerificationError(f"phase {number} evaluates a model, and the round has no step")
        if spec.privacy.secure == "off" and phase.decides != _work(phase.kind).decides:
            raise VerificationError(
                f"phase {number} asks for {phase.kind[:40]!r}; the record says that it "
                + ("decides on the step" if phase.decides else "evaluates the new model")
            )
        attempt, deciding = phase.attempt, phase.decides


def _work(name: str) -> type[Work]:
    return _kind(name).work


def _kind(name: str) -> Kind:
    try:
        return kind(name)
    except WorkError as error:
        raise VerificationError(str(error)) from error


def _check_known(message: type[Message], data: bytes, holder: str) -> None:
    """Raises VerificationError if a message that a signed one holds as bytes is malformed, or has an unknown field."""
    try:
        unknown = has_unknown_fields(message.FromString(data))
    except DecodeError:
        raise VerificationError(f"{holder} is not a {message.__name__}") from None
    if unknown:
        raise VerificationError(f"{holder} has a field that this release does not know: use the release that wrote it")


def round_problems(run: RecordedRun, opened: OpenedRound, model: str) -> Iterator[str]:
    """Describes what contradicts the specification in the signed messages of a round, whatever its step.

    One sentence for each check that fails; `model` is the digest of the model that members measure.
    """
    for check in (check_admitted, check_answered, partial(check_asks_for_evaluation, model=model)):
        try:
            check(run, opened)
        except VerificationError as error:
            yield str(error)


def check_admitted(run: RecordedRun, opened: OpenedRound) -> None:
    """Checks that a run may ask the clients of a round, for these objectives. Raises VerificationError."""
    spec, objectives = run.spec, run.objectives
    selection = spec.selection
    for order in (exchange.assignment.manifest for exchange in opened.exchanges):
        name, serves = order.client_id, list(order.objectives)
        # Verify, 1: without a certificate, the member may have been made up for this round.
        if name not in run.clients:
            raise VerificationError(f"{name[:80]!r} was asked, and no certificate names it")
        if name in selection.exclude or (selection.members and name not in selection.members):
            raise VerificationError(
                f"{name} was asked; selection.{'exclude' if name in selection.exclude else 'members'} says no"
            )
        if serves != [one for one in objectives if one in serves] or not serves:
            raise VerificationError(f"the assignment of {name} in phase {order.phase} has the objectives {serves}")
        if name in spec.objectives.serve and not {*serves} <= {*spec.objectives.serve[name]}:
            raise VerificationError(f"{name} was asked for objectives that objectives.serve does not allow it")


@dataclass(frozen=True)
class Crowd:
    """The number of clients that the first phase of a round must have asked, and of replies that its phases need.

    Attributes:
        spec: of the run.
        gone: the clients that were revoked, or left, between the end of the round before and the last attempt, so that
            they may have been selected and not asked.
    """

    spec: RunSpec
    gone: int

    def check_orders(self, orders: Sequence[AssignmentManifest]) -> None:
        """Checks the assignments of a phase that asks all who were selected. Raises VerificationError."""
        selection = self.spec.selection
        names = {order.client_id for order in orders}
        least = selection.asked(selection.minimum) - self.gone
        if len(names) < least:
            raise VerificationError(
                f"{len(names)} clients were asked; by selection.minimum = {selection.minimum}, at least {least} are"
            )
        if absent := [name for name in selection.required if name not in names]:
            raise VerificationError(f"{absent[0]} was not asked, and selection.required names it")

    def check_replied(
        self, phase: AlgorithmPhase, selected: int, orders: Sequence[AssignmentManifest], replied: Iterable[str]
    ) -> None:
        """Checks that a phase has the replies that the specification needs. Raises VerificationError.

        Args:
            phase: the phase.
            selected: the number of clients that were surely selected for the round.
            orders: the assignments of the phase.
            replied: the clients whose replies count.
        """
        selection, names = self.spec.selection, {*replied}
        terms, closing = phase.kind.terms(self.spec), phase.closes(len(orders))
        # The pool is not on record. It held all who were selected, and at least the minimum; a larger one wants more.
        wanted = max(
            selection.wanted(selection.minimum), min(selected, selection.wanted(max(selected, selection.minimum)))
        )
        if closing is not None:
            needed = closing.needed
        else:
            needed = 0 if terms.quorum is None else replies_needed(terms.quorum, min(wanted, len(orders)))
        if len(names) < needed:
            raise VerificationError(
                f"{len(names)} of {len(orders)} members replied to {phase.kind.name}; the quorum of the specification "
                f"is at least {needed}"
            )
        asked = {order.client_id for order in orders}
        if absent := [name for name in selection.required if name in asked - names]:
            raise VerificationError(
                f"the reply of {absent[0]} to {phase.kind.name} does not count, and selection.required names it"
            )


def measured_in(spec: RunSpec, number: int, model: str) -> str:
    """The digest of the model that members measure in a round; `model` is the one after the round's step, if any."""
    if not spec.measures:
        return model
    return spec.models[number] if number < len(spec.models) else ""


def check_measures(spec: RunSpec, opened: OpenedRound, gone: int) -> None:
    """Checks that a round without a step has asked enough members, and has enough replies, each one once.

    Of a private round, its phases and replies are verified where they are repeated. `gone` is as in `Crowd`. Raises
    VerificationError.
    """
    crowd = Crowd(spec, gone)
    if spec.evaluates_privately:
        # Verify, 4: the first phase asks all who were selected; the later ones ask those that answered before.
        if not opened.phases:
            raise VerificationError("it has 0 phases, and says that members measured a model")
        crowd.check_orders([exchange.assignment.manifest for exchange in opened.phases[0].exchanges])
        return
    if not 1 <= len(opened.phases) <= 2:
        what = "measures a model" if spec.measures else "describes data"
        raise VerificationError(
            f"it has {len(opened.phases)} phases; a round that only {what} has one, and one more if members were away"
        )
    orders = [exchange.assignment.manifest for exchange in opened.phases[0].exchanges]
    crowd.check_orders(orders)
    answered = [exchange for exchange in opened.exchanges if [*exchange.accepted]]
    replied = [exchange.assignment.manifest.client_id for exchange in answered]
    # Verify, 4: a member that replied twice would count twice in the means.
    if twice := [name for name in replied if replied.count(name) > 1]:
        raise VerificationError(f"two replies of {twice[0]} were accepted; the second phase asks who was away")
    crowd.check_replied(measuring_phase(spec, ()), len(orders), orders, replied)


def check_asks_for_evaluation(run: RecordedRun, opened: OpenedRound, model: str) -> None:
    """Checks the assignments that evaluate the new model of a round; `model` is its digest.

    Raises VerificationError.
    """
    spec, private = run.spec, run.spec.privacy.secure != "off"
    asked = run.measurement
    work = encode(asked) if spec.evaluated or spec.describes else b""
    schemas = asked.payload if isinstance(asked, Statistics) else ()
    size = run.blobs.size(model) if run.reads_updates and run.blobs.has(model) else None
    for phase in opened.phases:
        if not phase.evaluates:
            continue
        for exchange in phase.exchanges:
            order = exchange.assignment.manifest
            name = f"the assignment of {order.client_id} in phase {order.phase}"
            # Verify, 4: metrics of another model would stand under this round.
            if order.base_model != model:
                raise VerificationError(f"{name} evaluates another model than that of the round")
            step = "" if opened.step is None else opened.step.digest
            if (spec.trains and not step) or order.previous_step != step:
                raise VerificationError(f"{name} does not name the step of the round")
            if size is not None and order.base_model_bytes != size:
                raise VerificationError(
                    f"the model has {size} bytes; {order.client_id} was told {order.base_model_bytes}"
                )
            rows = tuple(RowSchema(row.name, row.length, row.dtype) for row in order.rows)
            if not private and (order.kind != asked.name or order.work != work or order.inputs or rows != schemas):
                raise VerificationError(f"{name} asks for another evaluation than the specification")


def check_answered(run: RecordedRun, opened: OpenedRound) -> None:
    """Checks the payloads that were asked for, and payloads and statements of accepted replies.

    Raises VerificationError.
    """
    for exchange in opened.exchanges:
        order = exchange.assignment.manifest
        schemas = tuple(RowSchema(row.name, row.length, row.dtype) for row in order.rows)
        try:
            largest = payload_layout(schemas).file_bytes if schemas else 0
        except (ValueError, KeyError) as error:
            raise VerificationError(f"the rows that {order.client_id} was asked for: {str(error)[:200]}") from error
        _check_known(_kind(order.kind).message, order.work, f"the work that {order.client_id} was asked for")
        if order.kind == SessionStage.READY:
            terms = SecureReadyWork.FromString(order.work).terms
            _check_known(SecureTerms, terms, f"the terms of the session that {order.client_id} was asked into")
        inputs = [part.name for part in order.inputs]
        if inputs != sorted({*inputs}):
            raise VerificationError(
                f"{order.client_id} was given the inputs {inputs} in phase {order.phase}; each comes once"
            )
        # Verify, each value: the rows decide; a larger bound for one member would let it send what others may not.
        if order.max_payload_bytes != largest:
            raise VerificationError(
                f"{order.client_id} may send {order.max_payload_bytes} bytes; the rows have {largest}"
            )
        for answer in exchange.accepted:
            said = answer.reply.manifest
            needed = _work(order.kind).needs_samples
            if said.samples > run.spec.limits.samples or (needed and not said.samples):
                raise VerificationError(
                    f"{answer.reply.name} claims {said.samples} samples; limits.samples refuses that"
                )
            if not bool(order.rows) == bool(said.payload) == bool(said.payload_bytes):
                raise VerificationError(
                    f"{answer.reply.name} must have a payload if its assignment asks for rows, and only then"
                )
            if said.payload and run.reads_updates and run.blobs.has(said.payload):
                rows = run.blobs.rows(said.payload)
                sent = [(name, row.dtype, row.length) for name, row in rows.items()]
                if sent != [(row.name, row.dtype, row.length) for row in said.rows]:
                    raise VerificationError(f"{answer.reply.name} has a payload of other rows than it says")
                if run.blobs.size(said.payload) != said.payload_bytes:
                    raise VerificationError(f"{answer.reply.name} has a payload of another size than it says")
            # Verify, 14: the coordinator must have refused it; accepted, its session would rest on a statement for
            # another phase.
            if problem := statement_problem(order.kind, order.work, said.statement):
                raise VerificationError(f"{answer.reply.name}: {problem}")
            statements = kind(order.kind).statements
            if statements is not None:
                _check_known(statements.message, said.statement, f"the statement in {answer.reply.name}")
