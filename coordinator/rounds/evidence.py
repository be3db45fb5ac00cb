"""Evidence: replies and memory as they were signed, compared with the columns of the database, which could be edited.

Nothing enters a step from a column: it comes from the envelope that the client signed, checked against the assignment
and the receipt that the coordinator signed. An error names the column that differs. This does not find a reply whose
row was removed and whose assignment was marked as expired. Its client has the receipt.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError, Message
from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from coordinator.aggregation.phases import Reply
from coordinator.rounds import columns
from coordinator.rounds.revoked import REVOKED
from coordinator.signing_keys import Signing
from federation.envelope import ManifestT, envelope_digest, seal, unseal
from federation.key_chain import KeyChain, moment
from federation.record import bindings
from federation.refusals import Refusal
from federation.sharing import BUFFERS
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ReceiptManifest,
    ReplyManifest,
    SignedEnvelope,
    StepManifest,
)
from federation.vectors import update_rows
from federation.work.registry import decode_statement
from storage import models
from storage.blobs import BlobStore
from storage.database import Database
from storage.models import Assignment, Client
from storage.records import memory_digest
from storage.states import AssignmentState

REMEMBERED = 20_000  # envelopes; some 200 bytes each


class RecordError(Exception):
    """A row of the database differs from the signed envelope that it belongs to; the message names the field."""

    def __init__(self, table: str, row: object, field: str, message: str) -> None:
        super().__init__(f"{table} {row}: {field}: {message}"[:400])


class SignatureMemory:
    """The signed envelopes that this process has verified or signed itself, by their digests. For several threads."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, bytes, str], None] = OrderedDict()

    def note(self, envelope: SignedEnvelope, kind: type[Message], key: Ed25519PublicKey) -> None:
        """Remembers an envelope whose signature by `key` holds."""
        entry = (kind.__name__, key.public_bytes_raw(), envelope_digest(envelope))
        with self._lock:
            self._known[entry] = None
            self._known.move_to_end(entry)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)

    def sign(self, manifest: ManifestT, key: Ed25519PrivateKey) -> SignedEnvelope:
        """A manifest in an envelope signed by `key`, which is remembered."""
        envelope = seal(manifest, key)
        self.note(envelope, type(manifest), key.public_key())
        return envelope

    def open(self, envelope: SignedEnvelope, kind: type[ManifestT], key: Ed25519PublicKey) -> ManifestT:
        """The manifest of an envelope that `key` signed; the signature is verified unless it was before.

        Raises:
            Refusal: `key-unknown`, `signature` or `manifest`.
        """
        entry = (kind.__name__, key.public_bytes_raw(), envelope_digest(envelope))
        with self._lock:
            if entry in self._known:
                self._known.move_to_end(entry)
                return kind.FromString(envelope.manifest)
        manifest = unseal(envelope, kind, key)
        self.note(envelope, kind, key)
        return manifest


@dataclass(frozen=True)
class Evidence:
    """Reads rows of the record as they were signed."""

    signing: Signing  # the coordinator's keys
    memory: SignatureMemory

    def replies(
        self, database: Database, blobs: BlobStore, phase_id: int, expected: Mapping[str, object]
    ) -> list[Reply]:
        """The accepted replies to a phase as their members signed them; the bytes of each update are verified.

        Replies of members that were revoked before the step are checked, and left out. `expected` has the fields that
        all assignments of the phase have in common.

        Raises:
            RecordError: the record differs from what was signed.
        """
        with database.read() as session:
            accepted = session.execute(
                select(models.Reply, Assignment, Client)
                .join(Assignment, Assignment.assignment_id == models.Reply.assignment_id)
                .join(Client, Client.client_id == Assignment.client_id)
                .where(Assignment.phase_id == phase_id, models.Reply.accepted)
                .options(selectinload(Assignment.inputs))
            ).all()
            fulfilled = (Assignment.phase_id == phase_id, Assignment.state == AssignmentState.FULFILLED)
            keys = {reply.reply_id: self._keys(session, reply, client) for reply, _, client in accepted}
            unread = set(session.scalars(select(Assignment.assignment_id).where(*fulfilled)))
        replies = []
        for reply, assignment, _ in accepted:
            name = assignment.assignment_id
            if name not in unread:
                raise RecordError("replies", reply.reply_id, "accepted", f"assignment {name} has no further reply")
            unread.remove(name)
            order = self._order(assignment, expected)
            manifest = self._manifest(reply, order, keys[reply.reply_id])
            if assignment.reason == REVOKED:
                continue
            replies.append(_reply(reply, order, manifest, blobs))
        if unread:
            raise RecordError("assignments", min(unread), "state", "FULFILLED, and there is no accepted reply")
        return replies

    def _order(self, assignment: Assignment, expected: Mapping[str, object]) -> AssignmentManifest:
        """The signed assignment of a row."""
        row = ("assignments", assignment.assignment_id)
        order = self._open(row, "envelope", assignment.envelope, AssignmentManifest, self.signing.chain)
        for name, value in expected.items():
            _same(row, f"envelope ({name})", value, getattr(order, name))
        for name, value in columns.of_assignment(order).items():
            _same(row, name, getattr(assignment, name), value)
        inputs = [{"name": item.name, "digest": item.digest, "size": item.size} for item in assignment.inputs]
        _same(row, "inputs", inputs, columns.of_inputs(order))
        return order

    def _manifest(self, reply: models.Reply, order: AssignmentManifest, keys: KeyChain) -> ReplyManifest:
        """The signed reply of a row that counts as accepted, to a signed assignment of the client."""
        row = ("replies", reply.reply_id)
        manifest = self._open(row, "envelope", reply.envelope, ReplyManifest, keys)
        envelope = SignedEnvelope.FromString(reply.envelope)
        name = envelope_digest(envelope)
        _same(row, "envelope_digest", reply.envelope_digest, name)
        for field in bindings.REPLY:
            _same(row, f"envelope ({field})", getattr(order, field), getattr(manifest, field))
        receipt = self._open(row, "receipt", reply.receipt, ReceiptManifest, self.signing.chain)
        try:
            keys.must_count(envelope, moment(order.created), moment(receipt.created))
        except Refusal as error:
            raise RecordError(*row, "envelope", error.message) from error
        _same(row, "receipt (envelope)", name, receipt.envelope)
        for field in bindings.RECEIPT:
            _same(row, f"receipt ({field})", getattr(manifest, field), getattr(receipt, field))
        for field, value in columns.of_receipt(receipt).items():
            _same(row, f"receipt ({field})", getattr(reply, field), value)
        for field, value in columns.of_reply(manifest, stored=True).items():
            _same(row, field, getattr(reply, field), value)
        return manifest

    def state(self, run: models.Run, before: models.Round | None, base_model: str | None) -> dict[str, Any]:
        """What a run remembers of earlier rounds, as the newest signed step left it.

        That step is in the row `before`, None before the first. `base_model` is the digest of the model that the round
        under way starts from; None before it begins.

        Raises:
            RecordError: the step is not signed or of another round, or it did not make this model or state.
        """
        if before is None:
            _same(("runs", run.run_id), "model", run.model, run.initial_model)
            _same(("runs", run.run_id), "state_data", run.state_data, {})
            if base_model is not None:
                _same(("runs", run.run_id), "base model of the first round", base_model, run.initial_model)
            return {}
        row = ("rounds", before.round_id)
        step = self._open(row, "step", before.step or b"", StepManifest, self.signing.chain)
        _same(row, "step (run_id)", run.run_id, step.run_id)
        _same(row, "step (round)", before.number, step.round)
        _same(row, "result_model", before.result_model, step.result_model)
        _same(("runs", run.run_id), "model", run.model, step.result_model)
        if base_model is not None:
            _same(("runs", run.run_id), "base model of the round under way", base_model, step.result_model)
        _same(("runs", run.run_id), "state_data", memory_digest(run.state_data), step.state_after)
        return dict(run.state_data)

    def _keys(self, session: Session, reply: models.Reply, client: Client) -> KeyChain:
        """The keys of a client that a reply could be signed with."""
        try:
            signed = SignedEnvelope.FromString(reply.envelope)
            return self.signing.keys_of(session, client.client_id, client.signing_key, signed)
        except (Refusal, DecodeError, ValueError) as error:
            why = error.message if isinstance(error, Refusal) else "it is no signed envelope"
            raise RecordError("replies", reply.reply_id, "envelope", why) from error

    def _open(
        self, row: tuple[str, object], field: str, data: bytes, kind: type[ManifestT], keys: KeyChain
    ) -> ManifestT:
        try:
            envelope = SignedEnvelope.FromString(data)
            manifest = self.memory.open(envelope, kind, keys.signer(envelope))
            if keys is self.signing.chain:
                keys.must_have_made(envelope, manifest)
            return manifest
        except (Refusal, DecodeError) as error:
            why = error.message if isinstance(error, Refusal) else "it is no signed envelope"
            raise RecordError(*row, field, why) from error


def _reply(recorded: models.Reply, order: AssignmentManifest, manifest: ReplyManifest, blobs: BlobStore) -> Reply:
    """A reply whose envelope was verified; the bytes of its payload are verified here."""
    rows = update_rows(blobs.local(manifest.payload)) if manifest.payload else {}
    buffers = rows.pop(BUFFERS, None)
    return Reply(
        client_id=manifest.client_id,
        samples=manifest.samples,
        losses=dict(manifest.losses),
        metrics=dict(manifest.metrics),
        rows=tuple(rows.values()),
        names=tuple(rows),
        buffers=buffers,
        objectives=tuple(order.objectives),
        envelope=recorded.envelope_digest,
        payload=manifest.payload,
        statement=decode_statement(order.kind, manifest.statement),
        signed=recorded.envelope,
        signed_payload=manifest.payload,
    )


def _same(row: tuple[str, object], field: str, recorded: Any, signed: Any) -> None:
    if recorded != signed:
        raise RecordError(*row, field, f"the record says {_short(recorded)}, signed is {_short(signed)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"
