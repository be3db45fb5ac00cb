"""What becomes of a reply, on record: accepted, refused for its content, or a second one that is kept as evidence.

The intake records what real workers send, the simulated fleet what its clients computed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from coordinator.rounds.states import end_assignment
from federation.refusals import Refusal
from federation.v1.common_pb2 import SignedEnvelope, UpdateManifest
from storage.models import Assignment, AssignmentState, Update

FULFILLED = "assignment-fulfilled"
_LARGEST = 2**63 - 1  # that the column holds


@dataclass(frozen=True)
class Signed:
    """A reply as it is kept.

    Attributes:
        envelope: as received.
        digest: of the envelope.
        manifest: in the envelope.
    """

    envelope: SignedEnvelope
    digest: str
    manifest: UpdateManifest


def record_reply(
    assignment: Assignment,
    reply: Signed,
    refusal: Refusal | None,
    now: datetime,
    *,
    receipt: bytes,
    stored: bool = True,
) -> Update:
    """Records the reply that ends an assignment, in the caller's transaction.

    Args:
        assignment: which is open.
        reply: to it.
        refusal: why its content is refused; None when it is accepted.
        now: the time.
        receipt: the signed receipt; empty where nothing is signed.
        stored: whether the payload is in the blob store.
    """
    update = _row(assignment, reply, now)
    update.accepted = refusal is None
    update.reason = refusal.reason if refusal else ""
    update.receipt = receipt
    update.payload = reply.manifest.payload if stored and refusal is None else ""
    update.payload_bytes = reply.manifest.payload_bytes
    assignment.updates.append(update)
    if refusal is None:
        end_assignment(assignment, AssignmentState.FULFILLED, now)
    else:
        end_assignment(assignment, AssignmentState.REJECTED, now, refusal.reason, refusal.message)
    return update


def record_equivocation(assignment: Assignment, reply: Signed, now: datetime) -> None:
    """Records another signed reply to an assignment that is fulfilled. Its payload was never seen."""
    update = _row(assignment, reply, now)
    update.accepted, update.reason, update.receipt = False, FULFILLED, b""
    assignment.updates.append(update)


def _row(assignment: Assignment, reply: Signed, now: datetime) -> Update:
    return Update(
        client_id=assignment.client_id,
        envelope=reply.envelope.SerializeToString(deterministic=True),
        envelope_digest=reply.digest,
        samples=min(reply.manifest.samples, _LARGEST),
        losses=_finite(reply.manifest.losses),
        metrics=_finite(reply.manifest.metrics),
        received=now,
    )


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """What JSON can hold: refused replies may carry NaN."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
