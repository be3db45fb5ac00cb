"""Private rounds: the conversation with the members' shares and masked vectors is repeated."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blake3 import blake3

from federation.aggregation.metrics.replayed_step import Absent
from federation.aggregation.phases import PhaseReply, PrivateSetting, Record, RoundContext, Step
from federation.aggregation.secure.evaluation import Means
from federation.aggregation.secure.repetition import (
    SecureEvidence,
    UnverifiedSession,
    verify_description,
    verify_evaluation,
    verify_secure_step,
)
from federation.record.bundle import BlobAbsent, has_unknown_fields
from federation.record.rounds import OpenedRound
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import Unshared
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import ResultManifest, SecureSession, StepManifest
from federation.v1.secure_pb2 import SecureTerms
from federation.work.base import Origin, Shape, Work, WorkError
from federation.work.registry import STAGES, decode, encode
from federation.work.secure.orders import order_problems
from federation.work.secure.ready import Ready
from federation.work.secure.stage import CIPHERTEXTS
from federation.work.secure.terms import SessionTerms
from federation.work.secure.wire import read_terms
from verification.errors import VerificationError
from verification.recorded_run import RecordedRun
from verification.replay import check_document, check_result, recorded_reply, round_context
from verification.signed import SignedReply, SignedRound


def refusable_orders(spec: RunSpec, opened: OpenedRound) -> Iterator[str]:
    """Describes orders of a private round that its members should have refused, in any attempt; none of open rounds."""
    if spec.privacy.secure == "off":
        return
    exchanges = list(opened.exchanges)
    orders = [exchange.assignment.manifest for exchange in exchanges if exchange.assignment.is_signed]
    answers = [answer.reply for exchange in exchanges for answer in exchange.accepted]
    yield from order_problems(spec, orders, [reply.manifest for reply in answers if reply.is_signed])


def private_step(run: RecordedRun, signed: SignedRound, step: StepManifest, state: Mapping[str, Any]) -> Step:
    """The step of a private round; arguments and errors are those of `open_step`."""
    rows = list(run.blobs.rows(step.combined).values())
    if len(rows) != 1 or rows[0].dtype != "F32":
        raise VerificationError("the signed step names no combined vector of one row")
    for order in signed.asked.values():
        # Verify, 14: vectors of a session have the same rows; a member with fewer objectives would add to the wrong
        # ones.
        if tuple(order.objectives) != run.objectives:
            raise VerificationError(f"{order.client_id} was asked, and does not serve all objectives")
    named = {*step.replies, *step.consulted}
    entered = [reply for reply in signed.replies.values() if reply.envelope in named]
    shape = _shape(run, step.base_model)
    replies, asked = _stages(run, entered, shape)
    try:
        sessions = [read_session(session, shape) for session in step.secure]
    except ValueError as error:  # a WorkError is one
        raise VerificationError(f"a session of the signed step: {error}") from error
    evidence = SecureEvidence(
        sessions=sessions, replies=replies, asked=asked, combined=rows[0].read(), inputs=_inputs(entered)
    )
    context = _context(run, step.round, step.base_model, state, [session.agreed for session in sessions])
    try:
        return verify_secure_step(run.rule, run.spec, context, evidence)
    except UnverifiedSession as error:
        raise VerificationError(str(error)) from error


def private_means(run: RecordedRun, signed: SignedRound, number: int, model: str) -> Means:
    """The means over the members of a private evaluation.

    Args:
        run: the run.
        signed: its round.
        number: of the round.
        model: the digest of the evaluated model.

    Raises:
        BlobAbsent: the payloads, or the model, are not kept.
        VerificationError: no means follow from the replies.
    """
    accepted = list(signed.evaluations.values())
    replies, asked = _stages(run, accepted, _shape(run, model))
    context = _context(run, number, model, {}, [work.agreed for work in asked.values() if isinstance(work, Ready)])
    try:
        return verify_evaluation(run.spec, run.evaluation, context, replies, asked, _inputs(accepted))
    except UnverifiedSession as error:
        raise VerificationError(f"the evaluation: {error}") from error


def check_described(
    run: RecordedRun, signed: SignedRound, stated: ResultManifest, document: bytes, gone: Collection[str]
) -> int:
    """Checks the signed result of a round that describes data, in its form; arguments and errors as `check_result`."""
    if run.spec.privacy.secure == "off":
        return check_result(run, signed, stated, document, gone)
    return check_private_result(run, signed, stated, document)


def check_private_result(run: RecordedRun, signed: SignedRound, stated: ResultManifest, document: bytes) -> int:
    """Checks that the signed result of private statistics follows from the members' signed replies.

    Returns:
        The number of columns.

    Raises:
        BlobAbsent: the payloads, or the model, are not kept.
        VerificationError: it does not follow.
    """
    check_document(stated, document)
    accepted, models = list(signed.evaluations.values()), {order.base_model for order in signed.evaluation_orders}
    if len(models) != 1:
        raise VerificationError(f"the assignments name {len(models)} models; a round has one")
    (model,) = models
    replies, asked = _stages(run, accepted, _shape(run, model))
    terms = [work.agreed for work in asked.values() if isinstance(work, Ready)]
    context = _context(run, stated.round, model, {}, terms)
    try:
        found, total = verify_description(run.spec, context, replies, asked, _inputs(accepted))
    except UnverifiedSession as error:
        raise VerificationError(f"the statistics: {error}") from error
    envelopes = [reply.envelope for reply in total.survivors]
    if (found.document, envelopes, []) != (document, [*stated.replies], [*stated.left_out]):
        raise VerificationError("the result is not what follows from the replies")
    return len(run.spec.statistics.columns)


def _context(
    run: RecordedRun, number: int, model: str, state: Mapping[str, Any], terms: Iterable[SessionTerms]
) -> RoundContext:
    """The facts on which a private conversation about a model may depend. Raises BlobAbsent without the model."""
    # Raises without the model: the length of the vectors follows from it, and an assumed one would verify nothing.
    layout = run.blobs.layout(model)
    return replace(round_context(run, number, layout, state), private=_private(run, model, terms))


def _invited(chain: KeyChain, key_id: bytes) -> bytes:
    """The id of the key with which a member was invited, if it is one of its keys; else that of its present key."""
    ids = [blake3(key).digest() for key in chain.raw]
    return key_id if key_id in ids else ids[-1]


def _private(run: RecordedRun, model: str, terms: Iterable[SessionTerms]) -> PrivateSetting:
    """The setting of a private round, for work on a model, in sessions with these terms."""
    invited = {member.client_id: member.key_id for agreed in terms for member in agreed.invited}
    chains = {name: run.chain(name) for name in invited}
    return PrivateSetting(
        spec=run.spec,
        document=run.document,
        origin=Origin(
            federation_id=run.federation_id,
            run_id=run.run_id,
            task=run.spec.task,
            spec=run.spec_digest,
            base_model=model,
            seed=run.spec.seed,
            unshared=Unshared.of(run.spec.parameters),
        ),
        keys={name: _invited(chain, invited[name]) for name, chain in chains.items() if chain is not None},
        named=frozenset(),
        blind=0,
        settle=_unsettled,
    )


def _unsettled(purpose: str, terms: object) -> Any:
    raise LookupError(f"no session can be settled for {purpose!r}")


def _stages(run: RecordedRun, signed: Sequence[SignedReply], shape: Shape) -> tuple[list[PhaseReply], dict[str, Work]]:
    """The replies to the phases of private rounds; and the work of their assignments, by reply.

    Raises:
        BlobAbsent: the payloads are not kept.
        VerificationError: work is malformed.
    """
    replies: list[PhaseReply] = []
    asked: dict[str, Work] = {}
    for reply in signed:
        recorded = recorded_reply(run, reply)
        if isinstance(recorded.rows, Absent):
            # Protocol, Private rounds: everything else is needed to repeat the session, so it is named as missing.
            if recorded.names != (CIPHERTEXTS,):  # ciphertexts are not kept, and nothing is computed from them
                raise BlobAbsent(recorded.payload)
            recorded = replace(recorded, rows=())
        replies.append(recorded)
        # Verify, 14: work in the clear in a private round would be read as no phase, and its reply would enter nothing.
        if reply.order.kind not in STAGES:
            raise VerificationError(
                f"{recorded.client_id} was asked for {reply.order.kind}, which is no phase of a private round"
            )
        try:
            work = decode(reply.order.kind, reply.order.work, shape)
            # Verify, 12: an unknown field in the terms or lists could change what the members did.
            if encode(work) != reply.order.work:
                raise WorkError("the work has a field that this release does not know")
        except WorkError as error:
            raise VerificationError(f"an assignment of {recorded.client_id}: {error}") from error
        asked[reply.envelope] = work
    return replies, asked


def _inputs(replies: Iterable[SignedReply]) -> dict[str, dict[str, tuple[str, int]]]:
    """The digests and sizes of the inputs of the assignments of some replies, by reply and by name."""
    return {reply.envelope: {part.name: (part.digest, part.size) for part in reply.order.inputs} for reply in replies}


def _shape(run: RecordedRun, model: str) -> Shape:
    """The shape for a member of private rounds on a model, which serves all objectives. Raises BlobAbsent."""
    return Shape(run.blobs.layout(model), run.objectives, run.objectives)


def read_session(message: SecureSession, shape: Shape) -> Record:
    """The record of a session in a signed step. Raises WorkError if its terms are malformed."""
    agreed = read_terms(message.terms, shape)
    # Verify, 12: as bytes inside a signed message, the terms are not covered by the check of its own fields.
    if has_unknown_fields(SecureTerms.FromString(message.terms)):
        raise WorkError("its terms have a field that this release does not know")
    return Record(
        session=message.session,
        purpose=message.purpose,
        agreed=agreed,
        terms=message.terms,
        ready=tuple(message.ready),
        members=tuple(message.members),
        survivors=tuple(message.survivors),
        coefficients=tuple(message.coefficients),
        tau1=message.tau1,
        tau2=message.tau2,
        alarms=tuple(message.alarms),
    )
