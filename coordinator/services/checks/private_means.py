"""The means of a private evaluation on record, computed again from the signed replies and what members sent."""

from collections.abc import Sequence

from blake3 import blake3
from sqlalchemy.orm import Session

from coordinator.rounds.conversation import bare_context
from coordinator.rounds.fleets.base import RunFacts
from coordinator.rounds.runs.private import bare_private
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from federation.aggregation.phases import PhaseReply
from federation.aggregation.secure.evaluation import Means
from federation.aggregation.secure.repetition import UnverifiedSession, verify_evaluation
from federation.record.exchange import OpenedExchange
from federation.record.rounds import OpenedRound
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.vectors import model_layout, update_rows
from federation.work.base import Shape, Work
from federation.work.registry import decode, decode_statement
from federation.work.secure.ready import Ready
from federation.work.secure.stage import CIPHERTEXTS
from storage.blobs import BlobStore
from storage.models import Client, Model, Round


def private_means_of(
    session: Session, checks: EnvelopeChecks, blobs: BlobStore, row: Round, model: str, opened: OpenedRound
) -> Means | None:
    """The means over the members of a round's evaluation; None if none follow from the replies.

    Args:
        session: reads the record.
        checks: of the federation.
        blobs: has what members sent, as far as it is kept.
        row: the round.
        model: the digest of the model that was evaluated.
        opened: the round; its envelopes are verified.

    Raises:
        BlobMissing: something that members sent, or the model, is not kept.
        BlobCorrupt: its bytes have another digest.
    """
    run, layout = row.run, model_layout(blobs.local(model))
    exchanges = [exchange for phase in opened.phases if phase.evaluates for exchange in phase.exchanges]
    shape = Shape(layout, tuple(run.objectives), tuple(run.objectives))
    replies: list[PhaseReply] = []
    asked: dict[str, Work] = {}
    try:
        for exchange in exchanges:
            order = exchange.assignment.manifest
            for answer in exchange.accepted:
                replies.append(_reply(exchange, blobs))
                if order.kind == Ready.name:
                    asked[answer.reply.digest] = decode(order.kind, order.work, shape)
        terms = [work.agreed for work in asked.values() if isinstance(work, Ready)]
        invited = {member.client_id: member.key_id for agreed in terms for member in agreed.invited}
        known = {name: key for name, key in invited.items() if key in _keys(session, checks, name)}
        parameters = session.get_one(Model, run.initial_model).parameters
        spec = RunSpec.parse(run.spec)
        facts = RunFacts(
            run.run_id,
            spec,
            run.spec,
            run.spec_digest,
            parameters,
            tuple(run.objectives),
            run.metrics,
            run.submitted_by,
        )
        private = bare_private(facts, checks.federation_id, model, known)
        context = bare_context(facts, layout, row.number, {}, private)
        return verify_evaluation(spec, facts.evaluation, context, replies, asked)
    except (UnverifiedSession, ValueError):
        return None


def _reply(exchange: OpenedExchange, blobs: BlobStore) -> PhaseReply:
    """An accepted reply with the rows of its payload; without ciphertexts, which are not kept."""
    (answer,) = exchange.accepted
    manifest, order = answer.reply.manifest, exchange.assignment.manifest
    names = tuple(row.name for row in manifest.rows)
    kept = manifest.payload and names != (CIPHERTEXTS,)
    return PhaseReply(
        client_id=manifest.client_id,
        samples=manifest.samples,
        losses=dict(manifest.losses),
        metrics=dict(manifest.metrics),
        rows=tuple(update_rows(blobs.local(manifest.payload)).values()) if kept else (),
        names=names,
        objectives=tuple(order.objectives),
        envelope=answer.reply.digest,
        payload=manifest.payload,
        statement=decode_statement(order.kind, manifest.statement),
        signed=answer.reply.envelope.SerializeToString(deterministic=True),
        signed_payload=manifest.payload,
    )


def _keys(session: Session, checks: EnvelopeChecks, name: str) -> Sequence[bytes]:
    """The ids of all signing keys of a client; none if they are not known."""
    client = session.get(Client, name)
    try:
        return [] if client is None else [blake3(key).digest() for key in checks.keys(session, client).raw]
    except Refusal:
        return []
