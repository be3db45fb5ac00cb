"""Submits the replies in the spool, and repeats each until a verified receipt accepts or refuses it.

An upload that breaks off goes on, at the next attempt, where the coordinator says that it broke.
"""

import io
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from federation.monitoring.events import Events
from federation.owners_code import TwoTexts
from federation.process.assignment_log import about_assignment
from federation.record import bound_fields
from federation.record.bound_fields import difference
from federation.refusals import Refusal
from federation.transport.channels import CHUNK_BYTES, RpcRefusal, signed_detail
from federation.transport.chunks import chunk_sizes, submitted
from federation.transport.transfer_times import slowest_seconds
from federation.trust.envelope import envelope_digest
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import LogHead, ReceiptManifest, SignedEnvelope
from federation.v1.federation_pb2 import SubmitRequest, Window
from worker.connection.attendance import ANSWER_SECONDS, Attendance
from worker.connection.backoff import Backoff
from worker.connection.file_calls import FileCalls
from worker.home import with_remedy
from worker.ledgers.left_ledger import LeftLedger, LeftState
from worker.work.local_state import LocalState
from worker.work.spool import Spool, SpoolEntry

# No retry of the same envelope can succeed: the coordinator no longer waits, or gets a decline.
_CLOSED = {"assignment-unknown", "assignment-client", "assignment-fulfilled", "assignment-closed", "deadline"}
_WRONG = {
    "key-unknown",
    "key-ended",
    "signature",
    "manifest",
    "mismatch",
    "limit:payload",
    "limit:manifest",
}
_DROPPED = "refused for good, the work is dropped"


MAX_RECEIPT_BYTES = 64 << 10


class ReceiptError(Exception):
    """A receipt that the coordinator did not sign, or that is for another reply."""


@dataclass(frozen=True)
class Acknowledged:
    """A verified receipt for the reply, which accepts or refuses it."""

    receipt: SignedEnvelope
    manifest: ReceiptManifest


@dataclass(frozen=True)
class Refused:
    """The call was refused, without a receipt.

    Attributes:
        refusal: the coordinator's refusal.
        final: True if no retry of the same envelope can succeed.
        closed: True if the coordinator no longer waits for a reply.
    """

    refusal: RpcRefusal
    final: bool
    closed: bool


@dataclass(frozen=True)
class Unanswered:
    """There is no valid receipt; `message` says why, and is empty if the channel was closed a moment ago."""

    event: str = ""
    message: str = ""


Outcome = Acknowledged | Refused | Unanswered


@dataclass(eq=False)
class Submitter:
    """Empties the spool over the channel of the attendance.

    No reply leaves that is not in the ledger of `left`, on the disk.
    `acknowledged` is called with the signed assignment of a reply before it leaves the spool.
    """

    attendance: Attendance
    spool: Spool
    local_state: LocalState
    left: LeftLedger
    backoff: Backoff
    events: Events
    acknowledged: Callable[[SignedEnvelope], None]
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _wakes: int = field(default=0, init=False)
    _retry_seconds: float = field(default=0.0, init=False)  # the delay that the coordinator asked for
    _stopping: bool = field(default=False, init=False)
    # For each reply, the most bytes that the coordinator has confirmed.
    _arrived: dict[str, int] = field(default_factory=dict, init=False)
    # Replies whose entry could not be written, of which the owner was told.
    _told: set[str] = field(default_factory=set, init=False)

    def wake(self) -> None:
        """Wakes `run`: the spool has a new reply."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends `run`; the replies stay in the spool."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        """Hands in the replies of the spool while the worker attends, until `stop`."""
        while not self._stopping:
            seen = self._wakes
            failed = False
            for entry in self.spool.entries():
                with self.attendance.calling() as files, about_assignment(entry.assignment_id):
                    if files is None or self._stopping:
                        return
                    failed |= not self._submit(files, entry)
            delay = max(self.backoff.delay(), self._retry_seconds) if failed else None
            self._retry_seconds = 0.0
            if not failed:
                self.backoff.reset()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._wakes != seen, timeout=delay)  # noqa: B023

    def _submit(self, files: FileCalls, entry: SpoolEntry) -> bool:
        """Makes one attempt and acts on its outcome. False if it has to be repeated."""
        attendance, arrived = self.attendance, partial(self._note_progress, entry)
        try:
            # On the disk before the first byte leaves: afterwards, a crash would leave no trace of what was sent.
            self.left.keep(entry.envelope, entry.assignment, attendance.now())
        except OSError as error:
            self._not_recorded(entry, "it is not sent before it is on record here", error)
            self.local_state.delayed(entry.manifest.run_id, error)
            return False
        self.local_state.delayed(entry.manifest.run_id, None)
        size = entry.manifest.payload_bytes
        self.events.tell_of(entry.manifest, "submitting", f"submitting {size} bytes", payload_bytes=size)
        outcome = exchange(
            files, entry, attendance.member, attendance.log_size, arrived, attendance.saw_log, attendance.start
        )
        name, reply, events = entry.assignment_id, envelope_digest(entry.envelope), self.events
        if self._stopping and not isinstance(outcome, Acknowledged):
            return False
        match outcome:
            case Unanswered(event, message):
                if message:
                    events.warn(event, f"assignment {name}: {message}", assignment_id=name)
                self._note_sent(entry, reply, event == "receipt-invalid")
                return False
            case Refused(refusal, final, closed):
                event, message = ("dropped", _DROPPED) if final else ("submit-failed", "not handed in, trying again")
                message = f"assignment {name}: {message} ({refusal.status} {refusal.reason}: {refusal.message})"
                events.warn(event, message, assignment_id=name, reason=refusal.reason, status=refusal.status)
                if not final:
                    self._retry_seconds = max(self._retry_seconds, refusal.retry_seconds)
                    self._note_sent(entry, reply, bool(refusal.reason))
                    return False
                with self._recording(entry):
                    state = LeftState.DROPPED if closed else LeftState.DECLINED
                    self.left.end(name, state, refusal.reason, attendance.now())
                if not closed:
                    told = TwoTexts.same(refusal.message)  # the coordinator's own words
                    attendance.decline(name, refusal.reason, told.wire, entry.assignment)
                leave = partial(self.spool.remove, name)
            case Acknowledged(receipt, manifest):
                try:
                    self.left.acknowledge(receipt, manifest)
                except OSError as error:
                    self._not_recorded(entry, "its receipt is not on record here", error)
                    return False
                try:
                    if manifest.accepted:
                        self.local_state.commit(entry)
                except OSError as error:
                    message = f"what this member keeps of the run cannot be written ({error}): make room on the disk"
                    events.disk(f"assignment {name}: {message}", assignment_id=name)
                    return False
                self.spool.record(entry, receipt, manifest)
                accepted, reason = manifest.accepted, {} if manifest.accepted else {"reason": manifest.reason}
                message = "accepted" if accepted else f"refused, {manifest.reason}: {manifest.message}"
                events.tell_of(
                    entry.manifest, "receipt", f"receipt {message}", warns=not accepted, accepted=accepted, **reason
                )
                leave = partial(self.spool.settle, entry)
        self._arrived.pop(name, None)
        self._told.discard(name)
        self.acknowledged(entry.assignment)
        leave()
        return True

    def _note_sent(self, entry: SpoolEntry, reply: str, answered: bool) -> None:
        """Records that the coordinator has got a reply, if it has answered."""
        if answered or entry.assignment_id in self._arrived:
            with self._recording(entry):
                self.left.answered(reply)

    @contextmanager
    def _recording(self, entry: SpoolEntry) -> Iterator[None]:
        """Completes an entry of what left, or tells that it stays as it is: it then says less, and nothing wrong."""
        try:
            yield
        except OSError as error:
            self._not_recorded(entry, "its outcome is not on record here", error)

    def _not_recorded(self, entry: SpoolEntry, what: str, error: OSError) -> None:
        name = entry.assignment_id
        if name not in self._told:  # it is tried again until there is room
            self._told.add(name)
            self.events.disk(f"assignment {name}: {what}: {with_remedy(error)}", assignment_id=name)

    def _note_progress(self, entry: SpoolEntry, arrived: int, begins: bool) -> None:
        """Records the bytes that have arrived. If they are more than ever, the next attempt waits only briefly."""
        name, most = entry.assignment_id, self._arrived.get(entry.assignment_id, 0)
        if begins and arrived:
            text = f"going on with an upload that broke off: {arrived} bytes have arrived"
            self.events.tell_of(entry.manifest, "resuming", text, arrived_bytes=arrived)
        if arrived > most:
            self.backoff.reset()
        self._arrived[name] = max(arrived, most)


def exchange(
    files: FileCalls,
    entry: SpoolEntry,
    member: MemberFiles,
    log_size: int,
    arrived: Callable[[int, bool], None],
    saw_log: Callable[[LogHead], None],
    start: bytes = b"",
) -> Outcome:
    """Hands in a reply once, as far as the coordinator's windows allow, and returns the outcome.

    `log_size` is the number of entries of the coordinator's log that this worker knows. `arrived` gets the number of
    bytes that the coordinator has, and True for its first message in this attempt; `saw_log` gets the checkpoint that
    came with a receipt. `start` is that of this worker.
    """
    try:
        receipt = _send(files, entry, log_size, arrived, saw_log, start)
    except ValueError:  # the channel was closed a moment ago
        return Unanswered()
    except grpc.RpcError as error:
        receipt = signed_detail(error)
        if receipt is None:
            return _refused(member.refusal(error), entry)
    if receipt is None:
        return Unanswered("submit-failed", "the coordinator sent no receipt, trying again")
    try:
        return Acknowledged(receipt, verify_receipt(receipt, entry, member))
    except ReceiptError as error:
        return Unanswered("receipt-invalid", f"{error}; the work stays in the spool")


def _send(
    files: FileCalls,
    entry: SpoolEntry,
    log_size: int,
    arrived: Callable[[int, bool], None],
    saw_log: Callable[[LogHead], None],
    start: bytes,
) -> SignedEnvelope | None:
    """Returns the receipt; None if the coordinator sent none."""
    windows: queue.SimpleQueue[Window | None] = queue.SimpleQueue()
    timeout = ANSWER_SECONDS + slowest_seconds(entry.manifest.payload_bytes)
    try:
        first = True
        for answer in files.submit(_requests(entry, windows, log_size, start), timeout=timeout):
            kind = answer.WhichOneof("message")
            if kind == "receipt":
                if answer.HasField("log"):
                    saw_log(answer.log)
                return answer.receipt
            if kind == "window":  # one of a kind that only a newer coordinator knows is ignored
                arrived(answer.window.offset, first)
                windows.put(answer.window)
                first = False
        return None
    finally:
        windows.put(None)


def _refused(refusal: RpcRefusal, entry: SpoolEntry) -> Refused:
    stem = refusal.reason.partition(":")[0]
    damaged = stem == "payload-digest" and not entry.intact()  # otherwise the damage happened on the way
    final = damaged or not {stem, refusal.reason}.isdisjoint(_CLOSED | _WRONG)
    return Refused(refusal, final, closed=stem in _CLOSED)


def verify_receipt(receipt: SignedEnvelope, entry: SpoolEntry, member: MemberFiles) -> ReceiptManifest:
    """Verifies that a receipt is the coordinator's answer to this very reply.

    Raises:
        ReceiptError: it is not; the message names the first thing that differs.
    """
    if (size := receipt.ByteSize()) > MAX_RECEIPT_BYTES:
        raise ReceiptError(f"the receipt has {size} bytes; at most {MAX_RECEIPT_BYTES}")
    try:
        manifest = member.coordinator.verify(receipt, ReceiptManifest)
    except Refusal as refusal:
        raise ReceiptError(f"the receipt is not signed by this federation's coordinator ({refusal.message})") from None
    if name := difference(entry.manifest, manifest, bound_fields.RECEIPT):
        raise ReceiptError(f"the receipt is for another reply: its {name} is {getattr(manifest, name)!r}")
    if manifest.envelope != envelope_digest(entry.envelope):
        raise ReceiptError("the receipt is for another reply: its envelope digest differs")
    return manifest


def _requests(
    entry: SpoolEntry, windows: "queue.SimpleQueue[Window | None]", log_size: int, start: bytes
) -> Iterator[bytes]:
    """The envelope, then the payload from the first window's offset on, each piece once a window allows it."""
    yield SubmitRequest(reply=entry.envelope, log_size=log_size, start=start).SerializeToString()
    if entry.payload is None:
        return
    with entry.payload.open("rb") if isinstance(entry.payload, Path) else io.BytesIO(entry.payload) as file:
        window = windows.get()
        if window is not None:
            file.seek(window.offset)
        sizes = chunk_sizes()
        while window is not None and file.tell() < entry.manifest.payload_bytes:
            # Several chunks in each window: otherwise, a line would be idle until the next window comes.
            most = max(CHUNK_BYTES, (window.limit - window.offset) // 4)
            while chunk := file.read(max(0, min(next(sizes), most, window.limit - file.tell()))):
                yield submitted(chunk, file.tell() - len(chunk))
            if file.tell() < entry.manifest.payload_bytes:
                window = windows.get()
