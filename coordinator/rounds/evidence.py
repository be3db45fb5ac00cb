"""Evidence: what was signed, against what the database says of it.

Between the acceptance of a reply and the step, the database keeps the facts of the reply, and they could be edited
there. So nothing enters a step from a column. It comes from the envelope that the client signed, checked against the
assignment and the receipt that the coordinator signed. A column that differs from them is named.

This does not find a reply whose row was removed and whose assignment was marked as expired. Its client has the receipt.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError, Message

from federation.envelope import ManifestT, envelope_digest, seal, unseal
from federation.refusals import Refusal
from federation.v1.common_pb2 import (
    AssignmentManifest,
    ReceiptManifest,
    SignedEnvelope,
    StepManifest,
    UpdateManifest,
)
from storage import models
from storage.records import memory_digest

REMEMBERED = 20_000  # envelopes; some 200 bytes each
# What an update repeats of its assignment, field by field.
BOUND_FIELDS = ("federation_id", "run_id", "round", "attempt", "phase", "client_id", "base_model", "spec", "task")


class RecordError(Exception):
    """A row of the database differs from the signed envelope that it belongs to.

    Attributes:
        table: of the row.
        row: its id.
        field: that differs.
    """

    def __init__(self, table: str, row: object, field: str, message: str) -> None:
        super().__init__(f"{table} {row}: {field}: {message}"[:400])
        self.table = table
        self.row = row
        self.field = field


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


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What every assignment of a phase says.

    Attributes:
        federation_id: the federation.
        run_id: the run.
        spec: the digest of the run's specification.
        task: the run's.
        round: from 0.
        attempt: at the round, from 0.
        phase: from 0.
        base_model: the digest of the model that the work starts from.
        kind: of the work.
    """

    federation_id: str
    run_id: str
    spec: str
    task: str
    round: int
    attempt: int
    phase: int
    base_model: str
    kind: str


@dataclass(frozen=True)
class Evidence:
    """Turns rows of the record into what was signed.

    Attributes:
        key: the coordinator's public key.
        memory: of signatures.
    """

    key: Ed25519PublicKey
    memory: SignatureMemory

    def order(self, assignment: models.Assignment, expected: Expected) -> AssignmentManifest:
        """The signed assignment of a row.

        Raises:
            RecordError: its signature does not hold, or it is not of this phase, or the row differs from it.
        """
        row = ("assignments", assignment.assignment_id)
        order = self._open(row, "envelope", assignment.envelope, AssignmentManifest, self.key)
        for item in fields(expected):
            _same(row, f"envelope ({item.name})", getattr(expected, item.name), getattr(order, item.name))
        signed: Mapping[str, Any] = {
            "assignment_id": order.assignment_id,
            "client_id": order.client_id,
            "base_model": order.base_model,
            "objectives": list(order.objectives),
        }
        for name, value in signed.items():
            _same(row, name, getattr(assignment, name), value)
        inputs = [(one.name, one.digest, one.size) for one in assignment.inputs]
        _same(row, "inputs", inputs, [(one.name, one.digest, one.size) for one in order.inputs])
        return order

    def reply(self, update: models.Update, order: AssignmentManifest, client: models.Client) -> UpdateManifest:
        """The signed reply of a row that counts as accepted.

        Args:
            update: the row.
            order: the signed assignment that it fulfils.
            client: the row of the client that it was issued to.

        Raises:
            RecordError: the signature of the client or of the receipt does not hold, they belong to another assignment,
                the receipt says refused, or the row differs from them.
        """
        row = ("updates", update.update_id)
        key = Ed25519PublicKey.from_public_bytes(client.signing_key)
        manifest = self._open(row, "envelope", update.envelope, UpdateManifest, key)
        name = envelope_digest(SignedEnvelope.FromString(update.envelope))
        _same(row, "envelope_digest", update.envelope_digest, name)
        _same(row, "envelope (assignment_id)", order.assignment_id, manifest.assignment_id)
        for field in BOUND_FIELDS:
            _same(row, f"envelope ({field})", getattr(order, field), getattr(manifest, field))
        _same(row, "envelope (rows)", list(order.rows), list(manifest.rows))
        receipt = self._open(row, "receipt", update.receipt, ReceiptManifest, self.key)
        _same(row, "receipt (envelope)", name, receipt.envelope)
        _same(row, "receipt (accepted)", True, receipt.accepted)
        signed: Mapping[str, Any] = {
            "assignment_id": manifest.assignment_id,
            "client_id": manifest.client_id,
            "payload": manifest.payload,
            "payload_bytes": manifest.payload_bytes,
            "samples": manifest.samples,
            "losses": dict(manifest.losses),
            "metrics": dict(manifest.metrics),
        }
        for field, value in signed.items():
            _same(row, field, getattr(update, field), value)
        return manifest

    def state(self, run: models.Run, before: models.Round | None, base_model: str | None) -> dict[str, Any]:
        """What the run remembers of earlier rounds: that which the newest signed step left behind.

        Args:
            run: the row.
            before: the row of the newest round with a step; None before the first.
            base_model: the digest of the model that the round under way starts from; None before it begins.

        Raises:
            RecordError: the signature of the step does not hold, it is another round's, or the model or the state is
                not the one that it made.
        """
        if before is None:
            _same(("runs", run.run_id), "model", run.model, run.initial_model)
            _same(("runs", run.run_id), "state_data", run.state_data, {})
            if base_model is not None:
                _same(("runs", run.run_id), "base model of the first round", base_model, run.initial_model)
            return {}
        row = ("rounds", before.round_id)
        step = self._open(row, "step", before.step or b"", StepManifest, self.key)
        _same(row, "step (run_id)", run.run_id, step.run_id)
        _same(row, "step (round)", before.number, step.round)
        _same(row, "result_model", before.result_model, step.result_model)
        _same(("runs", run.run_id), "model", run.model, step.result_model)
        if base_model is not None:
            _same(("runs", run.run_id), "base model of the round under way", base_model, step.result_model)
        _same(("runs", run.run_id), "state_data", memory_digest(run.state_data), step.state_after)
        return dict(run.state_data)

    def _open(
        self, row: tuple[str, object], field: str, data: bytes, kind: type[ManifestT], key: Ed25519PublicKey
    ) -> ManifestT:
        try:
            return self.memory.open(SignedEnvelope.FromString(data), kind, key)
        except (Refusal, DecodeError) as error:
            why = error.message if isinstance(error, Refusal) else "it is no signed envelope"
            raise RecordError(*row, field, why) from error


def _same(row: tuple[str, object], field: str, recorded: Any, signed: Any) -> None:
    if recorded != signed:
        raise RecordError(*row, field, f"the record says {_short(recorded)}, signed is {_short(signed)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"
