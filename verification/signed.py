"""The signed content of a round all of whose envelopes are verified."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from federation.record.rounds import OpenedPhase, OpenedRound
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest, StepManifest
from verification.errors import VerificationError


@dataclass(frozen=True, kw_only=True)
class SignedReply:
    """An accepted reply.

    Attributes:
        envelope: its digest.
        signed: the envelope, serialized.
        order: the assignment that it fulfils.
        manifest: the content that the client signed.
    """

    envelope: str
    signed: bytes
    order: AssignmentManifest
    manifest: ReplyManifest


@dataclass(frozen=True, kw_only=True)
class SignedRound:
    """The signed content of a round.

    Attributes:
        step: None if the round has no step.
        step_digest: of the envelope of the step; empty without one.
        phases: the numbers of the phases of the last attempt on which the step depends, in their order.
        asked: the assignments of these phases, by phase and client.
        replies: the accepted replies to these phases, by the digests of their envelopes.
        evaluations: the accepted replies to the later phases, which measure the new model.
        envelopes: the number of verified signatures.
        orders: the assignments of all attempts and of evaluations.
        answers: the accepted replies to them.
        evaluation_orders: the assignments that measure the new model, with or without a reply.
        sent: the bytes of accepted and of refused payloads, as the replies declare them.
        measures: True if there is a phase that measures the new model.
        gone: the number of clients that were revoked or left between the round before and the last attempt at this one.
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
    evaluation_orders: Sequence[AssignmentManifest]
    sent: tuple[int, int]
    measures: bool
    gone: int = 0

    @classmethod
    def of(cls, opened: OpenedRound, gone: int = 0) -> "SignedRound":
        """Collects the signed content of a round.

        Raises VerificationError for the first envelope that is not verified.
        """
        envelopes = list(opened.envelopes)
        for envelope in envelopes:
            # Verify, 2 and 3: all envelopes before anything is computed: the rules read these manifests as true.
            if envelope.problem is not None:
                raise VerificationError(envelope.words) from envelope.problem
        # Verify, a verifier of your own, 4: the last attempt alone: replies of a voided one must not enter the step.
        phases = [phase for phase in opened.phases if phase.decides]
        orders = [exchange.assignment.manifest for exchange in opened.exchanges]
        return cls(
            step=None if opened.step is None else opened.step.manifest,
            step_digest="" if opened.step is None else opened.step.digest,
            phases=tuple(phase.number for phase in phases),
            asked={
                (phase.number, exchange.assignment.manifest.client_id): exchange.assignment.manifest
                for phase in phases
                for exchange in phase.exchanges
            },
            replies=_accepted(phases),
            evaluations=_accepted(phase for phase in opened.phases if phase.evaluates),
            envelopes=len(envelopes),
            orders=orders,
            # Verify, 14: of all attempts: what members refuse must not have been asked for in a voided one, either.
            answers=[answer.reply.manifest for exchange in opened.exchanges for answer in exchange.accepted],
            evaluation_orders=[
                exchange.assignment.manifest
                for phase in opened.phases
                if phase.evaluates
                for exchange in phase.exchanges
            ],
            sent=opened.sent,
            measures=any(phase.evaluates for phase in opened.phases),
            gone=gone,
        )


def _accepted(phases: Iterable[OpenedPhase]) -> dict[str, SignedReply]:
    """The accepted replies to some phases, by the digests of their envelopes."""
    return {
        answer.reply.digest: SignedReply(
            envelope=answer.reply.digest,
            signed=answer.reply.envelope.SerializeToString(deterministic=True),
            order=exchange.assignment.manifest,
            manifest=answer.reply.manifest,
        )
        for phase in phases
        for exchange in phase.exchanges
        for answer in exchange.accepted
    }
