"""Records a reply of a worker or a simulated client: accepted, refused for its content, or kept as evidence."""

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from coordinator.rounds.replies import signed_columns
from federation.process.assignment_log import about_assignment
from federation.record import log_entries
from federation.refusals import Refusal
from federation.trust.identity import client_uri
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from storage import audit
from storage.models import Assignment, Reply
from storage.states import AssignmentState

log = logging.getLogger(__name__)

FULFILLED = "assignment-fulfilled"
MAX_EQUIVOCATIONS = 3  # further replies to one assignment that are kept as evidence


@dataclass(frozen=True)
class Signed:
    """A reply as it is kept."""

    envelope: SignedEnvelope  # as received
    digest: str  # of the envelope
    manifest: ReplyManifest  # in the envelope


def ending(refusal: Refusal | None) -> tuple[AssignmentState, str, str]:
    """The end of an assignment by a reply: the state, the reason and the message."""
    if refusal is None:
        return AssignmentState.FULFILLED, "", ""
    return AssignmentState.REFUSED, refusal.reason, refusal.message


def reply_row(
    reply: Signed, refusal: Refusal | None, now: datetime, *, receipt: bytes, stored: bool = True
) -> dict[str, Any]:
    """The columns of the row in `replies` for the reply that ends an open assignment.

    `refusal` says why its content is refused; None when it is accepted. The receipt is empty where nothing is signed.
    `stored` is True if the payload is in the blob store.
    """
    return {
        **_row(reply, now, accepted=refusal is None, reason=refusal.reason if refusal else "", receipt=receipt),
        **signed_columns.of_reply(reply.manifest, stored=stored and refusal is None),
    }


def record_equivocation(session: Session, assignment: Assignment, reply: Signed, now: datetime) -> None:
    """Records another signed reply to a fulfilled assignment, as evidence. Its payload was never seen.

    Does nothing if the same reply, or MAX_EQUIVOCATIONS others, are on record.
    """
    replies = assignment.replies
    if len(replies) > MAX_EQUIVOCATIONS or reply.digest in {recorded.envelope_digest for recorded in replies}:
        return
    first = next(recorded.envelope_digest for recorded in replies if recorded.accepted)
    row = _row(reply, now, accepted=False, reason=FULFILLED, receipt=b"")
    assignment.replies.append(Reply(**row, **signed_columns.of_reply(reply.manifest, stored=False, counted=False)))
    manifest, name = reply.manifest, assignment.assignment_id
    audit.record(
        session,
        at=now,
        actor=client_uri(manifest.federation_id, assignment.client_id),
        action=log_entries.EQUIVOCATED,
        subject=name,
        detail=f"run {manifest.run_id} round {manifest.round}: accepted was {first}; signed too is {reply.digest}",
        digest=reply.digest,
    )
    with about_assignment(name):
        log.warning("%s signed two different replies to assignment %s", manifest.client_id, name)


def _row(reply: Signed, now: datetime, *, accepted: bool, reason: str, receipt: bytes) -> dict[str, Any]:
    """The columns that do not follow from the manifest of a reply."""
    return {
        "accepted": accepted,
        "reason": reason,
        "envelope": reply.envelope.SerializeToString(),
        "envelope_digest": reply.digest,
        "receipt": receipt,
        "received": now,
    }
