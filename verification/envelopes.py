"""The envelopes of a round: signers, and the bindings of reply to assignment, receipt to reply, step to replies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.envelope import ManifestT, envelope_digest, unseal
from federation.key_chain import KeyChain, moment
from federation.record import bindings
from federation.record.bindings import repeated
from federation.refusals import Refusal
from federation.v1.common_pb2 import (
    AssignmentManifest,
    DeclineManifest,
    ReceiptManifest,
    ReplyManifest,
    SignedEnvelope,
    StepManifest,
)
from federation.v1.record_pb2 import Answer, Exchange, PhaseRecord, RoundRecord
from verification.errors import Wrong
from verification.keys import Keys


@dataclass(frozen=True, kw_only=True)
class SignedReply:
    """An accepted reply.

    Attributes:
        envelope: its digest.
        signed: the envelope, serialized.
        order: the assignment that it fulfils.
        said: what the client signed.
    """

    envelope: str
    signed: bytes
    order: AssignmentManifest
    said: ReplyManifest


@dataclass(frozen=True, kw_only=True)
class SignedRound:
    """What was signed in a round.

    Attributes:
        step: None where the round has no step.
        step_digest: of the envelope of the step; empty without one.
        phases: the numbers of the phases of the last attempt on which the step depends, in their order.
        asked: the assignments of these phases, by phase and client.
        replies: the accepted replies to these phases, by the digests of their envelopes.
        evaluations: those to the later phases, which measure the new model.
        envelopes: how many signatures were verified.
        orders: the assignments of all attempts and of evaluations.
        answers: the accepted replies to them.
    """

    step: StepManifest | None
    step_digest: str
    phases: tuple[int, ...]
    asked: Mapping[tuple[int, str], AssignmentManifest]
    replies: Mapping[str, SignedReply]
    evaluations: Mapping[str, SignedReply]
    envelopes: int
    orders: Sequence[AssignmentManifest]
    answers: Sequence[ReplyManifest]


@dataclass
class EnvelopeReader:
    """Verifies the envelopes of a run, round by round.

    Attributes:
        keys: who may sign what.
        facts: what all assignments have in common, by the name of the field.
    """

    keys: Keys
    facts: Mapping[str, object]
    _assignments: set[str] = field(default_factory=set)
    _submitted_by: str | None = None
    _count: int = 0

    def read(self, record: RoundRecord, base_model: str, previous_step: str) -> SignedRound:
        """The envelopes of a round.

        Args:
            record: of the round.
            base_model: the digest of the model that the round starts from.
            previous_step: the digest of the envelope of the step before; empty before the first.

        Raises:
            Wrong: an envelope is not signed by the right key, or does not belong where it is.
        """
        self._count = 0
        step, step_digest = None, ""
        if record.HasField("step"):
            step = self._open(record.step, StepManifest, self.keys.coordinator, "the step")
            step_digest = envelope_digest(record.step)
            facts = {"federation_id": self.facts["federation_id"], "run_id": self.facts["run_id"]}
            same("the step", step, {**facts, "round": record.number, "base_model": base_model})
        phases: list[int] = []
        replies: dict[str, SignedReply] = {}
        evaluations: dict[str, SignedReply] = {}
        asked: dict[tuple[int, str], AssignmentManifest] = {}
        every: list[AssignmentManifest] = []
        answers: list[ReplyManifest] = []
        for phase in record.phases:
            deciding = phase.decides and phase.attempt == record.attempt
            expected = {"base_model": base_model, "previous_step": previous_step} if phase.decides else {}
            orders, found = self._phase(record, phase, expected)
            every += orders
            answers += (reply.said for reply in found.values())
            if deciding:
                phases.append(phase.number)
                replies |= found
                asked |= {(phase.number, order.client_id): order for order in orders}
            elif not phase.decides:
                evaluations |= found
        if step is not None:
            _must_name_all(step, replies.values())
        return SignedRound(
            step=step,
            step_digest=step_digest,
            phases=tuple(phases),
            asked=asked,
            replies=replies,
            evaluations=evaluations,
            envelopes=self._count,
            orders=every,
            answers=answers,
        )

    def _phase(
        self, record: RoundRecord, phase: PhaseRecord, expected: Mapping[str, str]
    ) -> tuple[list[AssignmentManifest], dict[str, SignedReply]]:
        """The assignments of a phase, and the accepted replies by the digests of their envelopes."""
        orders: list[AssignmentManifest] = []
        accepted: dict[str, SignedReply] = {}
        place = {"round": record.number, "phase": phase.number, "attempt": phase.attempt, "kind": phase.kind}
        for exchange in phase.exchanges:
            order = self._open(exchange.assignment, AssignmentManifest, self.keys.coordinator, "an assignment")
            where = f"the assignment of {order.client_id} in phase {phase.number}"
            self._submitted_by = order.submitted_by if self._submitted_by is None else self._submitted_by
            same(where, order, {**self.facts, **place, **expected, "submitted_by": self._submitted_by})
            if order.assignment_id in self._assignments:
                raise Wrong(f"{where} is on record twice")
            self._assignments.add(order.assignment_id)
            if any(other.client_id == order.client_id for other in orders):
                raise Wrong(f"{order.client_id} was asked twice in phase {phase.number}")
            orders.append(order)
            replies = [reply for answer in exchange.answers if (reply := self._answer(answer, order)) is not None]
            if len(replies) > 1:
                raise Wrong(f"{where} has {len(replies)} accepted replies")
            if exchange.HasField("decline"):
                self._decline(exchange, order)
                if replies:
                    raise Wrong(f"{where} was declined, and has an accepted reply")
            accepted |= {reply.envelope: reply for reply in replies}
        for order in orders:
            same(f"the assignment of {order.client_id} in phase {phase.number}", order, {"members": len(orders)})
        return orders, accepted

    def _decline(self, exchange: Exchange, order: AssignmentManifest) -> None:
        """Verifies that the client declined this assignment."""
        who = f"the decline of {order.client_id} in phase {order.phase}"
        said = self._open(exchange.decline, DeclineManifest, self.keys.client(order.client_id), who)
        self._must_count(exchange.decline, order, order.created, who)
        same(who, said, repeated(order, bindings.DECLINE))
        if said.assignment:  # empty if the worker could not verify what it got
            same(who, said, {"assignment": envelope_digest(exchange.assignment)})

    def _answer(self, answer: Answer, order: AssignmentManifest) -> SignedReply | None:
        """The reply to an assignment; None if it was refused."""
        who = f"the reply of {order.client_id} in phase {order.phase}"
        said = self._open(answer.reply, ReplyManifest, self.keys.client(order.client_id), who)
        same(who, said, {"assignment_id": order.assignment_id, "client_id": order.client_id})
        if not answer.HasField("receipt"):
            self._must_count(answer.reply, order, order.created, who)
            return None
        name = envelope_digest(answer.reply)
        receipt = self._open(answer.receipt, ReceiptManifest, self.keys.coordinator, f"the receipt for {who}")
        self._must_count(answer.reply, order, receipt.created, who)
        same(f"the receipt for {who}", receipt, {"envelope": name, "assignment_id": order.assignment_id})
        if not receipt.accepted:
            return None
        same(f"the receipt for {who}", receipt, {"reason": ""})
        same(who, said, repeated(order, bindings.REPLY))
        same(f"the receipt for {who}", receipt, repeated(said, bindings.RECEIPT))
        if said.payload_bytes > order.max_payload_bytes:
            raise Wrong(f"{who} has a payload of {said.payload_bytes} bytes; {order.max_payload_bytes} were allowed")
        return SignedReply(
            envelope=name, signed=answer.reply.SerializeToString(deterministic=True), order=order, said=said
        )

    def _must_count(self, envelope: SignedEnvelope, order: AssignmentManifest, received: Timestamp, who: str) -> None:
        """The key that signed what a client sent was the client's at that time."""
        try:
            self.keys.client(order.client_id).must_count(envelope, moment(order.created), moment(received))
        except Refusal as error:
            raise Wrong(f"{who}: {error.message}") from error

    def _open(self, envelope: SignedEnvelope, kind: type[ManifestT], keys: KeyChain, what: str) -> ManifestT:
        self._count += 1
        return opened(envelope, kind, keys, what, made=keys is self.keys.coordinator)


def opened(envelope: SignedEnvelope, kind: type[ManifestT], keys: KeyChain, what: str, *, made: bool) -> ManifestT:
    """The manifest in an envelope.

    Raises:
        Wrong: none of these keys has signed it; with `made`, the one that has was replaced before it was made. The
            message begins with `what`.
    """
    try:
        return keys.unseal(envelope, kind) if made else unseal(envelope, kind, keys.signer(envelope))
    except (Refusal, DecodeError) as error:
        raise Wrong(f"{what}: {error.message if isinstance(error, Refusal) else error}") from error


def same(what: str, message: Message, expected: Mapping[str, object]) -> None:
    """Raises Wrong, naming `what`, unless the fields of a message have these values."""
    for name, value in expected.items():
        found = getattr(message, name)
        if found != value:
            raise Wrong(f"{what} has the {name} {_short(found)}; expected {_short(value)}")


def _must_name_all(step: StepManifest, replies: Iterable[SignedReply]) -> None:
    """A reply with a receipt that says "accepted" is in the step, unless the step says that its client was revoked."""
    named = {*step.replies, *step.consulted}
    left_out = {reply.said.client_id for reply in replies if reply.envelope not in named}
    if unnamed := left_out - {*step.revoked}:
        raise Wrong(f"the reply of {min(unnamed)} was accepted, and the step leaves it out")
    if strangers := {*step.revoked} - left_out:
        raise Wrong(f"the step leaves {min(strangers)} out as revoked, and has no reply of it to leave out")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 90 else text[:89] + "…"
