"""Opens an assignment and the answers of its client: verifies each signature, and that each message belongs there.

Opening does not stop at a problem: each envelope states its own, so that a reader can show all problems or stop at the
first one. Each envelope also states the `Fact` that the audit log must have about it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Generic, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import Message

from federation.record import bound_fields
from federation.record.bound_fields import repeated
from federation.record.log_entries import ACCEPTED, DECLINED, EQUIVOCATED, ISSUED, REFUSED, Fact
from federation.refusals import Refusal
from federation.trust.envelope import ManifestT, envelope_digest
from federation.trust.envelope import verify as verify_signature
from federation.trust.key_chain import KeyChain, moment
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ConsentManifest,
    DeclineManifest,
    ReceiptManifest,
    ReplyManifest,
    SignedEnvelope,
)
from federation.v1.record_pb2 import Answer, Exchange


class Unbound(Refusal):
    """A message with a valid signature does not belong at its place in the record.

    The text of the error continues after the name of the message. The reason is `mismatch` with the field, or with the
    fact that the message contradicts.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"mismatch:{field}", message)


class Mismatch(Unbound):
    """A field of a signed message has another value than the record requires.

    Attributes:
        field: its name.
        found: its signed value.
        expected: the value that the record requires.
    """

    def __init__(self, field: str, found: object, expected: object) -> None:
        super().__init__(field, f"has the {field} {_short(found)}; expected {_short(expected)}")
        self.field = field
        self.found = found
        self.expected = expected


class Verify(Protocol):
    """Verifies a signature, and parses what was signed. Raises Refusal, as `federation.trust.envelope.verify`."""

    def __call__(self, envelope: SignedEnvelope, kind: type[ManifestT], key: Ed25519PublicKey, /) -> ManifestT:
        """The manifest in an envelope that the key has signed."""


@dataclass(frozen=True, kw_only=True)
class Signers:
    """The keys that may sign the messages of a record.

    Attributes:
        coordinator: the keys of assignments, receipts and steps.
        client: returns the keys of a client for an envelope; raises Refusal if they are unknown.
        verify: verifies one signature; a coordinator remembers the signatures that it has verified before.
    """

    coordinator: KeyChain
    client: Callable[[str, SignedEnvelope], KeyChain]
    verify: Verify = verify_signature

    def of_coordinator(self, envelope: SignedEnvelope, kind: type[ManifestT]) -> ManifestT:
        """The manifest in an envelope of the coordinator. Raises Refusal."""
        # Verify, 1: the signature, then the time of its key, which only a signed manifest tells.
        manifest = self.verify(envelope, kind, self.coordinator.signer(envelope))
        self.coordinator.check_made(envelope, manifest)
        return manifest

    def of_client(self, client_id: str, envelope: SignedEnvelope, kind: type[ManifestT]) -> ManifestT:
        """The manifest in an envelope of a client, whose key may have ended meanwhile. Raises Refusal."""
        return self.verify(envelope, kind, self.client(client_id, envelope).signer(envelope))


@dataclass(frozen=True, kw_only=True)
class Opened(Generic[ManifestT]):
    """An envelope of the record.

    Attributes:
        kind: "assignment", "decline", "reply", "receipt", "step" or "consent".
        name: of the envelope as text, such as "the reply of ann in phase 0".
        envelope: as it is on record.
        manifest: the signed message; an empty one if the signature is not valid.
        is_signed: True if a key that may sign it has signed it.
        problem: the reason why it is not verified; None if it is.
        fact: the fact that the audit log must have about it; None if it has no entry of its own.
    """

    kind: str
    name: str
    envelope: SignedEnvelope
    manifest: ManifestT
    is_signed: bool
    problem: Refusal | None = None
    fact: Fact | None = None

    @cached_property
    def digest(self) -> str:
        """The digest of the envelope."""
        return envelope_digest(self.envelope)

    @property
    def words(self) -> str:
        """The problem as text, with the name of the envelope; empty without a problem."""
        if self.problem is None:
            return ""
        return f"{self.name}{' ' if isinstance(self.problem, Unbound) else ': '}{self.problem.message}"

    def but(self, *problems: Refusal | None, action: str = "", subject: str = "") -> "Opened[ManifestT]":
        """A copy with its problem or else the first of these, and with the fact of an action of the log."""
        # Its own problem stays the first: those that are found later can follow from it, and would hide it.
        first = next((problem for problem in (self.problem, *problems) if problem is not None), None)
        fact = Fact(action, subject, self.digest) if action else self.fact
        return replace(self, problem=first, fact=fact)


@dataclass(frozen=True, kw_only=True)
class OpenedAnswer:
    """A reply, and its receipt; a further reply to an assignment that was fulfilled has none."""

    reply: Opened[ReplyManifest]
    receipt: Opened[ReceiptManifest] | None

    @property
    def is_accepted(self) -> bool:
        """True if the coordinator has signed that the reply counts."""
        return self.receipt is not None and self.receipt.manifest.accepted


@dataclass(frozen=True, kw_only=True)
class OpenedExchange:
    """An assignment, and the answers of its client."""

    assignment: Opened[AssignmentManifest]
    decline: Opened[DeclineManifest] | None
    answers: tuple[OpenedAnswer, ...]

    @property
    def envelopes(self) -> Iterator[Opened[Any]]:
        """All envelopes: the assignment, the decline, then each reply with its receipt."""
        yield self.assignment
        if self.decline is not None:
            yield self.decline
        for answer in self.answers:
            yield answer.reply
            if answer.receipt is not None:
                yield answer.receipt

    @property
    def accepted(self) -> list[OpenedAnswer]:
        """The replies that count; a valid record has at most one."""
        return [answer for answer in self.answers if answer.is_accepted]


def open_exchange(exchange: Exchange, signers: Signers, expected: Mapping[str, object]) -> OpenedExchange:
    """Opens an assignment and its answers, and compares each answer with the message that it answers.

    Args:
        exchange: as it is on record.
        signers: the keys that may sign it.
        expected: the known values of the assignment's fields, by name, its `phase` at least. Its `client_id` is the
            client of the answers; without it, the one that the assignment names.
    """
    assignment = open_assignment(exchange.assignment, signers, expected)
    return open_answers(assignment, exchange, signers, expected)


def open_assignment(
    envelope: SignedEnvelope, signers: Signers, expected: Mapping[str, object]
) -> Opened[AssignmentManifest]:
    """Opens an assignment; the arguments are those of `open_exchange`."""
    assignment = opened("assignment", "an assignment", envelope, AssignmentManifest, signers.of_coordinator)
    order = assignment.manifest
    if client_id := expected.get("client_id", order.client_id):
        assignment = replace(assignment, name=f"the assignment of {client_id} in phase {expected['phase']}")
    subject = str(expected.get("assignment_id", order.assignment_id))
    return assignment.but(mismatch(order, expected), action=ISSUED, subject=subject)


def open_answers(
    assignment: Opened[AssignmentManifest], exchange: Exchange, signers: Signers, expected: Mapping[str, object]
) -> OpenedExchange:
    """Opens the answers to an assignment; the arguments are those of `open_exchange`."""
    client_id = str(expected.get("client_id", assignment.manifest.client_id))
    reader = _AnswerReader(assignment, client_id, signers, f"of {client_id} in phase {expected['phase']}")
    decline = reader.decline(exchange.decline) if exchange.HasField("decline") else None
    answers = tuple(reader.answer(answer) for answer in exchange.answers)
    opened = OpenedExchange(assignment=assignment, decline=decline, answers=answers)
    # Verify, 3: of two accepted replies, the coordinator could choose the update after it has seen both.
    if (count := len(opened.accepted)) > 1:
        return replace(opened, assignment=assignment.but(Unbound("answers", f"has {count} accepted replies")))
    # Verify, 3: a member that declined has not worked, so one of both messages is not what it says.
    if count and decline is not None:
        return replace(opened, assignment=assignment.but(Unbound("answers", "was declined, and has an accepted reply")))
    return opened


@dataclass(frozen=True)
class _AnswerReader:
    """Opens the answers of a client to an assignment."""

    assignment: Opened[AssignmentManifest]
    client_id: str
    signers: Signers
    place: str

    @property
    def _subject(self) -> str:
        """The subject of the log's entries: the assignment."""
        return "" if self.assignment.fact is None else self.assignment.fact.subject

    def decline(self, envelope: SignedEnvelope) -> Opened[DeclineManifest]:
        """The decline of the assignment."""
        decline = self._opened("decline", envelope, DeclineManifest)
        order = self.assignment.manifest
        # Verify, 3: or the decline of one assignment could explain the silence at another.
        expected = repeated(order, bound_fields.DECLINE)
        if decline.manifest.assignment:  # empty if the worker could not verify the assignment
            expected["assignment"] = self.assignment.digest
        problems = (self._difference(decline, expected), self._problem_of_key(envelope, None))
        return decline.but(*problems, self._unverified(), action=DECLINED, subject=self._subject)

    def answer(self, answer: Answer) -> OpenedAnswer:
        """A reply to the assignment, with its receipt."""
        reply = self._opened("reply", answer.reply, ReplyManifest)
        order, size = self.assignment.manifest, reply.manifest.payload_bytes
        too_long = None
        # Protocol, order of checks, 4: the coordinator must have refused it; accepted, the record shows an exception
        # for one member.
        if size > order.max_payload_bytes:
            text = f"has a payload of {size} bytes; {order.max_payload_bytes} were allowed"
            too_long = Unbound("payload_bytes", text)
        receipt = self._receipt(answer.receipt, reply) if answer.HasField("receipt") else None
        action = EQUIVOCATED
        if receipt is not None:  # an unsigned receipt does not decide which entry the reply has
            action = "" if not receipt.is_signed else ACCEPTED if receipt.manifest.accepted else REFUSED
        reply = reply.but(
            # Verify, 3: before its key is judged: a reply that repeats another assignment belongs to another round or
            # model.
            self._difference(reply, repeated(order, bound_fields.REPLY)),
            too_long,
            self._problem_of_key(answer.reply, receipt),
            self._unverified(),
            action=action,
            subject=self._subject,
        )
        return OpenedAnswer(reply=reply, receipt=receipt)

    def _receipt(self, envelope: SignedEnvelope, reply: Opened[ReplyManifest]) -> Opened[ReceiptManifest]:
        name = f"the receipt for {reply.name}"
        receipt = opened("receipt", name, envelope, ReceiptManifest, self.signers.of_coordinator)
        # Verify, 3: the digest of this reply: two replies to one assignment have the same place, and other content.
        of_order = {"envelope": reply.digest, **repeated(self.assignment.manifest, bound_fields.PLACE)}
        of_reply = repeated(reply.manifest, bound_fields.RECEIPT) if reply.is_signed else {}
        # Verify, 3: accepted and refused for a reason at once would be read in two ways.
        if receipt.manifest.accepted:
            of_reply["reason"] = ""
        problems = (self._difference(receipt, expected) for expected in (of_order, of_reply))
        return receipt.but(*problems, self._unverified())

    def _opened(self, kind: str, envelope: SignedEnvelope, message: type[ManifestT]) -> Opened[ManifestT]:
        def verify(envelope: SignedEnvelope, message: type[ManifestT]) -> ManifestT:
            return self.signers.of_client(self.client_id, envelope, message)

        return opened(kind, f"the {kind} {self.place}", envelope, message, verify)

    def _difference(self, answer: Opened[Any], expected: Mapping[str, object]) -> Mismatch | None:
        """The first field in which an answer differs; an assignment without a valid signature is not compared."""
        # Without a signature, a manifest is empty: compared, it would give a second problem that is none.
        return mismatch(answer.manifest, expected) if answer.is_signed and self.assignment.is_signed else None

    def _unverified(self) -> Unbound | None:
        """The problem of an answer to an assignment that is not verified itself."""
        if self.assignment.problem is None:
            return None
        return Unbound("assignment", f"answers an assignment that is not verified: {self.assignment.problem.message}")

    def _problem_of_key(self, envelope: SignedEnvelope, receipt: Opened[ReceiptManifest] | None) -> Refusal | None:
        """The problem of an envelope whose key was replaced before; one without receipt counts as received at once."""
        try:
            keys = self.signers.client(self.client_id, envelope)
            # Protocol, rotation: the assignment's time is the coordinator's, so a member cannot date its reply back to
            # a former key.
            asked = received = moment(self.assignment.manifest.created)
            if receipt is not None and receipt.is_signed:
                received = moment(receipt.manifest.created)
            elif receipt is not None and keys.former_of(envelope) is not None:
                return receipt.problem  # the time of the reception is unknown
            keys.check_counts(envelope, asked, received)
        except Refusal as refusal:
            return refusal
        return None


def open_consent(
    envelope: SignedEnvelope,
    client_id: str,
    signers: Signers,
    expected: Mapping[str, object],
    answered: datetime | None = None,
) -> Opened[ConsentManifest]:
    """Opens a client's answer to a run.

    Args:
        envelope: as it is on record.
        client_id: the client.
        signers: the keys that may sign it.
        expected: its federation, run and specification, by the name of the field.
        answered: the time of its reception; None if only the audit log can tell whether the key still counted.
    """

    def verify(envelope: SignedEnvelope, kind: type[ConsentManifest]) -> ConsentManifest:
        answer = signers.of_client(client_id, envelope, kind)
        if answered is not None:
            signers.client(client_id, envelope).check_counts(envelope, answered, answered)
        return answer

    consent = opened("consent", f"the answer of {client_id!r} to the run", envelope, ConsentManifest, verify)
    answer = consent.manifest
    action, subject = f"consent.{answer.answer}", f"{answer.run_id}/{client_id}"
    return consent.but(mismatch(answer, {**expected, "client_id": client_id}), action=action, subject=subject)


def mismatch(message: Message, expected: Mapping[str, object]) -> Mismatch | None:
    """The first field of a message with another value than expected; None if all agree."""
    for name, value in expected.items():
        signed = getattr(message, name)
        if signed != value:
            return Mismatch(name, signed, value)
    return None


def opened(
    kind: str,
    name: str,
    envelope: SignedEnvelope,
    message: type[ManifestT],
    verify: Callable[[SignedEnvelope, type[ManifestT]], ManifestT],
) -> Opened[ManifestT]:
    """Opens an envelope with `verify`, which raises Refusal unless a key that may sign it has signed it."""
    try:
        manifest = verify(envelope, message)
    except Refusal as refusal:
        # Protocol, the envelope: an empty manifest, so no reader can use a value that nobody has signed.
        return Opened(kind=kind, name=name, envelope=envelope, manifest=message(), is_signed=False, problem=refusal)
    return Opened(kind=kind, name=name, envelope=envelope, manifest=manifest, is_signed=True)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 90 else text[:89] + "…"
