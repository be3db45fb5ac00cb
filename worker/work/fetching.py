"""Fetches the blobs of assignments, from the coordinator or from its bucket."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from federation import digests
from federation.monitoring.events import Events
from federation.refusals import Refusal
from federation.tensor_names import first_difference
from federation.training import TrainingStopped
from federation.transport.transfer_times import slowest_seconds
from federation.v1.federation_pb2 import FetchBlobRequest, LocateBlobRequest
from federation.vectors import LENGTH_BYTES, header_length, parse_header
from federation.work.base import Lane
from worker.connection.attendance import ANSWER_SECONDS, Attendance
from worker.connection.backoff import Backoff
from worker.connection.downloads import LEAST_BYTES, BlobUrl, DownloadFailed, download
from worker.site.assignment_checks import COMPARE, CheckedAssignment, Declined, OtherModel
from worker.work.cache import ModelCache, ModelMismatch
from worker.work.work_control import Control

HEADER_SECONDS = 10.0  # for the beginning of a model that is not worked on
PAUSE_SECONDS = 600.0  # after a fault of the bucket, until the next attempt


@dataclass(eq=False)
class Fetcher:
    """Fetches blobs into the caches. The thread of each lane may call.

    Attributes:
        backoff: gives the pauses after downloads from the coordinator that broke off.
        hosts: the addresses "host:port" of buckets that the owner allows.
        clock: gives seconds that only grow.
    """

    attendance: Attendance
    caches: Mapping[Lane, ModelCache]
    backoff: Backoff
    events: Events
    hosts: frozenset[str] = frozenset()
    clock: Callable[[], float] = time.monotonic
    _paused_until: float = field(default=0.0, init=False)  # by the clock
    _told: bool = field(default=False, init=False)  # of a fault, after which no download from the bucket ended well

    def fetch(self, order: CheckedAssignment, digest: str, size: int, control: Control) -> Path:
        """The file of a blob of `size` bytes; a broken download continues where it ended.

        Raises:
            Declined: the coordinator does not give it, or gives other bytes.
            TrainingStopped: the work was stopped.
            DirectoryGone: the worker's directory is.
            OSError: the disk cannot store it.
        """
        reached, mixed = 0, False

        def chunks(offset: int) -> Iterator[bytes | memoryview]:
            nonlocal reached, mixed
            if offset > reached:  # the last attempt brought new bytes, so the next one waits only briefly
                self.backoff.reset()
            reached = offset
            for piece in self._from_bucket(digest, offset, size, control):
                mixed = True
                offset += len(piece)
                yield piece
            if offset < size:
                yield from self._from_coordinator(digest, offset, size, control)

        name = order.manifest.assignment_id
        while not control.stopped():
            self.events.home.check_there()
            try:
                path = self.caches[order.work.lane].get(digest, size, chunks)
            except ModelMismatch as error:
                if not mixed:
                    raise Declined("base-model", str(error)) from error
                mixed = False
                self._failed(f"what was downloaded is not the blob {digest[:23]}...")
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed a moment ago
                refusal = self.attendance.member.refusal(error) if isinstance(error, grpc.RpcError) else None
                if refusal is not None and refusal.reason in ("blob-not-offered", "blob-removed", "offset"):
                    raise Declined("base-model", f"{refusal.reason}: {refusal.message}") from error
                delay = max(self.backoff.delay(), refusal.retry_seconds if refusal is not None else 0.0)
                self.events.warn(
                    "download-broken",
                    f"assignment {name}: the download of the base model broke off, going on in {delay:.1f} s "
                    f"({refusal.message or refusal.status if refusal is not None else error})",
                    assignment_id=name,
                )
                control.pause(delay)
            else:
                self.backoff.reset()
                return path
        raise TrainingStopped

    def document(self, name: str, most: int, control: Control) -> bytes:
        """A document of a run by its digest, of at most `most` bytes; a call that broke off is made again.

        Raises:
            Declined: `scale`: the coordinator does not give it, or gives other bytes.
            TrainingStopped: the work was stopped.
        """
        while not control.stopped():
            try:
                with self.attendance.calling() as files:
                    if files is None:
                        raise TrainingStopped
                    found = bytearray()
                    timeout = ANSWER_SECONDS + slowest_seconds(most)
                    for piece in files.fetch(FetchBlobRequest(digest=name), timeout=timeout):
                        found += piece
                        if control.stopped():
                            raise TrainingStopped
                        if len(found) > most:
                            raise Declined("scale", f"the document {name} has more than {most} bytes")
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed a moment ago
                refusal = self.attendance.member.refusal(error) if isinstance(error, grpc.RpcError) else None
                if refusal is not None and refusal.reason == "blob-not-offered":
                    raise Declined("scale", f"the coordinator does not give the document {name}") from error
                delay = max(self.backoff.delay(), refusal.retry_seconds if refusal is not None else 0.0)
                control.pause(delay)
                continue
            self.backoff.reset()
            if digests.digest(bytes(found), digests.parse(name)[0]) != name:
                raise Declined("scale", f"what the coordinator gives as {name} has another digest")
            return bytes(found)
        raise TrainingStopped

    def compared(self, other: OtherModel) -> Declined:
        """The decline of an assignment with another model, which names the first tensor that differs.

        Only the beginning of the model is fetched. If the coordinator does not give it now, the decline tells the
        sizes in bytes.
        """
        files = self.attendance.files_now()
        header = bytearray()
        try:
            call = None if files is None else files.fetch(FetchBlobRequest(digest=other.digest), timeout=HEADER_SECONDS)
            for piece in call or ():
                header += piece
                if len(header) >= LENGTH_BYTES and len(header) >= LENGTH_BYTES + header_length(header):
                    break
            if call is not None:
                call.cancel()
            theirs, _ = parse_header(bytes(header))
        except (grpc.RpcError, ValueError, Refusal):
            return other
        difference = first_difference(theirs.shapes, other.layout.shapes)
        return Declined(other.reason, f"{difference}: {COMPARE}") if difference else other

    def _from_coordinator(self, digest: str, offset: int, size: int, control: Control) -> Iterator[memoryview]:
        with self.attendance.calling() as files:
            if files is None:
                raise TrainingStopped
            timeout = ANSWER_SECONDS + slowest_seconds(size - offset)
            for piece in files.fetch(FetchBlobRequest(digest=digest, offset=offset), timeout=timeout):
                if control.stopped():
                    raise TrainingStopped
                yield piece

    def _from_bucket(self, digest: str, offset: int, size: int, control: Control) -> Iterator[bytes]:
        """What the bucket gives of the bytes from `offset` on: after a fault not all, and often nothing."""
        if not self.hosts or size - offset < LEAST_BYTES or self.clock() < self._paused_until:
            return
        if not (text := self._located(digest)):
            return
        try:
            yield from download(
                BlobUrl.parse(text, self.hosts),
                offset=offset,
                size=size,
                proxy=self.attendance.member.proxy,
                seconds=ANSWER_SECONDS + slowest_seconds(size - offset),
                stopped=control.stopped,
            )
        except DownloadFailed as error:
            if control.stopped():
                raise TrainingStopped from error
            self._failed(str(error))
        else:
            self._told = False

    def _located(self, digest: str) -> str:
        """The URL of a blob in the bucket; empty if the coordinator gives none."""
        with self.attendance.calling() as files:
            if files is None:
                raise TrainingStopped
            try:
                return files.locate(LocateBlobRequest(digest=digest), timeout=ANSWER_SECONDS).url
            except (grpc.RpcError, ValueError):  # the coordinator says the same to FetchBlob
                return ""

    def _failed(self, problem: str) -> None:
        """Leaves the bucket alone for a while, and tells the owner once of faults that last."""
        self._paused_until = self.clock() + PAUSE_SECONDS
        if not self._told:
            self.events.warn(
                "bucket-failed",
                f"a download from the bucket failed ({problem}): the coordinator sends the bytes; the bucket is tried "
                f"again every {PAUSE_SECONDS / 60:.0f} min",
            )
        self._told = True
