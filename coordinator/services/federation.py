"""The workers' service: attendance, blobs, replies. Thin: the rules are in the intake, the rounds in the conductor."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import BinaryIO

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509 import Certificate
from sqlalchemy import or_, select

from coordinator.condition import Condition
from coordinator.members.access import Access, Caller
from coordinator.members.enrollment import Authority
from coordinator.members.limits import DECLINE, MESSAGE
from coordinator.members.renewal import renew, retire_older
from coordinator.removed import removed_offer
from coordinator.rounds.intake import Admission, Intake
from coordinator.rounds.presence import Assigned, Attendance, Message, Presence
from coordinator.services.calls import FIRST_MESSAGE_SECONDS, NEXT_CHUNK_SECONDS, Threads, next_message
from coordinator.services.stream_words import Introduction, declined, introduction
from federation.certificates import pem
from federation.channels import CHUNK_BYTES, MAX_CHUNK_BYTES
from federation.digests import parse
from federation.envelope import seal
from federation.payload_check import PayloadCheck
from federation.refusals import Refusal
from federation.v1 import federation_pb2_grpc
from federation.v1.common_pb2 import SignedEnvelope, TimeManifest
from federation.v1.federation_pb2 import (
    AttendRequest,
    AttendResponse,
    FetchBlobRequest,
    FetchBlobResponse,
    RenewRequest,
    RenewResponse,
    SubmitRequest,
    SubmitResponse,
    Welcome,
)
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore, BlobWriter
from storage.database import Database
from storage.models import Assignment, AssignmentState, Client, ClientState, Input

log = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3
MAX_NONCE_BYTES = 64


class FederationService(federation_pb2_grpc.FederationServicer):
    """Serves workers.

    Args:
        database: where facts are kept.
        blobs: where models and payloads are kept.
        presence: who attends.
        intake: what must hold before a reply counts.
        blob_failed: told of a blob that an assignment promised and that is missing or damaged.
        access: who may call.
        condition: where faults met in a stream are noted.
        executor: threads for the database and the disk, so that the event loop never waits for either.
        authority: issues certificates.
        signing_key: the coordinator's.
        restored: the newest signed statement that a backup was restored, if there is one.
        heartbeat_seconds: how often a worker gives a sign of life.
        keep_rounds: how many of the last rounds of each run keep their models and updates; 0 for all.
        clock: the time, aware.
    """

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        presence: Presence,
        intake: Intake,
        blob_failed: Callable[[str, Exception], None],
        access: Access,
        condition: Condition,
        executor: Executor,
        authority: Authority,
        signing_key: Ed25519PrivateKey,
        restored: Callable[[], SignedEnvelope | None],
        heartbeat_seconds: float,
        keep_rounds: int,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._presence = presence
        self._intake = intake
        self._blob_failed = blob_failed
        self._access = access
        self._condition = condition
        self._in_thread = Threads(executor).run
        self._authority = authority
        self._signing_key = signing_key
        self._restored = restored
        self._heartbeat_seconds = heartbeat_seconds
        self._keep_rounds = keep_rounds
        self._clock = clock
        self._uploads: dict[str, Callable[[Refusal], None]] = {}  # what ends them, by assignment

    # --- attendance

    async def Attend(  # noqa: N802 - the name of the rpc
        self,
        request_iterator: AsyncIterator[AttendRequest],
        context: grpc.aio.ServicerContext[AttendRequest, AttendResponse],
    ) -> AsyncIterator[AttendResponse]:
        """Holds a worker's stream: greets it, hands it work, hears its heartbeats."""
        caller = await self._access.caller(context, kind="client")
        client_id = caller.name
        first = await next_message(request_iterator, FIRST_MESSAGE_SECONDS)
        if first is None or first.WhichOneof("message") != "hello":
            raise Refusal("hello", "the stream must begin with a Hello")
        if len(first.hello.nonce) > MAX_NONCE_BYTES:
            raise Refusal("hello", f"a nonce of {len(first.hello.nonce)} bytes; at most {MAX_NONCE_BYTES}")
        said = introduction(first.hello)
        attendance = Attendance(
            client_id=client_id,
            tasks=said.tasks,
            objectives=said.objectives,
            loop=asyncio.get_running_loop(),
            last_seen=self._clock(),
        )
        await self._in_thread(self._note_hello, attendance, said, caller)
        # Joined first, read second: an assignment made in between is said twice rather than never.
        self._presence.join(attendance)
        log.info("%s attends with %s", client_id, ", ".join(attendance.tasks) or "no task")
        listener = asyncio.create_task(self._listen(request_iterator, attendance, caller))
        try:
            yield await self._in_thread(self._welcome, client_id, first.hello.nonce)
            for envelope in await self._in_thread(self._open_assignments, client_id):
                yield _response(envelope)
            while (message := await attendance.outbox.get()) is not None:
                if isinstance(message, Refusal):
                    raise message
                yield _response(message)
        finally:
            listener.cancel()
            self._presence.leave(attendance, self._clock())
            log.info("%s left", client_id)

    async def _listen(self, requests: AsyncIterator[AttendRequest], attendance: Attendance, caller: Caller) -> None:
        """Reads the worker's side of its stream until it ends or falls silent; then the stream ends."""
        end: Refusal | None = None
        try:
            while (request := await next_message(requests, self._heartbeat_seconds * MISSED_HEARTBEATS)) is not None:
                self._access.charge(caller, DECLINE if request.HasField("decline") else MESSAGE)
                await self._hear(request, attendance)
        except Refusal as refusal:
            end = refusal
        except Exception as error:
            end = self._condition.refusal(error)
            if end is None:
                log.exception("the stream of %s failed", attendance.client_id)
        finally:
            attendance.outbox.put_nowait(end)

    async def _hear(self, request: AttendRequest, attendance: Attendance) -> None:
        kind = request.WhichOneof("message")
        if kind == "heartbeat":
            beat = request.heartbeat
            progress = min(max(beat.progress, 0.0), 1.0)
            self._presence.heartbeat(attendance, self._clock(), beat.assignment_id[:32], progress)
        elif kind == "decline":
            decline = request.decline
            reason, message = declined(decline)
            log.warning("%s declines %r: %s: %s", attendance.client_id, decline.assignment_id[:32], reason, message)
            await self._in_thread(self._intake.decline, attendance.client_id, decline.assignment_id, reason, message)
        else:
            raise Refusal("hello", "only heartbeats and declines may follow the Hello")

    def _welcome(self, client_id: str, nonce: bytes) -> AttendResponse:
        federation_id = self._authority.federation_id
        manifest = TimeManifest(federation_id=federation_id, client_id=client_id, nonce=nonce)
        manifest.now.FromDatetime(self._clock())
        welcome = Welcome(
            federation_id=federation_id,
            heartbeat_seconds=self._heartbeat_seconds,
            time=seal(manifest, self._signing_key),
            restored=self._restored(),
        )
        return AttendResponse(welcome=welcome)

    def _note_hello(self, attendance: Attendance, said: Introduction, caller: Caller) -> None:
        with self._database.begin() as session:
            client = session.get_one(Client, attendance.client_id, with_for_update=True)
            retire_older(
                session, attendance.client_id, caller.identity.serial, by=caller.actor, now=attendance.last_seen
            )
            client.tasks = attendance.tasks
            client.objectives = attendance.objectives
            client.software = said.software
            client.device = said.device
            client.last_seen = attendance.last_seen

    def _open_assignments(self, client_id: str) -> list[Assigned]:
        """What a client still owes, oldest first; nothing while it waits for approval."""
        with self._database.read() as session:
            if session.get_one(Client, client_id).state is not ClientState.ACTIVE:
                return []
            envelopes = session.scalars(
                select(Assignment.envelope)
                .where(Assignment.client_id == client_id, Assignment.state == AssignmentState.OPEN)
                .order_by(Assignment.created)
            )
            return [Assigned(envelope) for envelope in envelopes]

    # --- certificates

    async def Renew(  # noqa: N802 - the name of the rpc
        self, request: RenewRequest, context: grpc.aio.ServicerContext[RenewRequest, RenewResponse]
    ) -> RenewResponse:
        """Issues the caller's next certificate."""
        caller = await self._access.caller(context, kind="client")
        return RenewResponse(certificate=pem(await self._in_thread(self._renew, request, caller)))

    def _renew(self, request: RenewRequest, caller: Caller) -> Certificate:
        with self._database.begin() as session:
            return renew(
                session,
                caller.name,
                caller.identity.serial,
                request.csr,
                request.proof,
                authority=self._authority,
                by=caller.actor,
                now=self._clock(),
            )

    # --- blobs

    async def FetchBlob(  # noqa: N802 - the name of the rpc
        self, request: FetchBlobRequest, context: grpc.aio.ServicerContext[FetchBlobRequest, FetchBlobResponse]
    ) -> AsyncIterator[FetchBlobResponse]:
        """Streams a blob that an assignment offered to the caller."""
        caller = await self._access.caller(context, kind="client")
        source = await self._in_thread(self._open_blob, caller.name, request.digest, request.offset)
        try:
            while chunk := await self._in_thread(source.read, CHUNK_BYTES):
                yield FetchBlobResponse(chunk=chunk)
        finally:
            source.close()

    def _open_blob(self, client_id: str, digest: str, offset: int) -> BinaryIO:
        with self._database.read() as session:
            offered = _is_digest(digest) and session.scalar(
                select(Assignment.assignment_id)
                .where(
                    Assignment.client_id == client_id,
                    or_(Assignment.base_model == digest, Assignment.inputs.any(Input.digest == digest)),
                )
                .limit(1)
            )
        if not offered:
            raise Refusal("blob-not-offered", "no assignment of this client names that blob")
        try:
            return self._blobs.open_range(digest, offset)
        except (BlobCorrupt, BlobMissing) as error:
            if isinstance(error, BlobMissing):
                with self._database.read() as session:
                    removed = removed_offer(session, offered, digest, self._keep_rounds)
                if removed is not None:
                    raise removed from None
            self._blob_failed(digest, error)
            raise
        except ValueError as error:
            raise Refusal("offset", str(error)) from None

    # --- replies

    async def Submit(  # noqa: N802 - the name of the rpc
        self,
        request_iterator: AsyncIterator[SubmitRequest],
        context: grpc.aio.ServicerContext[SubmitRequest, SubmitResponse],
    ) -> SubmitResponse:
        """Takes a reply in: envelope, payload, receipt."""
        caller = await self._access.caller(context, kind="client")
        first = await next_message(request_iterator, FIRST_MESSAGE_SECONDS)
        if first is None or first.WhichOneof("message") != "update":
            raise Refusal("header", "a submission must begin with the signed update; the payload follows in chunks")
        admitted = await self._in_thread(self._intake.admit, caller.name, first.update)
        if isinstance(admitted, SignedEnvelope):
            return SubmitResponse(receipt=admitted)
        check = None
        if admitted.layout is not None:
            check = PayloadCheck(admitted.layout, admitted.manifest.payload.partition(":")[0])
            with self._only_upload(admitted.manifest.assignment_id):
                await self._spool(request_iterator, admitted, check)
        elif await next_message(request_iterator, NEXT_CHUNK_SECONDS) is not None:
            raise Refusal("payload-length", "0 bytes were declared, and more arrived")
        return SubmitResponse(receipt=await self._in_thread(self._intake.accept, admitted, check))

    @contextmanager
    def _only_upload(self, assignment_id: str) -> Iterator[None]:
        """One upload of an assignment at a time: the newer one ends the older, whose caller may be long gone."""
        end = self._access.ender()
        older = self._uploads.get(assignment_id)
        self._uploads[assignment_id] = end
        if older is not None:
            older(Refusal("superseded", f"another upload for assignment {assignment_id} has begun"))
        try:
            yield
        finally:
            if self._uploads.get(assignment_id) is end:
                del self._uploads[assignment_id]

    async def _spool(self, requests: AsyncIterator[SubmitRequest], admitted: Admission, check: PayloadCheck) -> None:
        """Writes the payload to the disk and looks at it once on the way; a good one becomes a blob.

        Raises:
            Refusal: `limit:chunk`, `payload-length`, `payload-digest`, `deadline`. What is wrong with the content is in
                `check`.
        """
        declared = admitted.manifest.payload_bytes
        writer = await self._in_thread(partial(self._blobs.writer, hash=False))
        try:
            while (request := await self._next_chunk(requests, admitted)) is not None:
                if request.WhichOneof("message") != "chunk":
                    raise Refusal("header", "only chunks may follow the signed update")
                if len(request.chunk) > MAX_CHUNK_BYTES:
                    raise Refusal("limit:chunk", f"a chunk of {len(request.chunk)} bytes; at most {MAX_CHUNK_BYTES}")
                if writer.written + len(request.chunk) > declared:
                    raise Refusal("payload-length", f"{declared} bytes were declared, and more arrived")
                await self._in_thread(_take, request.chunk, writer, check)
            if writer.written != declared:
                raise Refusal("payload-length", f"{declared} bytes were declared, {writer.written} arrived")
            found = check.finish()
            if found != admitted.manifest.payload:
                raise Refusal("payload-digest", f"the payload is {found}, declared was {admitted.manifest.payload}")
            if admitted.problem(check) is None:
                await self._in_thread(writer.commit, found)
        finally:
            await self._in_thread(writer.discard)

    async def _next_chunk(self, requests: AsyncIterator[SubmitRequest], admitted: Admission) -> SubmitRequest | None:
        left = max(0.0, (admitted.deadline - self._clock()).total_seconds())
        # A little longer than is left, so that the clock says without doubt that the time is over.
        request = await next_message(requests, min(left + 0.1, NEXT_CHUNK_SECONDS))
        admitted.must_be_in_time(self._clock())
        return request


def _response(message: Message) -> AttendResponse:
    """What a conductor says to a worker, as it goes over the stream."""
    response = AttendResponse()
    if isinstance(message, Assigned):
        response.assignment.ParseFromString(message.envelope)
    else:
        response.cancel.assignment_id, response.cancel.reason = message.assignment_id, message.reason
    return response


def _take(chunk: bytes, writer: BlobWriter, check: PayloadCheck) -> None:
    writer.write(chunk)
    check.feed(chunk)


def _is_digest(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True
