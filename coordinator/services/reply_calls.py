"""The call of the Federation service that takes a worker's reply in: envelope, payload, receipt.

The rules for replies are in the intake.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from weakref import WeakValueDictionary

from coordinator.members.access.rpc_messages import NEXT_CHUNK_SECONDS, REQUEST_SECONDS, Context, next_message
from coordinator.rounds.replies.intake import Admission, Intake, named_assignment
from coordinator.rounds.replies.reply_counts import begin_counts, count_reply
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

MOST_HEADS = 64  # that are kept until a newer checkpoint is shown


class ReplyCalls(Service):
    """Takes replies in."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._intake = Intake(
            parts.threads.database,
            self._home.signing,
            changed=self._changes.notify,
            replied=self._changes.count_reply,
            answered=self._presence.forget,
            clock=self._clock,
            signatures=parts.rounds.signatures,
        )
        begin_counts(self._database.tally)
        self._threads = parts.threads
        self._uploads = parts.rounds.uploads
        self._transfers = Transfers(self._settings.transfer_bytes, self._settings.transfers, self._database.tally)
        self._enders: dict[str, Callable[[Refusal], None]] = {}  # of uploads under way, by assignment
        self._heads: dict[int, asyncio.Future[LogHead]] = {}  # of the log, by the size that a worker has
        self._heads_shown = 0  # the size of the checkpoint in them
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
            turn_to_assignment(name := named_assignment(first.reply, ReplyManifest))
            admitted, broke_off = await self._admit(caller.name, name, first)
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

    async def _admit(
        self, client_id: str, assignment_id: str, first: messages.SubmitRequest
    ) -> tuple[Admission | SignedEnvelope, bool]:
        """The intake's admission or receipt of a reply, and True if an upload of its payload broke off before.

        No thread is asked if what is known here of the assignment and of its client is enough.
        """
        order, member, given = self._presence.given(client_id, assignment_id), self._access.member(), None
        if order is not None and member is not None:
            given = self._intake.admit_given(first.reply, order, member.signing_key, member.start, first.start)
        if given is not None and self._uploads.alone:
            return given, self._uploads.broke_off(given)

        def admit() -> tuple[Admission | SignedEnvelope, bool]:
            admitted = given or self._intake.admit(client_id, first.reply, first.start)
            return admitted, isinstance(admitted, Admission) and self._uploads.broke_off(admitted)

        return await self._in_thread(admit)

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
        shown = self._sequencer.shown_size
        if size == shown:
            return None
        if size > shown:  # another coordinator has shown it
            return await self._in_thread(self._sequencer.head, size)
        # Many workers have the same one: one thread makes the head for all.
        if self._heads_shown != shown or len(self._heads) >= MOST_HEADS:
            self._heads, self._heads_shown = {}, shown
        if (head := self._heads.get(size)) is None:
            head = self._heads[size] = asyncio.ensure_future(self._in_thread(self._sequencer.head, size))
            head.add_done_callback(lambda done: self._forget_head(size, done))
        return await asyncio.shield(head)

    def _forget_head(self, size: int, done: "asyncio.Future[LogHead]") -> None:
        """Forgets a head that could not be made."""
        if (done.cancelled() or done.exception() is not None) and self._heads.get(size) is done:
            del self._heads[size]
