"""Records a reply of a worker or a simulated client: accepted, refused for its content, or kept as evidence."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from federation.identity import client_uri
from federation.refusals import Refusal
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from storage import audit
from storage.models import Assignment, Reply
from storage.states import AssignmentState

log = logging.getLogger(__name__)

FULFILLED = "assignment-fulfilled"
MAX_EQUIVOCATIONS = 3  # further replies to one assignment that are kept as evidence
_LARGEST = 2**63 - 1  # that the column holds


@dataclass(frozen=True)
class Signed:
    """A reply as it is kept."""

    envelope: SignedEnvelope  # as received
    digest: str  # of the envelope
    manifest: ReplyManifest  # in the envelope


def ending(refusal: Refusal | None) -> tuple[AssignmentState, str, str]:
    """How a reply ends its assignment: the state, the reason and the message."""
    if refusal is None:
        return AssignmentState.FULFILLED, "", ""
    return AssignmentState.REFUSED, refusal.reason, refusal.message


def reply_row(
    reply: Signed, refusal: Refusal | None, now: datetime, *, receipt: bytes, stored: bool = True
) -> dict[str, Any]:
    """The columns of the row in `replies` for the reply that ends an open assignment.

    `refusal` says why its content is refused; None when it is accepted. The receipt is empty where nothing is signed.
    `stored` says whether the payload is in the blob store.
    """
    return {
        **_row(reply, now, refusal.reason if refusal else "", receipt),
        "accepted": refusal is None,
        "payload": reply.manifest.payload if stored and refusal is None else "",
        "payload_bytes": reply.manifest.payload_bytes,
    }


def record_equivocation(session: Session, assignment: Assignment, reply: Signed, now: datetime) -> None:
    """Records another signed reply to a fulfilled assignment, as evidence. Its payload was never seen.

    Does nothing if this very reply is on record, or MAX_EQUIVOCATIONS others are.
    """
    replies = assignment.replies
    if len(replies) > MAX_EQUIVOCATIONS or reply.digest in {one.envelope_digest for one in replies}:
        return
    first = next(one.envelope_digest for one in replies if one.accepted)
    assignment.replies.append(Reply(accepted=False, **_row(reply, now, FULFILLED, b"")))
    manifest, name = reply.manifest, assignment.assignment_id
    audit.record(
        session,
        at=now,
        actor=client_uri(manifest.federation_id, assignment.client_id),
        action="reply.equivocation",
        subject=name,
        detail=f"run {manifest.run_id} round {manifest.round}: accepted was {first}; signed too is {reply.digest}",
        digest=reply.digest,
    )
    log.warning("%s signed two different replies to assignment %s", manifest.client_id, name)


def _row(reply: Signed, now: datetime, reason: str, receipt: bytes) -> dict[str, Any]:
    return {
        "client_id": reply.manifest.client_id,
        "reason": reason,
        "envelope": reply.envelope.SerializeToString(),
        "envelope_digest": reply.digest,
        "receipt": receipt,
        "samples": min(reply.manifest.samples, _LARGEST),
        "losses": _finite(reply.manifest.losses),
        "metrics": _finite(reply.manifest.metrics),
        "privacy": privacy_stated(reply.manifest),
        "unrepeatable": reply.manifest.unrepeatable,
        "received": now,
    }


def privacy_stated(manifest: ReplyManifest) -> dict[str, float]:
    """What a reply states of noise, by field; empty where it states nothing."""
    return {field.name: float(value) for field, value in manifest.privacy.ListFields()}


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """What JSON can hold: refused replies may carry NaN."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
