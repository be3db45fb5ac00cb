"""Submits what is in the spool, and repeats it until a verified receipt says whether it was accepted."""

import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from federation.channels import CHUNK_BYTES, signed_detail
from federation.envelope import envelope_digest, unseal
from federation.member_files import MemberFiles
from federation.refusals import Refusal
from federation.transfers import slowest_seconds
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope
from federation.v1.federation_pb2 import SubmitRequest
from federation.v1.federation_pb2_grpc import FederationStub
from worker.backoff import Backoff
from worker.events import Events
from worker.session import ANSWER_SECONDS, Session
from worker.spool import Entry, Spool

# No retry of the same envelope can succeed. The coordinator waits no longer, or is told that nothing will come.
_CLOSED = {"assignment-unknown", "assignment-client", "assignment-fulfilled", "assignment-closed", "deadline"}
_WRONG = {"key-unknown", "signature", "manifest", "mismatch", "payload-digest", "limit:payload", "limit:manifest"}


class ReceiptError(Exception):
    """A receipt that the coordinator did not sign, or that is for something else."""


@dataclass(eq=False, kw_only=True)
class Submitter:
    """Empties the spool over the session's channel.

    `acknowledged` is called with the signed assignment of a reply before it leaves the spool.
    """

    member: MemberFiles
    spool: Spool
    session: Session
    backoff: Backoff
    events: Events
    acknowledged: Callable[[SignedEnvelope], None]
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _wakes: int = field(default=0, init=False)
    _retry_seconds: float = field(default=0.0, init=False)  # what the coordinator asked for
    _stopping: bool = field(default=False, init=False)

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
                stub = self.session.stub()
                if stub is None or self._stopping:
                    return
                failed |= not self._submit(stub, entry)
            delay = max(self.backoff.delay(), self._retry_seconds) if failed else None
            self._retry_seconds = 0.0
            if not failed:
                self.backoff.reset()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._wakes != seen, timeout=delay)  # noqa: B023

    def _submit(self, stub: FederationStub, entry: Entry) -> bool:
        """One attempt; False when it has to be made again."""
        manifest = entry.manifest
        size = manifest.payload_bytes
        self.events.tell_of(manifest, "submitting", f"submitting {size} bytes", payload_bytes=size)
        try:
            timeout = ANSWER_SECONDS + slowest_seconds(manifest.payload_bytes)
            receipt = stub.Submit(_requests(entry), timeout=timeout).receipt
        except (grpc.RpcError, ValueError) as error:  # ValueError: the session closed the channel a moment ago
            return self._refused(entry, error)
        return self._acknowledged(entry, receipt)

    def _refused(self, entry: Entry, error: grpc.RpcError | ValueError) -> bool:
        if self._stopping or isinstance(error, ValueError):
            return False
        receipt = signed_detail(error)
        if receipt is not None:
            return self._acknowledged(entry, receipt)
        refusal = self.member.refusal(error)
        self._retry_seconds = max(self._retry_seconds, refusal.retry_seconds)
        fields = {"assignment_id": entry.assignment_id, "reason": refusal.reason, "status": refusal.status}
        text = f"{refusal.status} {refusal.reason}: {refusal.message}"
        stem = refusal.reason.partition(":")[0]
        if {stem, refusal.reason}.isdisjoint(_CLOSED | _WRONG):
            self.events.warn(
                "submit-failed", f"assignment {entry.assignment_id}: not handed in, trying again ({text})", **fields
            )
            return False
        self.events.warn(
            "dropped", f"assignment {entry.assignment_id}: refused for good, the work is dropped ({text})", **fields
        )
        if stem not in _CLOSED:
            self.session.decline(entry.assignment_id, refusal.reason, refusal.message)
        self.acknowledged(entry.assignment)
        self.spool.remove(entry.assignment_id)
        return True

    def _acknowledged(self, entry: Entry, receipt: SignedEnvelope) -> bool:
        try:
            manifest = verify_receipt(receipt, entry, self.member)
        except ReceiptError as error:
            self.events.warn(
                "receipt-invalid",
                f"assignment {entry.assignment_id}: {error}; the work stays in the spool",
                assignment_id=entry.assignment_id,
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
        self.acknowledged(entry.assignment)
        self.spool.settle(entry)
        return True


def verify_receipt(receipt: SignedEnvelope, entry: Entry, member: MemberFiles) -> ReceiptManifest:
    """Verifies that a receipt is the coordinator's answer to this very reply.

    Raises:
        ReceiptError: it is not; the message names the first thing that differs.
    """
    try:
        manifest = unseal(receipt, ReceiptManifest, member.coordinator_key)
    except Refusal as refusal:
        raise ReceiptError(f"the receipt is not signed by this federation's coordinator ({refusal.message})") from None
    for name in ("federation_id", "run_id", "round", "phase", "assignment_id", "client_id", "base_model", "payload"):
        if getattr(manifest, name) != getattr(entry.manifest, name):
            raise ReceiptError(f"the receipt is for another reply: its {name} is {getattr(manifest, name)!r}")
    if manifest.envelope != envelope_digest(entry.envelope):
        raise ReceiptError("the receipt is for another reply: its envelope digest differs")
    return manifest


def _requests(entry: Entry) -> Iterator[SubmitRequest]:
    yield SubmitRequest(update=entry.envelope)
    if entry.payload is not None:
        with entry.payload.open("rb") if isinstance(entry.payload, Path) else io.BytesIO(entry.payload) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield SubmitRequest(chunk=chunk)
