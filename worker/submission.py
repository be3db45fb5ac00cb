"""Submits the replies in the spool, and repeats each until a verified receipt accepts or refuses it.

An upload that breaks off goes on, at the next attempt, where the coordinator says that it broke.
"""

import io
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from federation.channels import CHUNK_BYTES, signed_detail
from federation.chunks import submitted
from federation.digests import digest, file_digest
from federation.envelope import envelope_digest
from federation.member_files import MemberFiles
from federation.record import bindings
from federation.record.bindings import difference
from federation.refusals import Refusal
from federation.transfers import slowest_seconds
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope
from federation.v1.federation_pb2 import SubmitRequest, Window
from worker.attendance import ANSWER_SECONDS, Attendance
from worker.backoff import Backoff
from worker.events import Events
from worker.files import FileCalls
from worker.kept import Keeper
from worker.spool import Entry, Spool

# No retry of the same envelope can succeed. The coordinator waits no longer, or is told that nothing will come.
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


class ReceiptError(Exception):
    """A receipt that the coordinator did not sign, or that is for something else."""


@dataclass(eq=False)
class Submitter:
    """Empties the spool over the channel of the attendance.

    `acknowledged` is called with the signed assignment of a reply before it leaves the spool.
    """

    attendance: Attendance
    spool: Spool
    keeper: Keeper
    backoff: Backoff
    events: Events
    acknowledged: Callable[[SignedEnvelope], None]
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _wakes: int = field(default=0, init=False)
    _retry_seconds: float = field(default=0.0, init=False)  # what the coordinator asked for
    _stopping: bool = field(default=False, init=False)
    # The most that had arrived of each reply, by the coordinator's word.
    _arrived: dict[str, int] = field(default_factory=dict, init=False)

    def wake(self) -> None:
        """Tells `run` that something new is in the spool."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends `run`; what is in the spool stays there."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        """Hands in whatever is in the spool, whenever the worker attends, until `stop`."""
        while not self._stopping:
            seen = self._wakes
            failed = False
            for entry in self.spool.entries():
                with self.attendance.calling() as files:
                    if files is None or self._stopping:
                        return
                    failed |= not self._submit(files, entry)
            delay = max(self.backoff.delay(), self._retry_seconds) if failed else None
            self._retry_seconds = 0.0
            if not failed:
                self.backoff.reset()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._wakes != seen, timeout=delay)  # noqa: B023

    def _submit(self, files: FileCalls, entry: Entry) -> bool:
        """One attempt; False when it has to be made again."""
        manifest = entry.manifest
        size = manifest.payload_bytes
        self.events.tell_of(manifest, "submitting", f"submitting {size} bytes", payload_bytes=size)
        try:
            receipt = self._exchange(files, entry)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed a moment ago
            return self._refused(entry, error)
        if receipt is None:
            text = f"assignment {entry.assignment_id}: the coordinator sent no receipt, trying again"
            self.events.warn("submit-failed", text, assignment_id=entry.assignment_id)
            return False
        return self._acknowledged(entry, receipt)

    def _exchange(self, files: FileCalls, entry: Entry) -> SignedEnvelope | None:
        """Sends a reply as far as the coordinator's windows allow; returns the receipt, None if there was none."""
        windows: queue.SimpleQueue[Window | None] = queue.SimpleQueue()
        timeout = ANSWER_SECONDS + slowest_seconds(entry.manifest.payload_bytes)
        try:
            for number, answer in enumerate(
                files.submit(_requests(entry, windows, self.attendance.log_size), timeout=timeout)
            ):
                if answer.WhichOneof("message") == "receipt":
                    if answer.HasField("log"):
                        self.attendance.saw_log(answer.log)
                    return answer.receipt
                self._note_progress(entry, answer.window.offset, begins=number == 0)
                windows.put(answer.window)
            return None
        finally:
            windows.put(None)

    def _note_progress(self, entry: Entry, arrived: int, *, begins: bool) -> None:
        """After an attempt with which more has arrived than ever, the next one need not wait for long."""
        name, most = entry.assignment_id, self._arrived.get(entry.assignment_id, 0)
        if begins and arrived:
            text = f"going on with an upload that broke off: {arrived} bytes have arrived"
            self.events.tell_of(entry.manifest, "resuming", text, arrived_bytes=arrived)
        if arrived > most:
            self.backoff.reset()
        self._arrived[name] = max(arrived, most)

    def _refused(self, entry: Entry, error: grpc.RpcError | ValueError) -> bool:
        if self._stopping or isinstance(error, ValueError):
            return False
        receipt = signed_detail(error)
        if receipt is not None:
            return self._acknowledged(entry, receipt)
        refusal = self.attendance.member.refusal(error)
        self._retry_seconds = max(self._retry_seconds, refusal.retry_seconds)
        fields = {"assignment_id": entry.assignment_id, "reason": refusal.reason, "status": refusal.status}
        text = f"{refusal.status} {refusal.reason}: {refusal.message}"
        stem = refusal.reason.partition(":")[0]
        damaged = stem == "payload-digest" and not _intact(entry)  # otherwise the damage happened on the way
        if not damaged and {stem, refusal.reason}.isdisjoint(_CLOSED | _WRONG):
            self.events.warn(
                "submit-failed", f"assignment {entry.assignment_id}: not handed in, trying again ({text})", **fields
            )
            return False
        self.events.warn(
            "dropped", f"assignment {entry.assignment_id}: refused for good, the work is dropped ({text})", **fields
        )
        if stem not in _CLOSED:
            self.attendance.decline(entry.assignment_id, refusal.reason, refusal.message, entry.assignment)
        self._end(entry)
        self.spool.remove(entry.assignment_id)
        return True

    def _acknowledged(self, entry: Entry, receipt: SignedEnvelope) -> bool:
        try:
            manifest = verify_receipt(receipt, entry, self.attendance.member)
        except ReceiptError as error:
            self.events.warn(
                "receipt-invalid",
                f"assignment {entry.assignment_id}: {error}; the work stays in the spool",
                assignment_id=entry.assignment_id,
            )
            return False
        if manifest.accepted:
            try:
                self.keeper.commit(entry)
            except OSError as error:
                words = f"what this member keeps of the run cannot be written ({error}): make room on the disk"
                self.events.warn(
                    "disk", f"assignment {entry.assignment_id}: {words}", assignment_id=entry.assignment_id
                )
                return False
        self.spool.record(entry, receipt, manifest)
        refused = f"refused, {manifest.reason}: {manifest.message}"
        self.events.tell_of(
            entry.manifest,
            "receipt",
            f"receipt {'accepted' if manifest.accepted else refused}",
            warns=not manifest.accepted,
            accepted=manifest.accepted,
            **({} if manifest.accepted else {"reason": manifest.reason}),
        )
        self._end(entry)
        self.spool.settle(entry)
        return True

    def _end(self, entry: Entry) -> None:
        self._arrived.pop(entry.assignment_id, None)
        self.acknowledged(entry.assignment)


def verify_receipt(receipt: SignedEnvelope, entry: Entry, member: MemberFiles) -> ReceiptManifest:
    """Verifies that a receipt is the coordinator's answer to this very reply.

    Raises:
        ReceiptError: it is not; the message names the first thing that differs.
    """
    try:
        manifest = member.coordinator.unseal(receipt, ReceiptManifest)
    except Refusal as refusal:
        raise ReceiptError(f"the receipt is not signed by this federation's coordinator ({refusal.message})") from None
    if name := difference(entry.manifest, manifest, bindings.RECEIPT):
        raise ReceiptError(f"the receipt is for another reply: its {name} is {getattr(manifest, name)!r}")
    if manifest.envelope != envelope_digest(entry.envelope):
        raise ReceiptError("the receipt is for another reply: its envelope digest differs")
    return manifest


def _intact(entry: Entry) -> bool:
    """Whether the payload still has the digest that was signed."""
    try:
        found = file_digest(entry.payload) if isinstance(entry.payload, Path) else digest(entry.payload or b"")
    except OSError:
        return False
    return found == entry.manifest.payload


def _requests(entry: Entry, windows: "queue.SimpleQueue[Window | None]", log_size: int) -> Iterator[bytes]:
    """The envelope, then the payload from the first window's offset on, each piece once a window allows it."""
    yield SubmitRequest(reply=entry.envelope, log_size=log_size).SerializeToString()
    if entry.payload is None:
        return
    with entry.payload.open("rb") if isinstance(entry.payload, Path) else io.BytesIO(entry.payload) as file:
        window = windows.get()
        if window is not None:
            file.seek(window.offset)
        while window is not None and file.tell() < entry.manifest.payload_bytes:
            while chunk := file.read(max(0, min(CHUNK_BYTES, window.limit - file.tell()))):
                yield submitted(chunk, file.tell() - len(chunk))
            if file.tell() < entry.manifest.payload_bytes:
                window = windows.get()
