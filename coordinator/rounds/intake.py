"""The intake: everything that must hold before a reply counts, in the order of SECURITY section 2, cheapest first.

A reply that is refused for its transport or its envelope leaves its assignment open: somebody else may have caused it,
and the client may try again. A reply whose signature holds and whose content is wrong is the client's own word: it is
recorded, the assignment is closed, and the client gets a signed receipt that says so.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.content import content_problem, must_match, payload_problem
from coordinator.rounds.evidence import SignatureMemory
from coordinator.rounds.recorder import FULFILLED, Signed, record_equivocation, record_reply
from coordinator.rounds.reported import must_be_a_time
from coordinator.rounds.states import end_assignment
from federation.envelope import envelope_digest, unseal
from federation.identity import client_uri
from federation.payload_check import PayloadCheck
from federation.refusals import Refusal
from federation.runs import LimitsSpec, RunSpec
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, SignedEnvelope, UpdateManifest
from federation.vectors import Layout, update_layout
from federation.work.base import Work
from federation.work.registry import kind
from storage import audit
from storage.database import Database
from storage.models import Assignment, AssignmentState, Client, Update

log = logging.getLogger(__name__)

MAX_ENVELOPE_BYTES = 64 * 1024
MAX_EQUIVOCATIONS = 3  # further replies to one assignment that are kept as evidence
ASSIGNMENT_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Admission:
    """A reply whose envelope has passed; its payload may come in.

    Attributes:
        envelope: as received.
        envelope_digest: the name of the envelope.
        manifest: the verified manifest.
        layout: of the payload that the assignment asks for; None when it asks for none.
        kind: of the work that the assignment asks for.
        limits: of the run.
        deadline: until when the reply counts.
    """

    envelope: SignedEnvelope
    envelope_digest: str
    manifest: UpdateManifest
    layout: Layout | None
    kind: type[Work]
    limits: LimitsSpec
    deadline: datetime

    def must_be_in_time(self, now: datetime) -> None:
        """Looks at the clock while the payload comes in.

        Raises:
            Refusal: `deadline`.
        """
        if now > self.deadline:
            raise _late(self.manifest.assignment_id, self.deadline)

    def problem(self, check: PayloadCheck) -> Refusal | None:
        """What is wrong with the content of the payload that arrived whole; None when nothing is."""
        return payload_problem(check, self.kind, self.limits)


class Intake:
    """Admits, accepts and refuses replies.

    Args:
        database: where they are recorded.
        signing_key: the coordinator's, for receipts.
        changed: called with the run's id after a reply was recorded.
        clock: the time, aware.
        signatures: where those that were verified or made here are remembered.
    """

    def __init__(
        self,
        database: Database,
        signing_key: Ed25519PrivateKey,
        *,
        changed: Callable[[str], None],
        clock: Callable[[], datetime],
        signatures: SignatureMemory,
    ) -> None:
        self._database = database
        self._signing_key = signing_key
        self._signatures = signatures
        self._changed = changed
        self._clock = clock

    def admit(self, client_id: str, envelope: SignedEnvelope) -> Admission | SignedEnvelope:
        """Checks a reply before any byte of its payload.

        Args:
            client_id: who sends it, as its certificate says.
            envelope: of an UpdateManifest.

        Returns:
            The admission, or the stored receipt when this very envelope was accepted before.

        Raises:
            Refusal: with the reason of the first check that failed.
        """
        # The whole envelope, since it is kept as it came: unknown fields, too long a signature and all.
        if envelope.ByteSize() > MAX_ENVELOPE_BYTES:
            raise Refusal("limit:manifest", f"{envelope.ByteSize()} bytes of envelope; at most {MAX_ENVELOPE_BYTES}")
        name = envelope_digest(envelope)
        claimed = _parse(envelope.manifest)
        with self._database.read() as session:
            assignment = _find(session, claimed.assignment_id, client_id)
            order = _order(assignment)
            if claimed.payload_bytes > order.max_payload_bytes:
                raise Refusal(
                    "limit:payload",
                    f"{claimed.payload_bytes} bytes declared; this assignment takes {order.max_payload_bytes}",
                )
            receipt = _stored_receipt(session, assignment, name)
            if receipt is not None:
                return receipt
            client = session.get_one(Client, client_id)
            limits = _limits(assignment.phase.round.run.spec)
            deadline = assignment.phase.deadline
            try:
                self._must_be_open(assignment)
            except Refusal as refusal:
                closed: Refusal | None = refusal
            else:
                closed = None
        if closed is not None:
            if closed.reason == FULFILLED:
                self._keep_if_signed(envelope, order, client)
            raise closed
        manifest = self._opened(envelope, client)
        must_match(manifest, order)
        layout = update_layout([(row.name, row.length, row.dtype) for row in order.rows]) if order.rows else None
        asked = kind(order.kind).work
        admission = Admission(envelope, name, manifest, layout, kind=asked, limits=limits, deadline=deadline)
        problem = content_problem(manifest, asked, limits)
        if problem is not None:
            self._refuse_for_good(admission, problem)
        return admission

    def accept(self, admission: Admission, check: PayloadCheck | None) -> SignedEnvelope:
        """Makes a reply count: one transaction for update, assignment and receipt.

        Args:
            admission: what `admit` returned.
            check: the finished check of the payload, whose blob is stored; None where there is no payload.

        Returns:
            The signed receipt.

        Raises:
            Refusal: the content is wrong, or somebody else's reply or the deadline came first.
        """
        problem = admission.problem(check) if check is not None else None
        if problem is not None:
            self._refuse_for_good(admission, problem)
        return self._record(admission, None)

    def decline(self, client_id: str, assignment_id: str, reason: str, message: str) -> None:
        """Closes an assignment that its client will not do.

        Raises:
            Refusal: `assignment-unknown`, `assignment-client`.
        """
        with self._database.begin() as session:
            assignment = _find(session, assignment_id, client_id, lock=True)
            if assignment.state is not AssignmentState.OPEN:
                return
            end_assignment(assignment, AssignmentState.DECLINED, self._clock(), reason, message)
            run_id = assignment.phase.round.run_id
        self._changed(run_id)

    def _refuse_for_good(self, admission: Admission, refusal: Refusal) -> None:
        receipt = self._record(admission, refusal)
        raise Refusal(refusal.reason, refusal.message, signed=receipt)

    def _opened(self, envelope: SignedEnvelope, client: Client) -> UpdateManifest:
        key = Ed25519PublicKey.from_public_bytes(client.signing_key)
        manifest = unseal(envelope, UpdateManifest, key)
        self._signatures.note(envelope, UpdateManifest, key)
        return manifest

    def _keep_if_signed(self, envelope: SignedEnvelope, order: AssignmentManifest, client: Client) -> None:
        """Keeps a second reply to a fulfilled assignment as evidence, if its client signed it and it is no other's."""
        try:
            manifest = self._opened(envelope, client)
            must_match(manifest, order)
        except Refusal:
            return  # anybody could have made it
        self._keep_equivocation(envelope, manifest)

    def _keep_equivocation(self, envelope: SignedEnvelope, manifest: UpdateManifest) -> None:
        """Puts a second, different reply that a client signed to a fulfilled assignment on record, beside the first."""
        name, now = envelope_digest(envelope), self._clock()
        with self._database.begin() as session:
            assignment = session.get_one(Assignment, manifest.assignment_id, with_for_update=True)
            replies = session.execute(
                select(Update.envelope_digest, Update.accepted).where(Update.assignment_id == assignment.assignment_id)
            ).all()
            if len(replies) > MAX_EQUIVOCATIONS or name in {reply.envelope_digest for reply in replies}:
                return
            first = next((reply.envelope_digest for reply in replies if reply.accepted), "")
            record_equivocation(assignment, Signed(envelope, name, manifest), now)
            audit.record(
                session,
                at=now,
                actor=client_uri(manifest.federation_id, assignment.client_id),
                action="update.equivocation",
                subject=assignment.assignment_id,
                detail=f"run {manifest.run_id} round {manifest.round}: accepted was {first}; signed too is {name}",
            )
        log.warning("%s signed two different replies to assignment %s", manifest.client_id, manifest.assignment_id)

    def _record(self, admission: Admission, refusal: Refusal | None) -> SignedEnvelope:
        """Records a reply, unless another one came first: that one is kept as evidence."""
        try:
            return self._record_open(admission, refusal)
        except Refusal as closed:
            if closed.reason == FULFILLED:
                self._keep_equivocation(admission.envelope, admission.manifest)
            raise

    def _record_open(self, admission: Admission, refusal: Refusal | None) -> SignedEnvelope:
        manifest = admission.manifest
        with self._database.begin() as session:
            assignment = session.get_one(Assignment, manifest.assignment_id, with_for_update=True)
            receipt = _stored_receipt(session, assignment, admission.envelope_digest)
            if receipt is not None:
                return receipt
            self._must_be_open(assignment)
            now = self._clock()
            receipt = self._receipt(admission, refusal, now)
            signed = Signed(admission.envelope, admission.envelope_digest, manifest)
            record_reply(assignment, signed, refusal, now, receipt=receipt.SerializeToString())
        self._changed(manifest.run_id)
        return receipt

    def _receipt(self, admission: Admission, refusal: Refusal | None, now: datetime) -> SignedEnvelope:
        manifest = admission.manifest
        receipt = ReceiptManifest(
            federation_id=manifest.federation_id,
            run_id=manifest.run_id,
            round=manifest.round,
            phase=manifest.phase,
            assignment_id=manifest.assignment_id,
            client_id=manifest.client_id,
            base_model=manifest.base_model,
            payload=manifest.payload,
            envelope=admission.envelope_digest,
            accepted=refusal is None,
            reason=refusal.reason if refusal else "",
            message=refusal.message if refusal else "",
        )
        receipt.created.FromDatetime(now)
        return self._signatures.sign(receipt, self._signing_key)

    def _must_be_open(self, assignment: Assignment) -> None:
        name = assignment.assignment_id
        if assignment.state is AssignmentState.FULFILLED:
            raise Refusal(FULFILLED, f"assignment {name} was fulfilled with another reply")
        if (assignment.state is AssignmentState.EXPIRED and assignment.reason == "deadline") or (
            assignment.state is AssignmentState.OPEN and self._clock() > assignment.phase.deadline
        ):
            raise _late(name, assignment.phase.deadline)
        if assignment.state is not AssignmentState.OPEN:
            raise Refusal("assignment-closed", f"assignment {name} is {assignment.state}: {assignment.reason}")


def _late(assignment_id: str, deadline: datetime) -> Refusal:
    return Refusal("deadline", f"assignment {assignment_id} ended at {deadline.isoformat()}")


@lru_cache(maxsize=64)
def _limits(spec: bytes) -> LimitsSpec:
    return RunSpec.parse(spec).limits


def _find(session: Session, assignment_id: str, client_id: str, *, lock: bool = False) -> Assignment:
    known = ASSIGNMENT_ID.fullmatch(assignment_id) is not None
    assignment = session.get(Assignment, assignment_id, with_for_update=lock) if known else None
    if assignment is None:
        raise Refusal("assignment-unknown", f"there is no assignment {assignment_id[:32]!r}")
    if assignment.client_id != client_id:
        raise Refusal("assignment-client", f"assignment {assignment_id} was not issued to {client_id}")
    return assignment


def _parse(data: bytes) -> UpdateManifest:
    try:
        manifest = UpdateManifest.FromString(data)
    except DecodeError:
        raise Refusal("manifest", "the manifest is not an UpdateManifest") from None
    must_be_a_time(manifest.created)
    return manifest


def _order(assignment: Assignment) -> AssignmentManifest:
    return AssignmentManifest.FromString(SignedEnvelope.FromString(assignment.envelope).manifest)


def _stored_receipt(session: Session, assignment: Assignment, envelope: str) -> SignedEnvelope | None:
    """The receipt that this very envelope got before, raised as a refusal when it was refused."""
    update = session.scalar(
        select(Update).where(Update.assignment_id == assignment.assignment_id, Update.envelope_digest == envelope)
    )
    if update is None or not update.receipt:
        return None
    receipt = SignedEnvelope.FromString(update.receipt)
    if not update.accepted:
        raise Refusal(update.reason, assignment.message, signed=receipt)
    return receipt
