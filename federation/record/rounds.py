"""Opens the rounds of a run from their records: all envelopes of a round, and the fields by which they agree."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from federation.record.exchange import (
    Opened,
    OpenedExchange,
    Signers,
    Unbound,
    mismatch,
    open_answers,
    open_assignment,
    opened,
)
from federation.record.log_entries import DESCRIBED, MEASURED, SKIPPED, STEPPED, Fact
from federation.refusals import Refusal
from federation.v1.common_pb2 import AssignmentManifest, ResultManifest, SignedEnvelope, StepManifest
from federation.v1.record_pb2 import PhaseRecord, RoundRecord


@dataclass(frozen=True, kw_only=True)
class OpenedPhase:
    """A phase.

    Attributes:
        number: in its round, over all attempts.
        decides: True if its replies decide on the step: it is of the last attempt, and does not evaluate the new model.
        evaluates: True if its replies measure the new model.
        exchanges: one for each client that was asked.
    """

    number: int
    decides: bool
    evaluates: bool
    exchanges: tuple[OpenedExchange, ...]


@dataclass(frozen=True, kw_only=True)
class OpenedRound:
    """A round.

    Attributes:
        phases: those of all attempts, in their order.
        step: None if the round has none.
        ended: the fact that the log must have about the end of a round without a step: it was skipped, or measured a
            model; None for others.
        result: of a round that describes data; None for others.
    """

    phases: tuple[OpenedPhase, ...]
    step: Opened[StepManifest] | None
    ended: Fact | None
    result: Opened[ResultManifest] | None = None

    @property
    def exchanges(self) -> Iterator[OpenedExchange]:
        """The exchanges of all phases."""
        return (exchange for phase in self.phases for exchange in phase.exchanges)

    @property
    def sent(self) -> tuple[int, int]:
        """The bytes of the payloads of the replies that ended their assignments, accepted and refused, as declared."""
        bytes_of = {True: 0, False: 0}
        for exchange in self.exchanges:
            for answer in exchange.answers:
                if answer.receipt is not None:
                    bytes_of[answer.is_accepted] += answer.reply.manifest.payload_bytes
        return bytes_of[True], bytes_of[False]

    @property
    def envelopes(self) -> Iterator[Opened[Any]]:
        """All envelopes, the step or the result last."""
        for exchange in self.exchanges:
            yield from exchange.envelopes
        if self.step is not None:
            yield self.step
        if self.result is not None:
            yield self.result


@dataclass
class RecordReader:
    """Opens the rounds of a run in their order.

    Attributes:
        signers: the keys that may sign its messages.
        facts: the values that all assignments of the run repeat, by the name of the field; see
            `federation.spec.run_facts.run_facts`.
    """

    signers: Signers
    facts: Mapping[str, object]
    _assignments: set[str] = field(default_factory=set)
    _submitted_by: str | None = None

    @property
    def submitted_by(self) -> str | None:
        """The administrator who submitted the run, by the assignments that were read; None before the first."""
        return self._submitted_by

    def read(
        self,
        record: RoundRecord,
        base_model: str,
        previous_step: str,
        known: Mapping[int, Sequence[Mapping[str, object]]] = MappingProxyType({}),
    ) -> OpenedRound:
        """Opens a round.

        Args:
            record: of the round.
            base_model: the digest of the model that the round starts from.
            previous_step: the digest of the envelope of the step before; empty before the first.
            known: further known values of the assignments of a phase, by its number, in the order of the exchanges.
        """
        phases = []
        for phase in record.phases:
            expected = {**self.facts, "round": record.number}
            expected |= {"base_model": base_model, "previous_step": previous_step} if phase.decides else {}
            phases.append(self._phase(record, phase, expected, known.get(phase.number, ())))
        step, result, ended, subject = None, None, None, f"{self.facts['run_id']}/{record.number}"
        if record.HasField("step"):
            step = opened("step", "the step", record.step, StepManifest, self.signers.of_coordinator)
            expected = {"federation_id": self.facts["federation_id"], "run_id": self.facts["run_id"]}
            expected |= {"round": record.number, "base_model": base_model}
            problems = mismatch(step.manifest, expected), _leaves_out(step.manifest, phases)
            step = step.but(*problems, action=STEPPED, subject=subject)
        elif record.HasField("result"):
            result = opened("result", "the result", record.result, ResultManifest, self.signers.of_coordinator)
            expected = {name: self.facts[name] for name in ("federation_id", "run_id", "spec")}
            problem = mismatch(result.manifest, {**expected, "round": record.number})
            result = result.but(problem, action=DESCRIBED, subject=subject)
        elif record.state == "SKIPPED":
            ended = Fact(SKIPPED, subject, "")
        elif record.state == "COMPLETED":
            ended = Fact(MEASURED, subject, base_model)
        return OpenedRound(phases=tuple(phases), step=step, ended=ended, result=result)

    def _phase(
        self,
        record: RoundRecord,
        phase: PhaseRecord,
        expected: Mapping[str, object],
        known: Sequence[Mapping[str, object]],
    ) -> OpenedPhase:
        position = {"phase": phase.number, "attempt": phase.attempt, "kind": phase.kind}
        facts = [{**(known[number] if known else {}), **expected, **position} for number in range(len(phase.exchanges))]
        assignments = [
            self._assignment(exchange.assignment, values)
            for exchange, values in zip(phase.exchanges, facts, strict=True)
        ]
        assignments = _asked_once(assignments)
        exchanges = [
            open_answers(assignment, exchange, self.signers, values)
            for assignment, exchange, values in zip(assignments, phase.exchanges, facts, strict=True)
        ]
        decides = phase.decides and phase.attempt == record.attempt
        return OpenedPhase(
            number=phase.number, decides=decides, evaluates=not phase.decides, exchanges=tuple(exchanges)
        )

    def _assignment(self, envelope: SignedEnvelope, expected: Mapping[str, object]) -> Opened[AssignmentManifest]:
        """Opens an assignment, which must name the submitter of the first one, and be on record once."""
        if self._submitted_by is not None:
            expected = {**expected, "submitted_by": self._submitted_by}
        assignment = open_assignment(envelope, self.signers, expected)
        order = assignment.manifest
        if assignment.is_signed:
            self._submitted_by = order.submitted_by if self._submitted_by is None else self._submitted_by
            if order.assignment_id in self._assignments:
                return assignment.but(Unbound("assignment_id", "is on record twice"))
            self._assignments.add(order.assignment_id)
        return assignment


def _asked_once(assignments: Sequence[Opened[AssignmentManifest]]) -> list[Opened[AssignmentManifest]]:
    """Checks the assignments of a phase: each is for another client, and names the number of all."""
    clients: set[str] = set()
    opened = []
    for assignment in assignments:
        order, twice = assignment.manifest, None
        if assignment.is_signed and order.client_id in clients:
            text = f"is a second one: {order.client_id} was asked twice in phase {order.phase}"
            twice = Unbound("client_id", text)
        clients.add(order.client_id)
        opened.append(assignment.but(twice))
    if any(assignment.problem is not None for assignment in opened):
        return opened  # an assignment that does not belong here makes the number of the others wrong
    return [assignment.but(mismatch(assignment.manifest, {"members": len(opened)})) for assignment in opened]


def _leaves_out(step: StepManifest, phases: Sequence[OpenedPhase]) -> Refusal | None:
    """The problem of a step that names neither an accepted reply nor its client as revoked; None if there is none."""
    named = {*step.replies, *step.consulted}
    deciding = [
        answer for phase in phases if phase.decides for exchange in phase.exchanges for answer in exchange.accepted
    ]
    left_out = {answer.reply.manifest.client_id for answer in deciding if answer.reply.digest not in named}
    if unnamed := left_out - {*step.revoked}:
        return Refusal("mismatch:replies", f"the reply of {min(unnamed)} was accepted, and the step leaves it out")
    if len(step.revoked) != len({*step.revoked}):
        return Unbound("revoked", "names a client twice as revoked")
    if strangers := {*step.revoked} - left_out:
        return Unbound("revoked", f"leaves {min(strangers)} out as revoked, and has no reply of it to leave out")
    return None
