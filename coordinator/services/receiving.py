"""The payload of a reply while it arrives: in one chunk, or in an upload that may break off."""

import asyncio
from collections.abc import Callable
from functools import partial

from coordinator.rounds.replies.content import payload_problem
from coordinator.rounds.replies.intake import Admission
from coordinator.rounds.replies.uploads import ReplyUpload, Upload, Uploads
from coordinator.services.transfers import BLOB_SECONDS, PAYLOAD_BYTES, Transfer
from coordinator.thread_pool import ThreadPool, wait_ended
from federation.refusals import Refusal
from federation.transport.channels import MAX_CHUNK_BYTES
from federation.transport.chunks import Chunk
from federation.transport.payload_check import PayloadCheck
from federation.v1 import federation_pb2 as messages
from federation.v1.common_pb2 import SignedEnvelope
from storage.blobs import BlobStore

Record = Callable[[Admission, Refusal | None], SignedEnvelope]
"""Records a reply with the problem of its payload, if any; returns the receipt."""


class Receiving:
    """A payload that arrives: `window` limits what the caller may send, `take` takes its next request.

    Args:
        admission: of the reply; it has a payload.
        check: of the payload, a new one.
        transfer: its place among the uploads under way.
        uploads: keep the bytes of an upload that breaks off.
        blobs: stores the complete payload.
        threads: write to the disk.

    Attributes:
        complete: the caller has sent everything.
    """

    def __init__(
        self,
        admission: Admission,
        check: PayloadCheck,
        transfer: Transfer,
        *,
        uploads: Uploads,
        blobs: BlobStore,
        threads: ThreadPool,
    ) -> None:
        self._admission = admission
        self._check = check
        self._transfer = transfer
        self._uploads = uploads
        self._blobs = blobs
        self._threads = threads
        self._tally = threads.database.tally
        self._whole: Chunk | None = None  # a chunk with the whole payload
        self._beginning: asyncio.Future[ReplyUpload] | None = None
        self._upload: ReplyUpload | None = None
        self.complete = False

    @property
    def arrived(self) -> int:
        """The number of bytes that an upload has so far."""
        return 0 if self._upload is None else self._upload.arrived

    def window(self) -> messages.Window | None:
        """The next window, if the caller needs one before it can send more."""
        if self._transfer.limit < self._admission.manifest.payload_bytes and self._transfer.allow(self.arrived):
            return messages.Window(offset=self.arrived, limit=self._transfer.limit)
        return None

    async def take(self, request: messages.SubmitRequest | Chunk | None, waited: float) -> None:
        """Takes the next request, which came after `waited` seconds; None if there are no more.

        Raises:
            Refusal: not a chunk, or one beyond the bounds of the upload.
        """
        declared = self._admission.manifest.payload_bytes
        if request is None:
            self.complete = True
            return
        if self._whole is not None:
            raise Refusal("payload-length", f"{declared} bytes were declared, and more arrived")
        chunk = self._check_chunk(request)
        self._transfer.note(self.arrived, waited, len(chunk.data))
        self._tally.add(PAYLOAD_BYTES, "received", amount=len(chunk.data))
        if self._upload is None and len(chunk.data) == declared:
            self._whole = chunk
            return
        upload = await self.begin()
        await self._threads.run(upload.take, chunk.data, chunk.offset)

    async def begin(self) -> ReplyUpload:
        """Begins the upload, or goes on with one that broke off."""
        if self._upload is None:
            self._beginning = asyncio.ensure_future(
                self._threads.run(self._uploads.begin, self._admission, self._check)
            )
            self._upload = await asyncio.shield(self._beginning)
        return self._upload

    async def record(self, record: Record) -> SignedEnvelope:
        """Stores and records the payload that has arrived, and returns the receipt.

        It finishes even if the caller disconnects: otherwise the file would be removed while it is being stored.
        """
        if self._whole is not None:
            work = partial(self._store_whole, self._whole, record)
        else:
            work = partial(self._store, await self.begin(), record)
        return await wait_ended(asyncio.ensure_future(self._threads.run(work)))

    async def end(self) -> None:
        """Ends the upload: the bytes that have arrived are kept, unless the payload is complete."""
        if self._beginning is None:
            return
        await asyncio.wait([self._beginning])  # the thread begins it even if the call has ended meanwhile
        if self._beginning.exception() is None:
            await self._threads.run(self._uploads.end, self._beginning.result())

    def _store_whole(self, chunk: Chunk, record: Record) -> SignedEnvelope:
        manifest = self._admission.manifest
        with self._blobs.writer(hash=False) as writer:
            upload = Upload(writer, self._check, manifest.payload, manifest.payload_bytes)
            upload.take(chunk.data, chunk.offset)
            return self._store(upload, record)

    def _store(self, upload: Upload, record: Record) -> SignedEnvelope:
        upload.finish()
        problem = payload_problem(upload.check, self._admission.kind, self._admission.limits)
        if problem is None:
            with self._tally.timing(BLOB_SECONDS, "store"):
                upload.store()
        return record(self._admission, problem)

    def _check_chunk(self, request: messages.SubmitRequest | Chunk) -> Chunk:
        """The chunk that a request is. Raises a Refusal unless it is one within the bounds of the upload."""
        if not isinstance(request, Chunk):
            raise Refusal("header", "only chunks may follow the signed reply")
        if len(request.data) > MAX_CHUNK_BYTES:
            raise Refusal("limit:chunk", f"a chunk of {len(request.data)} bytes; at most {MAX_CHUNK_BYTES}")
        if self.arrived + len(request.data) > self._transfer.limit:
            raise Refusal("limit:window", f"a chunk beyond byte {self._transfer.limit}, the limit of the last window")
        return request
