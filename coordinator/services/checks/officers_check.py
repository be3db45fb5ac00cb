"""Compares actions that need two officers with their signatures and the audit log; finds those by one officer alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.home import TWO_OFFICERS
from coordinator.members import administrators, membership
from coordinator.members.logged_rights import DECIDED
from coordinator.members.requests import MADE, open_request
from federation.refusals import Refusal
from federation.trust.envelope import envelope_digest, verify
from federation.trust.identity import Action
from federation.v1.common_pb2 import DecisionManifest, RequestManifest, SignedEnvelope
from storage import audit
from storage.models import ActionRequest, Administrator, AuditEntry
from storage.states import RequestState

ENTRIES = {
    membership.APPROVED: Action.APPROVE,
    membership.CLIENT_REVOKED: Action.REVOKE,
    membership.FORGOTTEN: Action.FORGET,
    administrators.REVOKED: Action.REVOKE_ADMIN,
}
DoneAction = tuple[Action, str]  # an action and its subject


@dataclass(frozen=True)
class _DecidedRequest:
    """A signed request with its signed decision: `consent` is the digest of the decision's envelope."""

    request: RequestManifest
    consent: str = ""


def request_problems(session: Session) -> Iterator[str]:
    """Describes the problems of requests, their signatures and the logged actions."""
    logged = _logged_digests(session)
    keys = {row.key_id: row for row in session.scalars(select(Administrator))}
    consents: dict[str, DoneAction] = {}
    for row in session.scalars(select(ActionRequest).order_by(ActionRequest.created)):
        name = f"request {row.request_id[7:19]}"
        try:
            decided = _verified(row, keys)
        except Refusal as refusal:
            yield f"{name}: {refusal.reason}: {refusal.message}"
            continue
        if row.request_id not in logged.get((MADE, row.request_id), ()):
            yield f"{name}: no entry of the log tells that it was made"
        if row.state is RequestState.OPEN:
            continue
        if decided.consent not in logged.get((DECIDED[row.state], row.request_id), ()):
            yield f"{name}: it is {row.state}, and no entry of the log tells of this decision"
        if row.state is RequestState.DONE:
            consents[decided.consent] = (Action(decided.request.action), decided.request.subject)
    for (action, subject), _ in logged.items():
        if action == MADE and session.get(ActionRequest, subject) is None:
            yield f"request {subject[7:19]}: the log tells of it, and it is not in the record"
    yield from _done_actions(session, consents)


def _logged_digests(session: Session) -> Mapping[tuple[str, str], list[str]]:
    """The digests in the entries about requests, by action and request."""
    digests: dict[tuple[str, str], list[str]] = {}
    rows = select(AuditEntry.action, AuditEntry.subject, AuditEntry.digest)
    for action, subject, digest in session.execute(rows.where(AuditEntry.action.in_([MADE, *DECIDED.values()]))):
        digests.setdefault((action, subject), []).append(digest)
    return digests


def _verified(row: ActionRequest, keys: Mapping[str, Administrator]) -> _DecidedRequest:
    """Verifies both signatures of a request; raises a Refusal."""
    try:
        first = keys[row.requested_by]
        request = open_request(row, first)
        if row.decision is None or row.decided_by is None:
            if row.state is not RequestState.OPEN:
                raise Refusal("signature", f"it is {row.state}, and nobody has signed a decision")
            return _DecidedRequest(request)
        second, envelope = keys[row.decided_by], SignedEnvelope.FromString(row.decision)
    except (KeyError, DecodeError):
        raise Refusal("key-unknown", "the record lacks the key of an officer, or what the officer signed") from None
    decision = verify(envelope, DecisionManifest, Ed25519PublicKey.from_public_bytes(second.signing_key))
    if decision.request != row.request_id:
        raise Refusal("mismatch:request", "the decision is about another request")
    by_requester = first.name == second.name
    signed = RequestState.DONE if decision.consent else RequestState.WITHDRAWN if by_requester else RequestState.REFUSED
    if signed is not row.state:
        raise Refusal("mismatch:state", f"it is {row.state}, and {second.name} has signed {signed}")
    if decision.consent and by_requester:
        raise Refusal("request-own", f"{first.name} has consented to a request of its own")
    if decision.consent and decision.created.ToNanoseconds() > request.expires.ToNanoseconds():
        raise Refusal("mismatch:created", "the decision was signed after the request had expired")
    return _DecidedRequest(request, envelope_digest(envelope))


def _done_actions(session: Session, consents: Mapping[str, DoneAction]) -> Iterator[str]:
    """Finds logged actions that needed two officers and lack their consent, and consents that were not performed."""
    actions = [*ENTRIES, audit.CONFIGURED]
    rows = select(AuditEntry.action, AuditEntry.subject, AuditEntry.detail, AuditEntry.digest)
    rows = rows.where(AuditEntry.action.in_(actions)).order_by(AuditEntry.entry_id)
    taking_two: set[str] = set()
    done = set[str]()
    for entry, subject, detail, digest in session.execute(rows):
        if entry == audit.CONFIGURED:
            if subject == TWO_OFFICERS:
                taking_two = set(filter(None, detail.split(", ")))
            continue
        action_done = ENTRIES[entry], subject
        if digest and consents.get(digest) != action_done:
            yield f"{entry} of {subject}: two officers have signed no such thing"
        elif not digest and action_done[0] in taking_two:
            yield f"{entry} of {subject}: one officer has done it, although it took two at the time"
        done.add(digest)
    for consent, (action, subject) in consents.items():
        if consent not in done:
            yield f"{action} of {subject}: an officer has consented, and the log does not tell that it was done"
