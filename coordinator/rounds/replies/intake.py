"""The intake: the checks of a reply before it counts, cheapest first (docs/reference/protocol.md, the order of checks).

A reply that is refused for its transport or its envelope leaves its assignment open: another party may have caused it,
and the client may try again. A reply with a valid signature and wrong content is recorded, the assignment is closed,
and the client gets a signed receipt of the refusal.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError
from sqlalchemy import Row, insert, select
from sqlalchemy.orm import Session

from coordinator.rounds.replies.content import check_is_time, check_matches, content_problem, privacy_problem
from coordinator.rounds.replies.declines import claimed_assignment, reason_and_message, verified_decline
from coordinator.rounds.replies.evidence import SignatureMemory
from coordinator.rounds.replies.group_commit import GroupCommit
from coordinator.rounds.replies.recorder import FULFILLED, Signed, ending, record_equivocation, reply_row
from coordinator.rounds.replies.reply_counts import count_reply
from coordinator.rounds.replies.revoked import LEFT, REVOKED
from coordinator.rounds.replies.standing import LOCKED, LOCKED_MEMBERS, STANDING
from coordinator.rounds.transitions import Ending, end_assignment, end_open_assignments
from coordinator.signing_keys import Signing
from federation.digests import digest
from federation.process.assignment_log import about_assignment
from federation.record import bound_fields, log_entries
from federation.record.bound_fields import repeated
from federation.refusals import Refusal
from federation.spec.run_sections import LimitsSpec
from federation.spec.run_spec import RunSpec
from federation.trust.envelope import envelope_digest
from federation.trust.identity import client_uri
from federation.trust.key_chain import KeyChain, moment
from federation.v1.common_pb2 import AssignmentManifest, DeclineManifest, ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.vectors import Layout, update_layout
from federation.work.base import Work
from federation.work.registry import kind, statement_problem
from storage import audit
from storage.database import UNAVAILABLE, Database
from storage.models import Assignment, Client, Reply
from storage.states import AssignmentState, ClientState

log = logging.getLogger(__name__)

MAX_ENVELOPE_BYTES = 64 * 1024
MOST_RUNS = 64  # whose limits are remembered
ASSIGNMENT_ID = re.compile(r"[0-9a-f]{32}")


_INSERT = insert(Reply)


@dataclass(frozen=True)
class Admission(Signed):
    """A reply whose envelope has passed the checks; its payload may be uploaded."""

    layout: Layout | None  # of the payload that the assignment asks for; None when it asks for none
    kind: type[Work]  # of the work that the assignment asks for
    limits: LimitsSpec  # of the run
    deadline: datetime  # until when the reply counts
    start: bytes = b""  # of the worker that hands it in; empty if it tells none

    def check_in_time(self, now: datetime) -> None:
        """Raises the Refusal `deadline` once the reply comes too late."""
        if now > self.deadline:
            raise _late(self.manifest.assignment_id, self.deadline)


_Checked = tuple[Admission, Refusal | None]  # an admitted reply, and the problem of its content


@dataclass(frozen=True)
class RecordedReply:
    """A reply that is on record, with its receipt; `new` if it was not before."""

    receipt: SignedEnvelope
    new: bool


class Intake:
    """Admits and records replies.

    Args:
        database: records them.
        signing: the coordinator's keys; the present one signs receipts.
        changed: called with the run's id after an assignment was declined.
        replied: likewise after a reply was recorded.
        answered: called with the client and the assignment after an attempt to end the assignment.
        clock: the time, aware.
        signatures: the ones that this process has verified or made.
    """

    def __init__(
        self,
        database: Database,
        signing: Signing,
        *,
        changed: Callable[[str], None],
        replied: Callable[[str], None],
        answered: Callable[[str, str], None],
        clock: Callable[[], datetime],
        signatures: SignatureMemory,
    ) -> None:
        self._database = database
        self._signing = signing
        self._signatures = signatures
        self._changed = changed
        self._replied = replied
        self._answered = answered
        self._clock = clock
        self._group = GroupCommit(database, self._record_all)
        self._limits: dict[str, LimitsSpec] = {}  # of runs, by the digests of their specifications

    def admit(self, client_id: str, envelope: SignedEnvelope, start: bytes = b"") -> Admission | SignedEnvelope:
        """Checks a reply before any byte of its payload: the envelope of a ReplyManifest, sent by `client_id`.

        `start` is that of its worker, empty if it tells none.

        Returns the admission, or the stored receipt if the same envelope was accepted before.

        Raises:
            Refusal: with the reason of the first check that failed.
        """
        # The whole envelope counts, since it is kept as received, with unknown fields or too long a signature.
        if envelope.ByteSize() > MAX_ENVELOPE_BYTES:
            raise Refusal("limit:manifest", f"{envelope.ByteSize()} bytes of envelope; at most {MAX_ENVELOPE_BYTES}")
        name = envelope_digest(envelope)
        # Protocol, order of checks, 2 and 3: not verified yet: it only says which assignment, and so whose key, has to
        # be looked up.
        claimed = _parse(envelope.manifest)
        with self._database.read() as session:
            assignment_id = claimed.assignment_id if ASSIGNMENT_ID.fullmatch(claimed.assignment_id) else None
            parameters = {"assignment": assignment_id, "envelope": name}
            standing = session.connection().execute(STANDING, parameters).one_or_none()
            if standing is not None and standing.client_id == client_id:
                keys = self._signing.keys_of(session, client_id, standing.signing_key, envelope)
        # Protocol, order of checks, 3: by the certificate of the caller: a member must learn nothing of the assignments
        # of another one.
        if standing is None or standing.client_id != client_id:
            raise _foreign(claimed.assignment_id, issued=standing is not None, client_id=client_id)
        order = AssignmentManifest.FromString(SignedEnvelope.FromString(standing.envelope).manifest)
        # Protocol, order of checks, 4: before a byte of it is taken.
        if claimed.payload_bytes > order.max_payload_bytes:
            raise Refusal(
                "limit:payload",
                f"{claimed.payload_bytes} bytes declared; this assignment takes {order.max_payload_bytes}",
            )
        # Protocol, order of checks, 5: before the deadline and the state: a client that lost its receipt gets the same
        # one for ever.
        if standing.receipt:
            return _given(
                standing.receipt, accepted=standing.accepted, reason=standing.refused, message=standing.message
            )
        _check_start(standing.start, start)
        limits = self._limits_of(standing.spec, order.spec)
        closed = self._closed(claimed.assignment_id, standing.state, standing.reason, standing.deadline, self._clock())
        # Protocol, order of checks, 6: a fulfilled assignment goes on to 7 and 8: a second signed reply is evidence,
        # and is kept.
        if closed is not None and closed.reason != FULFILLED:
            raise closed
        try:
            admission, problem = self._opened(envelope, name, order, keys, limits, standing.deadline, start)
        except Refusal as refusal:
            raise closed or refusal from None
        if closed is not None or problem is not None:
            return self.record(admission, problem)
        return admission

    def admit_given(
        self, envelope: SignedEnvelope, order: AssignmentManifest, signing_key: bytes, on_record: str, start: bytes
    ) -> Admission | None:
        """As `admit`, for a reply to an assignment that its client was given, without a look at the record.

        None if `admit` has to say what becomes of it: anything is wrong with it, or there is more to read. Whether the
        assignment is open is seen when the reply is recorded.

        Args:
            envelope: of the reply.
            order: its assignment, as the client was given it.
            signing_key: the client's present public key, 32 raw bytes.
            on_record: the start of its worker on record, as in `KnownMember`.
            start: as for `admit`.
        """
        limits = self._limits.get(order.spec)
        if limits is None or envelope.ByteSize() > MAX_ENVELOPE_BYTES:
            return None
        deadline, keys = (
            order.deadline.ToDatetime(tzinfo=UTC),
            KeyChain(Ed25519PublicKey.from_public_bytes(signing_key)),
        )
        try:
            claimed = _parse(envelope.manifest)
            _check_start(on_record, start)
            if claimed.payload_bytes > order.max_payload_bytes or self._clock() > deadline:
                return None
            name = envelope_digest(envelope)
            admission, problem = self._opened(envelope, name, order, keys, limits, deadline, start)
        except Refusal:
            return None
        return admission if problem is None else None

    def _opened(
        self,
        envelope: SignedEnvelope,
        name: str,
        order: AssignmentManifest,
        keys: KeyChain,
        limits: LimitsSpec,
        deadline: datetime,
        start: bytes,
    ) -> _Checked:
        """An admission, and the problem of its content, of a reply that one of these keys has signed.

        Raises:
            Refusal: of the envelope, or because it does not fit its assignment.
        """
        manifest = self._signatures.open(envelope, ReplyManifest, keys.signer(envelope))
        keys.check_counts(envelope, moment(order.created), self._clock())
        # Protocol, order of checks, 8: after the signature: fields that do not fit are recorded as this client's only
        # if it signed them.
        check_matches(manifest, order)
        layout = _layout(tuple((row.name, row.length, row.dtype) for row in order.rows)) if order.rows else None
        work = kind(order.kind).work
        admission = Admission(envelope, name, manifest, layout, work, limits, deadline, start)
        # Protocol, order of checks, 9: from here on the client is the author, so the refusal is recorded and gets a
        # signed receipt.
        problem = content_problem(manifest, work, limits) or privacy_problem(manifest, order)
        if problem is None and (defect := statement_problem(order.kind, order.work, manifest.statement)):
            problem = Refusal("statement", defect[:400])  # no mutant: any length that is easy to read
        return admission, problem

    def _limits_of(self, document: bytes, name: str) -> LimitsSpec:
        """The limits of a specification; they are remembered if it has the digest that assignments name."""
        if (known := self._limits.get(name)) is not None:
            return known
        limits = RunSpec.parse(document).limits
        if digest(document) == name:
            if len(self._limits) >= MOST_RUNS:
                self._limits = {}
            self._limits[name] = limits
        return limits

    def record(self, admission: Admission, problem: Refusal | None) -> SignedEnvelope:
        """Records an admitted reply: one transaction for reply, assignment and receipt. Returns the signed receipt.

        Replies that other threads hand in at the same time are in the same transaction. `problem` is that of the
        content; None if there is none, and the payload is stored. If another reply came first, this one is kept as
        evidence.

        Raises:
            Refusal: `problem`, with the signed receipt; or another reply or the deadline came first.
        """
        try:
            recorded = self._group.commit((admission, problem))
        except UNAVAILABLE:
            self._changed(admission.manifest.run_id)  # it may be on record all the same, and the last one of its phase
            raise
        finally:
            self._answered(admission.manifest.client_id, admission.manifest.assignment_id)
        if isinstance(recorded, Refusal):
            raise recorded
        if recorded.new:
            self._replied(admission.manifest.run_id)
            if problem is not None:
                raise Refusal(problem.reason, problem.message, signed=recorded.receipt.SerializeToString())
            count_reply(self._database.tally, admission.manifest.client_id, "accepted")
        return recorded.receipt

    def _record_all(self, session: Session, replies: Sequence[_Checked]) -> list[Refusal | RecordedReply]:
        """Records admitted replies in one transaction; returns what each has come to, in their order."""
        found: dict[int, Refusal | RecordedReply] = {}
        waiting = dict(enumerate(replies))
        while waiting:  # of several replies to one assignment, each sees what the one before has come to
            firsts: dict[str, int] = {}
            for place, (admission, _) in waiting.items():
                firsts.setdefault(admission.manifest.assignment_id, place)
            group = {place: waiting.pop(place) for place in firsts.values()}
            found |= zip(group, self._record_group(session, [*group.values()]), strict=True)
        return [found[place] for place in range(len(replies))]

    def _record_group(self, session: Session, replies: Sequence[_Checked]) -> list[Refusal | RecordedReply]:
        """Records replies to different assignments."""
        names = {"assignments": [admission.manifest.assignment_id for admission, _ in replies]}
        if self._database.serves_many:
            members = {"members": sorted({admission.manifest.client_id for admission, _ in replies})}
            session.connection().execute(LOCKED_MEMBERS, members)
        locked = {row.assignment_id: row for row in session.connection().execute(LOCKED, names)}
        found, rows = list[Refusal | RecordedReply](), list[dict[str, Any]]()
        endings, events, now = list[Ending](), list[audit.LogEvent](), self._clock()
        for admission, problem in replies:
            name = admission.manifest.assignment_id
            closed = self._standing(session, locked[name], admission, now)
            if closed is None:
                receipt = self._receipt(admission, problem, now)
                rows.append(reply_row(admission, problem, now, receipt=receipt.SerializeToString()))
                state, reason, message = ending(problem)
                endings.append(Ending(name, state, now, reason, message))
                events.append(self._event(admission, problem, now))
            elif isinstance(closed, Refusal) and closed.reason == FULFILLED:
                record_equivocation(session, session.get_one(Assignment, name), admission, now)
            found.append(RecordedReply(receipt, new=True) if closed is None else closed)
        if rows:
            session.connection().execute(_INSERT, rows)
            end_open_assignments(session, endings)
            audit.record_all(session, events)
        return found

    def _standing(
        self,
        session: Session,
        locked: Row[str, AssignmentState, str, str, str, ClientState],
        admission: Admission,
        now: datetime,
    ) -> Refusal | RecordedReply | None:
        """What keeps an admitted reply from being recorded, or its earlier receipt; None if nothing does.

        During the upload another reply, or the end of the phase, can have come first.
        """
        try:
            if locked.state is not AssignmentState.OPEN:
                stored = _stored_receipt(session, locked.message, admission.digest)
                if stored is not None:
                    return RecordedReply(stored, new=False)
            elif locked.member is not ClientState.ACTIVE:
                # The member was revoked or left after the reply was admitted. Its open assignments end a moment later.
                closing = LEFT if locked.member is ClientState.LEFT else REVOKED
                return _ended(locked.assignment_id, AssignmentState.CANCELLED, closing)
            _check_start(locked.start, admission.start)
        except Refusal as refusal:
            return refusal
        return self._closed(locked.assignment_id, locked.state, locked.reason, admission.deadline, now)

    def decline(self, client_id: str, envelope: SignedEnvelope) -> None:
        """Closes an assignment that its client will not do: the envelope of a DeclineManifest, sent by `client_id`.

        Raises:
            Refusal: `assignment-unknown`, `assignment-client`, or the problem of the envelope.
        """
        name = claimed_assignment(envelope)
        with self._database.begin() as session:
            valid = ASSIGNMENT_ID.fullmatch(name) is not None
            # no mutant: SQLite has one writer
            assignment = session.get(Assignment, name, with_for_update=True) if valid else None
            if assignment is None or assignment.client_id != client_id:
                raise _foreign(name, issued=assignment is not None, client_id=client_id)
            issued = SignedEnvelope.FromString(assignment.envelope)
            order = AssignmentManifest.FromString(issued.manifest)
            federation_id = order.federation_id
            registered = session.get_one(Client, client_id).signing_key
            keys = self._signing.keys_of(session, client_id, registered, envelope)
            decline = verified_decline(envelope, issued, keys)
            keys.check_counts(envelope, moment(order.created), self._clock())
            reason, message = reason_and_message(decline)
            if assignment.state is not AssignmentState.OPEN:
                return
            with about_assignment(name):
                log.warning("%s declines %r: %s: %s", client_id, name, reason, message)
            now, run_id = self._clock(), assignment.phase.round.run_id
            end_assignment(assignment, AssignmentState.DECLINED, now, reason, message)
            assignment.decline = envelope.SerializeToString(deterministic=True)
            audit.record(
                session,
                at=now,
                actor=client_uri(federation_id, client_id),
                action=log_entries.DECLINED,
                subject=name,
                detail=reason,
                digest=envelope_digest(envelope),
            )
        self._answered(client_id, name)
        self._changed(run_id)
        count_reply(self._database.tally, client_id, "declined", reason)

    def _receipt(self, admission: Admission, refusal: Refusal | None, now: datetime) -> SignedEnvelope:
        same = repeated(admission.manifest, bound_fields.RECEIPT)
        receipt = ReceiptManifest(**same, envelope=admission.digest, accepted=refusal is None)
        if refusal is not None:
            receipt.reason, receipt.message = refusal.reason, refusal.message
        receipt.created.FromDatetime(now)
        return self._signatures.sign(receipt, self._signing.key)

    def _event(self, admission: Admission, refusal: Refusal | None, now: datetime) -> audit.LogEvent:
        manifest = admission.manifest
        return audit.LogEvent(
            at=now,
            actor=client_uri(manifest.federation_id, manifest.client_id),
            action=log_entries.REFUSED if refusal else log_entries.ACCEPTED,
            subject=manifest.assignment_id,
            outcome=refusal.reason if refusal else "",
            digest=admission.digest,
        )

    def _closed(
        self, name: str, state: AssignmentState, reason: str, deadline: datetime, now: datetime
    ) -> Refusal | None:
        """The reason why an assignment takes no reply; None when it is open."""
        if state is AssignmentState.FULFILLED:
            return Refusal(FULFILLED, f"assignment {name} was fulfilled with another reply")
        if (state is AssignmentState.EXPIRED and reason == "deadline") or (
            state is AssignmentState.OPEN and now > deadline
        ):
            return _late(name, deadline)
        return None if state is AssignmentState.OPEN else _ended(name, state, reason)


def named_assignment(envelope: SignedEnvelope, kind: type[ReplyManifest | DeclineManifest]) -> str:
    """The assignment that a reply or a decline names, for the log, before it is verified; empty if it names none."""
    if envelope.ByteSize() > MAX_ENVELOPE_BYTES:
        return ""
    try:
        name = kind.FromString(envelope.manifest).assignment_id
    except DecodeError:
        return ""
    return name if ASSIGNMENT_ID.fullmatch(name) else ""


def _check_start(on_record: str, start: bytes) -> None:
    """Raises the Refusal `start-ended` for a reply that another start hands in than the one on record."""
    if start and on_record and start.hex() != on_record:
        raise Refusal(
            "start-ended",
            "another start of this client's worker has taken the place of the one that hands in this reply; the reply "
            "stays in the spool, for a start of this home that is taken",
        )


def _ended(assignment_id: str, state: AssignmentState, reason: str) -> Refusal:
    return Refusal("assignment-closed", f"assignment {assignment_id} is {state}: {reason}")


def _late(assignment_id: str, deadline: datetime) -> Refusal:
    return Refusal("deadline", f"assignment {assignment_id} ended at {deadline.isoformat()}")


@lru_cache(maxsize=16)
def _layout(rows: tuple[tuple[str, int, str], ...]) -> Layout:
    return update_layout(rows)


def _foreign(assignment_id: str, *, issued: bool, client_id: str) -> Refusal:
    """The refusal of an assignment that is not the client's own."""
    if issued:
        return Refusal("assignment-client", f"assignment {assignment_id} was not issued to {client_id}")
    shown = assignment_id[:32]  # no mutant: any length that is easy to read
    return Refusal("assignment-unknown", f"there is no assignment {shown!r}")


def _parse(data: bytes) -> ReplyManifest:
    try:
        manifest = ReplyManifest.FromString(data)
    except DecodeError:
        raise Refusal("manifest", "the manifest is not a ReplyManifest") from None
    check_is_time(manifest.created)
    return manifest


def _stored_receipt(session: Session, message: str, envelope: str) -> SignedEnvelope | None:
    """The earlier receipt for the same envelope; None if there is none."""
    reply = session.scalar(select(Reply).where(Reply.envelope_digest == envelope))  # it names the assignment
    if reply is None or not reply.receipt:
        return None
    return _given(reply.receipt, accepted=reply.accepted, reason=reply.reason, message=message)


def _given(receipt: bytes, *, accepted: bool, reason: str, message: str) -> SignedEnvelope:
    """A receipt that was given before, raised as a refusal when the reply was refused."""
    if not accepted:
        raise Refusal(reason, message, signed=receipt)
    return SignedEnvelope.FromString(receipt)
