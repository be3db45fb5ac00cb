"""Checks the signed envelopes on record whenever they are shown.

An envelope holds if the one key that may sign it has signed it, and if the record says what was signed. Bytes that are
not an envelope are a failed check, not an error.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError, Message
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds import columns
from coordinator.signing_keys import member_keys, rotations_of
from federation.envelope import ManifestT, envelope_digest, unseal
from federation.key_chain import KeyChain, moment, whole_chain
from federation.proofs import UNSIGNED
from federation.record import bindings
from federation.refusals import Refusal
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ConsentManifest,
    DeclineManifest,
    ReceiptManifest,
    ReplyManifest,
    SignedEnvelope,
    StepManifest,
)
from storage import models
from storage.states import AssignmentState

_MAX_WORDS = 100  # characters of a value in a message

# Field, value on record, value that was signed.
_Pairs = Iterable[tuple[str, Any, Any]]


@dataclass(frozen=True)
class Place:
    """The run, round and phase that an envelope belongs to; rounds and phases are numbered from 0."""

    run_id: str
    round: int
    phase: int


@dataclass(frozen=True)
class Verifier:
    """Checks envelopes of one federation; the coordinator signs assignments, receipts and steps."""

    federation_id: str
    coordinator: KeyChain

    def keys(self, session: Session, client: models.Client) -> KeyChain:
        """The keys of a client, whose rotations on record are verified. Raises Refusal if they do not fit."""
        try:
            present = Ed25519PublicKey.from_public_bytes(client.signing_key)
        except ValueError as error:
            raise Refusal("signing-key", str(error)) from None
        return whole_chain(
            rotations_of(session, client.client_id),
            present,
            federation_id=self.federation_id,
            client_id=client.client_id,
            coordinator=self.coordinator,
        )

    def assignment(self, row: models.Assignment, place: Place) -> messages.EnvelopeCheck:
        """Checks an assignment."""

        def pairs(envelope: SignedEnvelope, signed: AssignmentManifest) -> _Pairs:
            yield from self._places(signed, place)
            for field, value in columns.of_assignment(signed).items():
                yield field, getattr(row, field), value

        return _check("assignment", place.phase, row.envelope, AssignmentManifest, self.coordinator, pairs)

    def decline(
        self, session: Session, row: models.Assignment, place: Place, signing_key: bytes
    ) -> messages.EnvelopeCheck:
        """Checks the decline of an assignment that its client would not do."""
        keys = _MemberKeys(self, session, row.client_id, signing_key, lambda: self._times(row))

        def pairs(envelope: SignedEnvelope, signed: DeclineManifest) -> _Pairs:
            yield "federation_id", self.federation_id, signed.federation_id
            asked = parsed(row.envelope)
            yield from _bound(row.envelope, AssignmentManifest, signed, bindings.DECLINE)
            if signed.assignment and asked is not None:
                yield "assignment", envelope_digest(asked), signed.assignment
            for field, value in columns.of_decline(signed).items():
                yield field, getattr(row, field), value

        return _check("decline", place.phase, row.decline or b"", DeclineManifest, keys, pairs)

    def consent(self, session: Session, row: models.Consent, spec: str, signing_key: bytes) -> messages.EnvelopeCheck:
        """Checks the answer of a client to a run whose specification has this digest."""
        keys = _MemberKeys(self, session, row.client_id, signing_key, lambda: (row.at, row.at))

        def pairs(envelope: SignedEnvelope, signed: ConsentManifest) -> _Pairs:
            yield "federation_id", self.federation_id, signed.federation_id
            yield "spec", spec, signed.spec
            for field, value in columns.of_consent(signed).items():
                yield field, getattr(row, field), value

        return _check("consent", 0, row.envelope, ConsentManifest, keys, pairs)

    def reply(
        self, session: Session, row: models.Reply, place: Place, signing_key: bytes
    ) -> list[messages.EnvelopeCheck]:
        """Checks a reply and its receipt; `signing_key` is the client's public key, raw."""
        if signing_key == UNSIGNED:
            words = "its client is simulated, and signs nothing"
            return [messages.EnvelopeCheck(kind="reply", phase=place.phase, reason="unsigned", message=words)]
        # A second reply to a fulfilled assignment is kept as evidence, and got no receipt.
        receipts = [self._receipt(row, place)] if row.accepted or row.receipt else []
        return [self._reply(session, row, place, signing_key), *receipts]

    def _times(self, row: models.Assignment, receipt: bytes = b"") -> tuple[datetime, datetime]:
        """When something was asked, and when its reply was received; the former also for what got no receipt."""
        asked = self.coordinator.unseal(parsed(row.envelope) or SignedEnvelope(), AssignmentManifest)
        if not receipt:
            return moment(asked.created), moment(asked.created)
        said = self.coordinator.unseal(parsed(receipt) or SignedEnvelope(), ReceiptManifest)
        return moment(asked.created), moment(said.created)

    def _reply(self, session: Session, row: models.Reply, place: Place, signing_key: bytes) -> messages.EnvelopeCheck:
        times = partial(self._times, row.assignment, row.receipt)
        keys = _MemberKeys(self, session, row.client_id, signing_key, times)

        def pairs(envelope: SignedEnvelope, signed: ReplyManifest) -> _Pairs:
            yield "envelope", row.envelope_digest, envelope_digest(envelope)
            yield from self._places(signed, place)
            yield from _bound(row.assignment.envelope, AssignmentManifest, signed, bindings.REPLY)
            signed_columns = columns.of_reply(signed, stored=row.accepted, counted=row.accepted or bool(row.receipt))
            for field, value in signed_columns.items():
                yield field, getattr(row, field), value

        return _check("reply", place.phase, row.envelope, ReplyManifest, keys, pairs)

    def _receipt(self, row: models.Reply, place: Place) -> messages.EnvelopeCheck:
        def pairs(envelope: SignedEnvelope, signed: ReceiptManifest) -> _Pairs:
            yield from self._places(signed, place)
            yield "envelope", row.envelope_digest, signed.envelope
            yield from _bound(row.envelope, ReplyManifest, signed, bindings.RECEIPT)
            for field, value in columns.of_receipt(signed).items():
                yield field, getattr(row, field), value

        return _check("receipt", place.phase, row.receipt, ReceiptManifest, self.coordinator, pairs)

    def step(self, session: Session, row: models.Round) -> messages.EnvelopeCheck:
        """Checks the step of a round."""

        def pairs(envelope: SignedEnvelope, signed: StepManifest) -> _Pairs:
            yield "federation_id", self.federation_id, signed.federation_id
            yield "run_id", row.run_id, signed.run_id
            yield "round", row.number, signed.round
            for field, value in columns.of_step(signed).items():
                yield field, getattr(row, field), value
            named = {*signed.replies, *signed.consulted}
            known = session.scalars(
                select(models.Reply.envelope_digest)
                .join(models.Assignment)
                .join(models.Phase)
                .join(models.Round)
                .where(models.Round.run_id == row.run_id, models.Reply.envelope_digest.in_(named))
            )
            yield "replies", sorted(set(known)), sorted(named)

        return _check("step", 0, row.step or b"", StepManifest, self.coordinator, pairs)

    def of_round(self, session: Session, round_id: int) -> dict[str, list[tuple[str, messages.EnvelopeCheck]]]:
        """Checks the envelopes of a round, by client, in the order of the phases: assignment, decline, reply, receipt.

        With each comes the digest of the reply that it belongs to; "" with an assignment or a decline.
        """
        rows = session.execute(
            select(models.Assignment, models.Reply, models.Client.signing_key, models.Phase.number, models.Round)
            .join(models.Phase, models.Phase.phase_id == models.Assignment.phase_id)
            .join(models.Round, models.Round.round_id == models.Phase.round_id)
            .join(models.Client, models.Client.client_id == models.Assignment.client_id)
            .outerjoin(models.Reply, models.Reply.assignment_id == models.Assignment.assignment_id)
            .where(models.Phase.round_id == round_id)
            .order_by(models.Phase.number, models.Reply.reply_id)
        )
        found: dict[str, list[tuple[str, messages.EnvelopeCheck]]] = {}
        seen: set[str] = set()
        for assignment, reply, key, phase, item in rows:
            place = Place(item.run_id, item.number, phase)
            checks = found.setdefault(assignment.client_id, [])
            if assignment.assignment_id not in seen and key != UNSIGNED:
                seen.add(assignment.assignment_id)
                checks.append(("", self.assignment(assignment, place)))
                if assignment.state is AssignmentState.DECLINED:
                    checks.append(("", self.decline(session, assignment, place, key)))
            if reply is not None:
                checks += [(reply.envelope_digest, check) for check in self.reply(session, reply, place, key)]
        return found

    def _places(self, signed: AssignmentManifest | ReplyManifest | ReceiptManifest, place: Place) -> _Pairs:
        yield "federation_id", self.federation_id, signed.federation_id
        yield "run_id", place.run_id, signed.run_id
        yield "round", place.round, signed.round
        yield "phase", place.phase, signed.phase


@dataclass(frozen=True)
class _MemberKeys:
    """Which keys of a member count for what it sent; `times` gives when it was asked for and when it was received."""

    verifier: Verifier
    session: Session
    client_id: str
    present: bytes
    times: Callable[[], tuple[datetime, datetime]]

    def unseal(self, envelope: SignedEnvelope, kind: type[ManifestT]) -> ManifestT:
        """As `KeyChain.unseal`."""
        try:
            keys = member_keys(
                self.session,
                self.client_id,
                self.present,
                envelope,
                federation_id=self.verifier.federation_id,
                coordinator=self.verifier.coordinator,
            )
        except ValueError:  # of the present key, which was edited
            return unseal(envelope, kind, None)
        manifest = unseal(envelope, kind, keys.signer(envelope))
        if keys.former_of(envelope) is not None:
            keys.must_count(envelope, *self.times())
        return manifest


def parsed(data: bytes) -> SignedEnvelope | None:
    """An envelope from its recorded bytes; None if they are not one."""
    try:
        return SignedEnvelope.FromString(data)
    except DecodeError:
        return None


def _check(
    kind: str,
    phase: int,
    data: bytes,
    manifest: type[ManifestT],
    keys: "KeyChain | _MemberKeys",
    pairs: Callable[[SignedEnvelope, ManifestT], _Pairs],
) -> messages.EnvelopeCheck:
    found = messages.EnvelopeCheck(kind=kind, phase=phase)
    envelope = parsed(data)
    if envelope is None:
        found.reason, found.message = "manifest", "the recorded bytes are not a signed envelope"
        return found
    found.key_id = envelope.key_id.hex()
    try:
        signed = keys.unseal(envelope, manifest)
    except Refusal as refusal:
        words = {"signature": "the signature does not fit the recorded bytes"}
        found.reason, found.message = refusal.reason, words.get(refusal.reason, refusal.message)
        return found
    for field, recorded, said in pairs(envelope, signed):
        if recorded != said:
            found.reason = f"mismatch:{field}"
            found.message = f"the record says {_short(recorded)}, signed is {_short(said)}"
            return found
    found.verified = True
    return found


def _bound(data: bytes, kind: type[ManifestT], answer: Message, fields: Sequence[str]) -> _Pairs:
    """The fields that an answer repeats of the recorded message that it answers."""
    envelope = parsed(data)
    try:
        original = kind.FromString(b"" if envelope is None else envelope.manifest)
    except DecodeError:
        original = kind()
    for field in fields:
        yield field, getattr(original, field), getattr(answer, field)


def _short(value: Any) -> str:
    words = str(value) or "nothing"
    return words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 1] + "…"
