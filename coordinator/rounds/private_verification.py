"""Verifies private rounds from their record: signatures, sums, weights, the model, the state, and the metrics.

All of it is computed again from what members signed. Only the time of a step, and the code that made it, are not
verified.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from coordinator.aggregation.phases import Reply, RoundContext, Step
from coordinator.aggregation.registry import algorithm
from coordinator.aggregation.secure.verify import SecureEvidence, Unverified, verify_evaluation, verify_secure_step
from coordinator.rounds.conversation import bare_context
from coordinator.rounds.manifest import read_session, step_manifest
from coordinator.rounds.private import bare_private
from coordinator.rounds.private_record import RoundRecord, RunRecord
from coordinator.rounds.record import finite
from coordinator.rounds.scores import scores_of_means
from coordinator.rounds.step import Standing, Stepped, take_step
from federation.digests import DEFAULT_ALGORITHM
from federation.envelope import envelope_digest, unseal
from federation.refusals import Refusal
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope, StepManifest, UpdateManifest
from federation.vectors import Layout, Vector, model_layout, update_rows
from federation.work.base import Shape, Work
from federation.work.peers import signed_reply
from federation.work.registry import STAGES, decode, decode_statement
from storage.blobs import BlobStore, BlobWriter

_TAKEN = ("created", "code")  # fields of a signed step that do not follow from the replies


def verify_private_run(
    record: RunRecord, rounds: Iterable[RoundRecord], blobs: BlobStore, coordinator: Ed25519PublicKey
) -> Iterator[Standing]:
    """Verifies the rounds of a run in their order, and yields where each has left the run.

    Args:
        record: of the run.
        rounds: those that made a step, in their order.
        blobs: the models, the combined vectors, and the payloads that are kept.
        coordinator: its public signing key.

    Raises:
        Unverified: a round does not follow from what was signed; the message names the round and what differs.
        BlobMissing: a model or a combined vector is not kept.
    """
    at = Standing(number=0, model=record.initial_model, state={})
    for found in rounds:
        try:
            at = verify_private_round(record, replace(at, number=found.number), found, blobs, coordinator)
        except Unverified as error:
            raise Unverified(f"round {found.number}: {error}") from error
        yield at


def verify_private_round(
    record: RunRecord, at: Standing, found: RoundRecord, blobs: BlobStore, coordinator: Ed25519PublicKey
) -> Standing:
    """Verifies one round, and the evaluation of its model where members evaluated it in a session.

    Args:
        record: of the run.
        at: where the run stands before the round.
        found: what is on record of the round.
        blobs: as of `verify_private_run`.
        coordinator: its public signing key.

    Returns:
        Where the run stands before the next round.

    Raises:
        Unverified: the round does not follow from what was signed.
        BlobMissing: a model or the combined vector is not kept.
    """
    with _signed("the step"):
        signed = unseal(SignedEnvelope.FromString(found.step), StepManifest, coordinator)
    reading = _Reading(record, blobs, at, _orders(found, coordinator))
    step, made = _stepped(reading, found, signed)
    again = step_manifest(record.run, record.federation_id, at, step, made, revoked=list(signed.revoked))
    for session, told in zip(again.secure, signed.secure, strict=True):
        session.alarms[:] = told.alarms
    for name in StepManifest.DESCRIPTOR.fields_by_name:
        if name not in _TAKEN and getattr(again, name) != getattr(signed, name):
            raise Unverified(f"the {name} of the signed step does not follow from what came before")
    if found.evaluations and "evaluated" in found.metrics:
        _verify_metrics(reading, made.result, found)
    return Standing(number=at.number + 1, model=made.model, state=made.memory.encode())


@dataclass(frozen=True)
class _Reading:
    """Reads what is on record of a round.

    Attributes:
        record: of the run.
        blobs: the models and the payloads.
        at: where the run stands before the round.
        orders: the assignments of READY, by id.
    """

    record: RunRecord
    blobs: BlobStore
    at: Standing
    orders: Mapping[str, AssignmentManifest]

    def context(self, model: str) -> RoundContext:
        """The context of a conversation about a model."""
        run, layout = self.record.run, self.layout
        keys = {name: blake3(key).digest() for name, key in self.record.keys.items()}
        private = bare_private(run, self.record.federation_id, model, keys)
        return bare_context(run, layout, self.at.number, self.at.memory.rule, private)

    @property
    def layout(self) -> Layout:
        """That of the run's models."""
        return model_layout(self.blobs.local(self.at.model))

    def replies(self, envelopes: Iterable[bytes], model: str) -> tuple[list[Reply], dict[str, Work]]:
        """The replies in envelopes, without rows where a payload is not kept; and the work of READY that was asked for.

        Raises:
            Unverified: a client did not sign its reply, or signed it for another model or round.
        """
        found: list[Reply] = []
        asked: dict[str, Work] = {}
        for envelope in envelopes:
            with _signed("a reply"):
                manifest = signed_reply(envelope, self.record.keys)
            self._must_fit(manifest, model)
            order = self.orders.get(manifest.assignment_id)
            reply = self._reply(envelope, manifest, order)
            found.append(reply)
            if order is not None:
                shape = Shape(self.layout, self.record.run.objectives, reply.objectives)
                with _signed("an assignment"):
                    asked[reply.envelope] = decode(order.kind, order.work, shape)
        return found, asked

    def _must_fit(self, manifest: UpdateManifest, model: str) -> None:
        run = self.record.run
        facts = {
            "federation_id": self.record.federation_id,
            "run_id": run.run_id,
            "round": self.at.number,
            "base_model": model,
            "spec": run.spec_digest,
            "task": run.spec.task,
        }
        for name, value in facts.items():
            if getattr(manifest, name) != value:
                raise Unverified(f"a reply of {manifest.client_id} has another {name} than the round")

    def _reply(self, envelope: bytes, manifest: UpdateManifest, order: AssignmentManifest | None) -> Reply:
        kept = bool(manifest.payload) and self.blobs.exists(manifest.payload)
        rows = update_rows(self.blobs.local(manifest.payload)) if kept else {}
        with _signed("a reply"):
            statement = decode_statement(STAGES[0], manifest.statement)
        return Reply(
            client_id=manifest.client_id,
            samples=manifest.samples,
            losses=dict(manifest.losses),
            metrics=dict(manifest.metrics),
            rows=tuple(rows.values()),
            names=tuple(rows),
            objectives=self.record.run.objectives if order is None else tuple(order.objectives),
            envelope=envelope_digest(SignedEnvelope.FromString(envelope)),
            payload=manifest.payload,
            statement=statement,
            signed=envelope,
            signed_payload=manifest.payload,
        )


def _orders(found: RoundRecord, coordinator: Ed25519PublicKey) -> dict[str, AssignmentManifest]:
    """The assignments of READY, by id."""
    with _signed("an assignment"):
        orders = [unseal(SignedEnvelope.FromString(one), AssignmentManifest, coordinator) for one in found.orders]
    return {order.assignment_id: order for order in orders}


def _stepped(reading: _Reading, found: RoundRecord, signed: StepManifest) -> tuple[Step, Stepped]:
    """The step that follows from the signed replies, and what it makes."""
    named = {*signed.updates, *signed.consulted}
    replies, asked = reading.replies(found.replies, reading.at.model)
    if missing := named - {reply.envelope for reply in replies}:
        raise Unverified(f"the reply {min(missing)} is named by the signed step and not on record")
    with _signed("the step"):
        sessions = [read_session(session) for session in signed.secure]
    evidence = SecureEvidence(
        sessions=sessions,
        replies=[reply for reply in replies if reply.envelope in named],
        asked=asked,
        combined=_combined(signed, reading.blobs),
    )
    spec = reading.record.run.spec
    rule = algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
    step = verify_secure_step(rule, spec, reading.context(reading.at.model), evidence)
    return step, take_step(spec, rule, reading.at, step, blobs=reading.blobs, new=_Digest)


def _verify_metrics(reading: _Reading, model: str, found: RoundRecord) -> None:
    """Verifies the metrics that follow from the session in which the model of a round was evaluated."""
    run = reading.record.run
    replies, asked = reading.replies(found.evaluations, model)
    means = verify_evaluation(run.spec, run.evaluation, replace(reading.context(model), state={}), replies, asked)
    scores = scores_of_means(means.metrics, means.members, run.objectives, run.metrics)
    for name, value in finite(scores).items():
        if found.metrics.get(name) != value:
            raise Unverified(f"the record says {name} = {found.metrics.get(name)}; the signed replies give {value}")


@contextmanager
def _signed(what: str) -> Iterator[None]:
    """Inside, bytes that are malformed, or that another key has signed, raise Unverified."""
    try:
        yield
    except (ValueError, Refusal, DecodeError) as error:  # a WorkError is a ValueError
        raise Unverified(f"{what}: {error}") from error


def _combined(signed: StepManifest, blobs: BlobStore) -> Vector:
    """The vector of a step, (d,)."""
    if not signed.combined:
        raise Unverified("the signed step names no combined vector")
    rows = list(update_rows(blobs.local(signed.combined)).values())
    if [row.dtype for row in rows] != ["F32"]:
        raise Unverified("the combined vector is not one row of float32")
    return rows[0].read()


class _Digest(BlobWriter):
    """Hashes what is written, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_ALGORITHM, hashed=True)

    def discard(self) -> None:
        pass

    def _append(self, data: memoryview) -> None:
        pass

    def _store(self, digest: str) -> None:
        pass
