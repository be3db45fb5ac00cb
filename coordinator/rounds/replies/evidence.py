"""Evidence: replies and memory as they were signed, compared with the columns of the database, which could be edited.

Nothing enters a step from a column: it comes from the envelope that the client signed, checked against the assignment
and the receipt that the coordinator signed. An error names the column that differs. A reply whose
row was removed and whose assignment was marked as expired is not found here. Its client has the receipt.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError, Message
from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from coordinator.rounds.export import exchange_of, parsed
from coordinator.rounds.replies import signed_columns
from coordinator.rounds.replies.revoked import REVOKED
from coordinator.signing_keys import Signing
from federation import digests
from federation.aggregation.phases import PhaseReply
from federation.errors import Error
from federation.record.exchange import Mismatch, Opened, OpenedExchange, Signers, Unbound, open_exchange, opened
from federation.refusals import Refusal
from federation.spec.sharing import BUFFERS
from federation.trust.envelope import ManifestT, sign, verify
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import (
    AssignmentManifest,
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

REMEMBERED = 10_000  # envelopes; some 200 bytes each


class RecordError(Error):
    """A row of the database differs from the signed envelope that it belongs to; the message names the field."""

    def __init__(self, table: str, row: object, field: str, message: str) -> None:
        super().__init__(f"{table} {row}: {field}: {message}"[:400])


class SignatureMemory:
    """The signed envelopes that this process has verified or signed itself, by their digests. For several threads."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def note(self, envelope: SignedEnvelope, kind: type[Message], key: Ed25519PublicKey) -> None:
        """Remembers an envelope whose signature by `key` holds."""
        entry = _entry(envelope, kind, key)
        with self._lock:
            self._known[entry] = None
            self._known.move_to_end(entry)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)

    def sign(self, manifest: ManifestT, key: Ed25519PrivateKey) -> SignedEnvelope:
        """A manifest in an envelope signed by `key`, which is remembered."""
        envelope = sign(manifest, key)
        self.note(envelope, type(manifest), key.public_key())
        return envelope

    def open(self, envelope: SignedEnvelope, kind: type[ManifestT], key: Ed25519PublicKey) -> ManifestT:
        """The manifest of an envelope that `key` signed; the signature is verified unless it was before.

        Raises:
            Refusal: `key-unknown`, `signature` or `manifest`.
        """
        entry = _entry(envelope, kind, key)
        with self._lock:
            if entry in self._known:
                self._known.move_to_end(entry)
                return kind.FromString(envelope.manifest)
        # Protocol, order of checks: verified before it is remembered: an entry of this memory stands for a signature
        # that holds.
        manifest = verify(envelope, kind, key)
        self.note(envelope, kind, key)
        return manifest


def _entry(envelope: SignedEnvelope, kind: type[Message], key: Ed25519PublicKey) -> bytes:
    """The hash of an envelope together with the kind of its manifest and the key that signed it."""
    named = kind.__name__.encode() + b"\0" + key.public_bytes_raw()
    return hashlib.sha256(named + envelope.SerializeToString(deterministic=True)).digest()


@dataclass(frozen=True)
class Evidence:
    """Reads rows of the record as they were signed."""

    signing: Signing  # the coordinator's keys
    memory: SignatureMemory

    def replies(
        self, database: Database, blobs: BlobStore, phase_id: int, expected: Mapping[str, object]
    ) -> list[PhaseReply]:
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
            keys = {client.client_id: self._keys(session, reply, client) for reply, _, client in accepted}
            unread = set(session.scalars(select(Assignment.assignment_id).where(*fulfilled)))
        signers = self._signers(keys)
        replies = []
        for reply, assignment, _ in accepted:
            name = assignment.assignment_id
            # Verify, 3: two accepted replies to one assignment: the coordinator could choose the update.
            if name not in unread:
                raise RecordError("replies", reply.reply_id, "accepted", f"assignment {name} has no further reply")
            unread.remove(name)
            known = {**expected, "assignment_id": name, "client_id": assignment.client_id}
            exchange = open_exchange(exchange_of(assignment, [reply]), signers, known)
            _check_signed(exchange, assignment, reply)
            # Protocol, order of checks: left out after its row was compared: an edited row must be found, also of a
            # member that is gone.
            if assignment.reason != REVOKED:
                (answer,) = exchange.answers
                replies.append(_reply(reply, exchange.assignment.manifest, answer.reply.manifest, blobs))
        # Protocol, order of checks: a receipt says `accepted`, and the reply is gone: the step would silently be made
        # without it.
        if unread:
            raise RecordError("assignments", min(unread), "state", "FULFILLED, and there is no accepted reply")
        return replies

    def state(self, run: models.Run, before: models.Round | None, base_model: str | None) -> dict[str, Any]:
        """The run's memory of earlier rounds, as the newest signed step left it.

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
        step = self._step(before)
        _same(row, "step (run_id)", run.run_id, step.run_id)
        _same(row, "step (round)", before.number, step.round)
        # Protocol, order of checks: from the signed step, never from a column: an edited model would be the base of the
        # next round.
        _same(row, "result_model", before.result_model, step.result_model)
        _same(("runs", run.run_id), "model", run.model, step.result_model)
        if base_model is not None:
            _same(("runs", run.run_id), "base model of the round under way", base_model, step.result_model)
        _same(("runs", run.run_id), "state_data", memory_digest(run.state_data), step.state_after)
        return dict(run.state_data)

    def _step(self, row: models.Round) -> StepManifest:
        """The signed step of a round."""
        envelope, signers = parsed(row.step or b"") or SignedEnvelope(), self._signers({})
        step = opened("step", "the step", envelope, StepManifest, signers.of_coordinator)
        _check_column(("rounds", row.round_id), "step", step)
        return step.manifest

    def _signers(self, keys: Mapping[str, KeyChain]) -> Signers:
        return Signers(
            coordinator=self.signing.chain, client=lambda client_id, _: keys[client_id], verify=self.memory.open
        )

    def _keys(self, session: Session, reply: models.Reply, client: Client) -> KeyChain:
        """The keys of a client that a reply could be signed with."""
        try:
            signed = SignedEnvelope.FromString(reply.envelope)
            return self.signing.keys_of(session, client.client_id, client.signing_key, signed)
        except (Refusal, DecodeError, ValueError) as error:
            why = error.message if isinstance(error, Refusal) else "it is no signed envelope"
            raise RecordError("replies", reply.reply_id, "envelope", why) from error


def _check_signed(exchange: OpenedExchange, assignment: Assignment, reply: models.Reply) -> None:
    """Raises RecordError unless the rows of an assignment and of its accepted reply repeat what was signed."""
    row: tuple[str, object] = ("assignments", assignment.assignment_id)
    signed = signed_columns.of_assignment(exchange.assignment.manifest)
    _check_column(row, "envelope", exchange.assignment, signed)
    for name, value in signed.items():
        _same(row, name, getattr(assignment, name), value)
    inputs = [{"name": item.name, "digest": item.digest, "size": item.size} for item in assignment.inputs]
    _same(row, "inputs", inputs, signed_columns.of_inputs(exchange.assignment.manifest))
    (answer,) = exchange.answers
    row = ("replies", reply.reply_id)
    _check_column(row, "envelope", answer.reply)
    _same(row, "envelope_digest", reply.envelope_digest, answer.reply.digest)
    if answer.receipt is None:
        raise RecordError(*row, "receipt", "there is none")
    _check_column(row, "receipt", answer.receipt)
    for name, value in signed_columns.of_receipt(answer.receipt.manifest).items():
        _same(row, f"receipt ({name})", getattr(reply, name), value)
    for name, value in signed_columns.of_reply(answer.reply.manifest, stored=True).items():
        _same(row, name, getattr(reply, name), value)
    if name := signed_columns.not_kept(answer.reply.manifest):  # a reply with such a number is refused
        raise RecordError(*row, name, "what was signed is too large for the record, or not finite")


def _check_column(row: tuple[str, object], column: str, envelope: Opened[Any], named: Container[str] = ()) -> None:
    """Raises RecordError for the problem of an envelope, with the field; those in `named` are columns, too."""
    problem = envelope.problem
    if isinstance(problem, Mismatch):
        field = problem.field if problem.field in named else f"{column} ({problem.field})"
        _same(row, field, problem.expected, problem.found)
    if not envelope.envelope.ByteSize():
        raise RecordError(*row, column, "it is no signed envelope")
    if problem is not None:
        raise RecordError(*row, column, envelope.words if isinstance(problem, Unbound) else problem.message)


def _reply(recorded: models.Reply, order: AssignmentManifest, manifest: ReplyManifest, blobs: BlobStore) -> PhaseReply:
    """A reply whose envelope was verified; the bytes of its payload are verified here."""
    try:
        statement = decode_statement(order.kind, manifest.statement)
        if manifest.payload:
            digests.parse(manifest.payload)
    except ValueError as error:  # a WorkError is one
        raise RecordError("replies", recorded.reply_id, "envelope", str(error)) from error
    rows = update_rows(blobs.local(manifest.payload)) if manifest.payload else {}
    buffers = rows.pop(BUFFERS, None)
    return PhaseReply(
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
        statement=statement,
        signed=recorded.envelope,
        signed_payload=manifest.payload,
    )


def _same(row: tuple[str, object], field: str, recorded: Any, signed: Any) -> None:
    if recorded != signed:
        raise RecordError(*row, field, f"the record says {_short(recorded)}, signed is {_short(signed)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"
