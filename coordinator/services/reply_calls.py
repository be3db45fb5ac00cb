"""The call of the Federation service that takes a worker's reply in: envelope, payload, receipt.

The rules for replies are in the intake.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from weakref import WeakValueDictionary

from coordinator.members.access.rpc_messages import NEXT_CHUNK_SECONDS, REQUEST_SECONDS, Context, next_message
from coordinator.rounds.replies.intake import Admission, Intake, begin_counts, count_reply, named_assignment
from coordinator.services.base import Parts, Service
from coordinator.services.receiving import Receiving
from coordinator.services.transfers import Transfers
from coordinator.thread_pool import wait_ended
from federation.process.assignment_log import turn_to_assignment
from federation.refusals import Refusal
from federation.transport.chunks import Chunk
from federation.transport.payload_check import PayloadCheck
from federation.v1 import federation_pb2 as messages
from federation.v1.common_pb2 import LogHead, ReplyManifest, SignedEnvelope
from federation.vectors import Layout


class ReplyCalls(Service):
    """Takes replies in."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._intake = Intake(
            parts.threads.database,
            self._home.signing,
            changed=self._changes.notify,
            replied=self._changes.count_reply,
            clock=self._clock,
            signatures=parts.rounds.signatures,
        )
        begin_counts(self._database.tally)
        self._threads = parts.threads
        self._uploads = parts.rounds.uploads
        self._transfers = Transfers(self._settings.transfer_bytes, self._settings.transfers, self._database.tally)
        self._enders: dict[str, Callable[[Refusal], None]] = {}  # of uploads under way, by assignment
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # likewise

    async def Submit(
        self, request_iterator: AsyncIterator[messages.SubmitRequest | Chunk], context: Context
    ) -> AsyncIterator[messages.SubmitResponse]:
        """Takes a reply in: envelope, payload, receipt."""
        caller = self._access.caller()
        with self._counted_refusals(caller.name):
            first = await next_message(request_iterator, REQUEST_SECONDS)
            if not isinstance(first, messages.SubmitRequest) or not first.HasField("reply"):
                raise Refusal("header", "a submission must begin with the signed reply; the payload follows in chunks")
            turn_to_assignment(named_assignment(first.reply, ReplyManifest))
            admitted, broke_off = await self._in_thread(self._admit, caller.name, first)
            if isinstance(admitted, SignedEnvelope):
                receipt = admitted
            elif admitted.layout is None:
                if await next_message(request_iterator, NEXT_CHUNK_SECONDS) is not None:
                    raise Refusal("payload-length", "0 bytes were declared, and more arrived")
                receipt = await self._in_thread(self._intake.record, admitted, None)
            else:
                async with self._receiving(caller.name, admitted, admitted.layout) as (payload, all_arrived):
                    if broke_off:
                        await payload.begin()
                    while not payload.complete:
                        if (window := payload.window()) is not None:
                            yield messages.SubmitResponse(window=window)
                        began = monotonic()
                        request = await self._next_chunk(request_iterator, admitted)
                        await payload.take(request, monotonic() - began)
                    all_arrived()
                    receipt = await payload.record(self._intake.record)
            yield messages.SubmitResponse(receipt=receipt, log=await self._newer_log(first.log_size))

    @contextmanager
    def _counted_refusals(self, client_id: str) -> Iterator[None]:
        """Counts the refusal that ends the block."""
        try:
            yield
        except Refusal as refusal:
            count_reply(self._database.tally, client_id, "refused", refusal.reason)
            raise

    def _admit(self, client_id: str, first: messages.SubmitRequest) -> tuple[Admission | SignedEnvelope, bool]:
        """The intake's admission or receipt of a reply, and True if an upload of its payload broke off before."""
        admitted = self._intake.admit(client_id, first.reply, first.start)
        return admitted, isinstance(admitted, Admission) and self._uploads.broke_off(admitted)

    @asynccontextmanager
    async def _receiving(
        self, client_id: str, admitted: Admission, layout: Layout
    ) -> AsyncIterator[tuple[Receiving, Callable[[], None]]]:
        """The payload of an admitted reply, and a function to be called when all of it has arrived."""
        check = PayloadCheck(layout, admitted.manifest.payload.partition(":")[0])
        reserved = self._transfers.place(client_id, self._access.ender())
        async with self._only_upload(admitted.manifest.assignment_id) as all_arrived, reserved as transfer:
            payload = Receiving(
                admitted, check, transfer, uploads=self._uploads, blobs=self._blobs, threads=self._threads
            )
            try:
                yield payload, all_arrived
            finally:
                await wait_ended(asyncio.create_task(payload.end()))

    @asynccontextmanager
    async def _only_upload(self, assignment_id: str) -> AsyncIterator[Callable[[], None]]:
        """One upload of an assignment at a time: the newer one ends the older, whose caller may be gone.

        Yields a function to be called when the payload has arrived: from then on a newer upload waits for this one.
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

    async def _next_chunk(
        self, requests: AsyncIterator[messages.SubmitRequest | Chunk], admitted: Admission
    ) -> messages.SubmitRequest | Chunk | None:
        left = max(0.0, (admitted.deadline - self._clock()).total_seconds())
        # A little longer than is left, so that the clock has certainly passed the deadline.
        request = await next_message(requests, min(left + 0.1, NEXT_CHUNK_SECONDS))
        admitted.check_in_time(self._clock())
        return request

    async def _newer_log(self, size: int) -> LogHead | None:
        """The newest checkpoint for a worker whose last one has this size; None if that is the newest."""
        return None if size == self._sequencer.shown_size else await self._in_thread(self._sequencer.head, size)
