"""The call of the Federation service that takes a worker's reply in: envelope, payload, receipt.

The rules for replies are in the intake.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from weakref import WeakValueDictionary

from coordinator.members.messages import NEXT_CHUNK_SECONDS, REQUEST_SECONDS, Context, next_message
from coordinator.rounds.content import payload_problem
from coordinator.rounds.intake import Admission, Intake
from coordinator.rounds.uploads import ReplyUpload, Upload
from coordinator.services.base import Parts, Service
from coordinator.services.transfers import Transfer, Transfers
from coordinator.threads import wait_ended
from federation.channels import MAX_CHUNK_BYTES
from federation.chunks import Chunk
from federation.payload_check import PayloadCheck
from federation.refusals import Refusal
from federation.v1 import federation_pb2 as messages
from federation.v1.common_pb2 import LogHead, SignedEnvelope


class ReplyCalls(Service):
    """Takes replies in."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._intake = Intake(
            parts.threads.database,
            self._home.signing,
            changed=self._supervisor.notify,
            replied=self._supervisor.count_reply,
            clock=self._clock,
            signatures=self._supervisor.signatures,
        )
        self._uploads = parts.uploads
        self._transfers = Transfers(self._settings.transfer_bytes, self._settings.transfers)
        self._enders: dict[str, Callable[[Refusal], None]] = {}  # of uploads under way, by assignment
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # likewise

    async def Submit(
        self, request_iterator: AsyncIterator[messages.SubmitRequest | Chunk], context: Context
    ) -> AsyncIterator[messages.SubmitResponse]:
        """Takes a reply in: envelope, payload, receipt."""
        caller = self._access.caller()
        first = await next_message(request_iterator, REQUEST_SECONDS)
        if not isinstance(first, messages.SubmitRequest) or not first.HasField("reply"):
            raise Refusal("header", "a submission must begin with the signed reply; the payload follows in chunks")
        admitted, broke_off = await self._in_thread(self._admit, caller.name, first.reply)
        if isinstance(admitted, SignedEnvelope):
            yield messages.SubmitResponse(receipt=admitted, log=await self._newer_log(first.log_size))
            return
        if admitted.layout is None:
            if await next_message(request_iterator, NEXT_CHUNK_SECONDS) is not None:
                raise Refusal("payload-length", "0 bytes were declared, and more arrived")
            receipt = await self._in_thread(self._intake.record, admitted, None)
        else:
            check = PayloadCheck(admitted.layout, admitted.manifest.payload.partition(":")[0])
            size = admitted.manifest.payload_bytes
            place = self._transfers.place(caller.name, self._access.ender())
            async with self._only_upload(admitted.manifest.assignment_id) as all_arrived, place as transfer:
                request = None
                if not broke_off:
                    transfer.allow(0)
                    yield messages.SubmitResponse(window=messages.Window(offset=0, limit=transfer.limit))
                    request = await self._timed_chunk(request_iterator, admitted, 0, transfer)
                if isinstance(request, Chunk) and len(request.data) == size:
                    chunk = self._must_be_chunk(request, 0, transfer)
                    if await self._next_chunk(request_iterator, admitted) is not None:
                        raise Refusal("payload-length", f"{size} bytes were declared, and more arrived")
                    all_arrived()
                    receipt = await self._in_thread(self._record_whole, admitted, check, chunk)
                else:
                    async with self._upload(admitted, check) as upload:
                        while True:
                            arrived = upload.arrived
                            if transfer.limit < size and transfer.allow(arrived):
                                window = messages.Window(offset=arrived, limit=transfer.limit)
                                yield messages.SubmitResponse(window=window)
                            if request is None:
                                request = await self._timed_chunk(request_iterator, admitted, arrived, transfer)
                            if request is None:
                                break
                            chunk = self._must_be_chunk(request, arrived, transfer)
                            await self._in_thread(upload.take, chunk.data, chunk.offset)
                            request = None
                        all_arrived()
                        # To its end also if the caller goes: otherwise the file is removed while it is being stored.
                        recording = asyncio.ensure_future(self._in_thread(self._record, admitted, upload))
                        receipt = await wait_ended(recording)
        yield messages.SubmitResponse(receipt=receipt, log=await self._newer_log(first.log_size))

    def _admit(self, client_id: str, reply: SignedEnvelope) -> tuple[Admission | SignedEnvelope, bool]:
        """What the intake says of a reply, and whether an upload of its payload broke off before."""
        admitted = self._intake.admit(client_id, reply)
        return admitted, isinstance(admitted, Admission) and self._uploads.broke_off(admitted)

    def _record_whole(self, admitted: Admission, check: PayloadCheck, chunk: Chunk) -> SignedEnvelope:
        """Stores and records a payload that came in one chunk."""
        manifest = admitted.manifest
        with self._blobs.writer(hash=False) as writer:
            upload = Upload(writer, check, manifest.payload, manifest.payload_bytes)
            upload.take(chunk.data, chunk.offset)
            return self._record(admitted, upload)

    def _record(self, admitted: Admission, upload: Upload) -> SignedEnvelope:
        """Stores and records a payload that has arrived."""
        upload.finish()
        problem = payload_problem(upload.check, admitted.kind, admitted.limits)
        if problem is None:
            upload.store()
        return self._intake.record(admitted, problem)

    @asynccontextmanager
    async def _upload(self, admitted: Admission, check: PayloadCheck) -> AsyncIterator[ReplyUpload]:
        """The upload of a reply's payload, begun or gone on with."""
        beginning = asyncio.ensure_future(self._in_thread(self._uploads.begin, admitted, check))
        try:
            yield await asyncio.shield(beginning)
        finally:
            await wait_ended(asyncio.create_task(self._end_upload(beginning)))

    async def _end_upload(self, beginning: "asyncio.Future[ReplyUpload]") -> None:
        await asyncio.wait([beginning])  # a thread begins it also for a call that was ended meanwhile
        if beginning.exception() is None:
            await self._in_thread(self._uploads.end, beginning.result())

    @asynccontextmanager
    async def _only_upload(self, assignment_id: str) -> AsyncIterator[Callable[[], None]]:
        """One upload of an assignment at a time: the newer one ends the older, whose caller may be gone.

        Yields a function, to be called when all has arrived: from then on a newer one waits in place of ending this.
        """
        end = self._access.ender()
        older = self._enders.get(assignment_id)
        self._enders[assignment_id] = end
        if older is not None:
            older(Refusal("superseded", f"another upload for assignment {assignment_id} has begun"))
        turn = self._turns.setdefault(assignment_id, asyncio.Lock())

        def arrived() -> None:
            if self._enders.get(assignment_id) is end:
                del self._enders[assignment_id]

        try:
            async with turn:
                yield arrived
        finally:
            arrived()

    @staticmethod
    def _must_be_chunk(request: messages.SubmitRequest | Chunk, arrived: int, transfer: Transfer) -> Chunk:
        """The chunk that a request is. Raises a Refusal unless it is one within the bounds of the upload."""
        if not isinstance(request, Chunk):
            raise Refusal("header", "only chunks may follow the signed reply")
        if len(request.data) > MAX_CHUNK_BYTES:
            raise Refusal("limit:chunk", f"a chunk of {len(request.data)} bytes; at most {MAX_CHUNK_BYTES}")
        if arrived + len(request.data) > transfer.limit:
            raise Refusal("limit:window", f"a chunk beyond byte {transfer.limit}, the limit of the last window")
        return request

    async def _timed_chunk(
        self,
        requests: AsyncIterator[messages.SubmitRequest | Chunk],
        admitted: Admission,
        arrived: int,
        transfer: Transfer,
    ) -> messages.SubmitRequest | Chunk | None:
        """The next request; the transfer is told how long a chunk took."""
        began = monotonic()
        request = await self._next_chunk(requests, admitted)
        if isinstance(request, Chunk):
            transfer.note(arrived, monotonic() - began, len(request.data))
        return request

    async def _next_chunk(
        self, requests: AsyncIterator[messages.SubmitRequest | Chunk], admitted: Admission
    ) -> messages.SubmitRequest | Chunk | None:
        left = max(0.0, (admitted.deadline - self._clock()).total_seconds())
        # A little longer than is left, so that the clock says without doubt that the time is over.
        request = await next_message(requests, min(left + 0.1, NEXT_CHUNK_SECONDS))
        admitted.must_be_in_time(self._clock())
        return request

    async def _newer_log(self, size: int) -> LogHead | None:
        """The newest checkpoint for a worker that has told of one of this size; None if it is that one."""
        return None if size == self._sequencer.shown_size else await self._in_thread(self._sequencer.head, size)
