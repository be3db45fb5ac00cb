"""Handing in what is in the spool, again and again until a receipt that can be verified says how it was taken."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from federation.channels import CHUNK_BYTES, refusal_from_rpc_error, signed_detail
from federation.envelope import envelope_digest, unseal
from federation.member_files import MemberFiles
from federation.refusals import Refusal
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope
from federation.v1.federation_pb2 import SubmitRequest
from federation.v1.federation_pb2_grpc import FederationStub
from worker.backoff import Backoff
from worker.events import Events
from worker.session import ANSWER_SECONDS, SLOWEST_BYTES_PER_SECOND, Session
from worker.spool import Entry, Spool

# No retry of the same envelope can succeed. True where the coordinator still waits for this assignment: it is told
# that nothing will come.
FINAL_REASONS = {
    "assignment-unknown": False,
    "assignment-client": False,
    "assignment-fulfilled": False,
    "assignment-closed": False,
    "deadline": False,
    "key-unknown": True,
    "signature": True,
    "manifest": True,
    "mismatch": True,
    "payload-digest": True,
}
FINAL_LIMITS = ("limit:payload", "limit:manifest")


class ReceiptError(Exception):
    """A receipt that the coordinator did not sign, or that is for something else."""


class Submitter:
    """Empties the spool over the session's channel."""

    def __init__(
        self, *, member: MemberFiles, spool: Spool, session: Session, backoff: Backoff, events: Events
    ) -> None:
        self._member = member
        self._spool = spool
        self._session = session
        self._backoff = backoff
        self._events = events
        self._changed = threading.Condition()
        self._wakes = 0
        self._retry_seconds = 0.0  # what the coordinator asked for
        self._stopping = False

    def wake(self) -> None:
        """There is something new in the spool, or a reason to try again now."""
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
            for entry in self._spool.entries():
                stub = self._session.stub()
                if stub is None or self._stopping:
                    return
                failed |= not self._submit(stub, entry)
            delay = max(self._backoff.delay(), self._retry_seconds) if failed else None
            self._retry_seconds = 0.0
            if not failed:
                self._backoff.reset()
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._wakes != seen, timeout=delay)  # noqa: B023

    def _submit(self, stub: FederationStub, entry: Entry) -> bool:
        """One attempt; False when it has to be made again."""
        manifest = entry.manifest
        size = manifest.payload_bytes
        self._events.tell_of(manifest, "submitting", f"submitting {size} bytes", payload_bytes=size)
        try:
            timeout = ANSWER_SECONDS + manifest.payload_bytes / SLOWEST_BYTES_PER_SECOND
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
        refusal = refusal_from_rpc_error(error)
        self._retry_seconds = max(self._retry_seconds, refusal.retry_seconds)
        fields = {"assignment_id": entry.assignment_id, "reason": refusal.reason, "status": refusal.status}
        text = f"{refusal.status} {refusal.reason}: {refusal.message}"
        stem = refusal.reason.partition(":")[0]
        if stem not in FINAL_REASONS and refusal.reason not in FINAL_LIMITS:
            self._events.warn(
                "submit-failed", f"assignment {entry.assignment_id}: not handed in, trying again ({text})", **fields
            )
            return False
        self._events.warn(
            "dropped", f"assignment {entry.assignment_id}: refused for good, the work is dropped ({text})", **fields
        )
        if FINAL_REASONS.get(stem, True):
            self._session.decline(entry.assignment_id, refusal.reason, refusal.message)
        self._spool.remove(entry.assignment_id)
        return True

    def _acknowledged(self, entry: Entry, receipt: SignedEnvelope) -> bool:
        try:
            manifest = verify_receipt(receipt, entry, self._member)
        except ReceiptError as error:
            self._events.warn(
                "receipt-invalid",
                f"assignment {entry.assignment_id}: {error}; the work stays in the spool",
                assignment_id=entry.assignment_id,
            )
            return False
        self._spool.record(entry, receipt, manifest)
        refused = f"refused, {manifest.reason}: {manifest.message}"
        self._events.tell_of(
            entry.manifest,
            "receipt",
            f"receipt {'accepted' if manifest.accepted else refused}",
            warns=not manifest.accepted,
            accepted=manifest.accepted,
            **({} if manifest.accepted else {"reason": manifest.reason}),
        )
        self._spool.settle(entry)
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
