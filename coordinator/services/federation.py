"""The service for workers: attendance, and blobs. `reply_calls` takes their replies in."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from datetime import UTC, timedelta
from functools import partial

from sqlalchemy import bindparam, select, union_all
from sqlalchemy.orm import Session

from coordinator.audit.excerpt import marked
from coordinator.backups.statement import newest_restore
from coordinator.lookup import removed_model, removed_offer
from coordinator.members.access.call_limits import CONSENT, DECLINE, MESSAGE
from coordinator.members.access.rpc_messages import REQUEST_SECONDS, Context, next_message
from coordinator.members.home_starts import HomeCopied, check_starts, note_copied, take_start
from coordinator.members.renewal import retire_older
from coordinator.members.requests import LEAST
from coordinator.rounds.fleets.consents import offered_specification, record_consent
from coordinator.rounds.fleets.deliveries import open_assignments_of, sessions_ended_for
from coordinator.rounds.fleets.filled_models import OfferedResults
from coordinator.rounds.fleets.presence import (
    Admitted,
    Assigned,
    AttendanceStream,
    LastSign,
    Message,
    Offered,
    note_sign,
)
from coordinator.rounds.replies.intake import named_assignment
from coordinator.services.base import Parts
from coordinator.services.key_calls import KeyCalls
from coordinator.services.reply_calls import ReplyCalls
from coordinator.services.stream_words import ReceivedHello, closing_of, introduction, left
from coordinator.services.transfers import BLOB_SECONDS, PAYLOAD_BYTES
from coordinator.services.views.member_model import member_model
from coordinator.settings import Settings
from coordinator.thread_pool import to_the_end, wait_ended
from federation.digests import parse
from federation.monitoring.tally import MonitoredKind, MonitoredNumber
from federation.process.assignment_log import turn_to_assignment
from federation.refusals import Refusal
from federation.transport.channels import CHUNK_BYTES, MAX_CHUNK_BYTES
from federation.transport.chunks import chunk_sizes, fetched
from federation.trust.envelope import sign, verify
from federation.trust.identity import Action, PeerIdentity
from federation.v1 import federation_pb2 as messages
from federation.v1 import federation_pb2_grpc
from federation.v1.common_pb2 import CancelManifest, DeclineManifest, ModelManifest, SignedEnvelope, TimeManifest
from storage import audit
from storage.blobs import BlobCorrupt, BlobMissing
from storage.models import Assignment, Client, Input
from storage.states import ClientState

log = logging.getLogger(__name__)

_OWN = select(Assignment.assignment_id).where(Assignment.client_id == bindparam("client"))
_OFFERING = union_all(  # assignments that offer a blob to a client; each part has an index
    _OWN.where(Assignment.base_model == bindparam("digest")),
    _OWN.join(Input).where(Input.digest == bindparam("digest")),
).limit(1)
STREAMS = MonitoredNumber(
    "fedpareto_streams", "Streams of members that are open to this coordinator.", MonitoredKind.GAUGE
)
MISSED_HEARTBEATS = 3
LEAST_NONCE_BYTES, MAX_NONCE_BYTES = 16, 64
GRANTED = timedelta(days=1)  # how long a member may fetch the model that it was given


class FederationService(ReplyCalls, KeyCalls, federation_pb2_grpc.FederationServicer):
    """Serves workers: attendance and blobs here, replies in `ReplyCalls`, keys in `KeyCalls`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._results = OfferedResults()

    async def Attend(
        self, request_iterator: AsyncIterator[messages.AttendRequest], context: Context
    ) -> AsyncIterator[messages.AttendResponse]:
        """Serves a worker's stream: sends a welcome and work, and takes heartbeats and declines."""
        caller = self._access.caller()
        client_id = caller.name
        first = await next_message(request_iterator, REQUEST_SECONDS)
        if first is None or first.WhichOneof("message") != "hello":
            raise Refusal("hello", "the stream must begin with a Hello")
        if len(first.hello.nonce) > MAX_NONCE_BYTES:
            raise Refusal("hello", f"a nonce of {len(first.hello.nonce)} bytes; at most {MAX_NONCE_BYTES}")
        check_starts(first.hello)
        hello = introduction(first.hello)
        attendance = AttendanceStream(
            client_id=client_id,
            tasks=hello.tasks,
            objectives=hello.objectives,
            loop=asyncio.get_running_loop(),
            last_seen=self._clock(),
            consents=hello.consents,
            closing=hello.closing,
            log_size=first.hello.log_size,
        )
        try:
            await self._enter(attendance, first.hello, hello, caller)
        except HomeCopied as refusal:
            # Not noted if the call has ended meanwhile: the late Hello of a worker that has started again is no copy.
            await self._write(note_copied, client_id, self._clock())
            yield messages.AttendResponse(home_copied=messages.HomeCopied(start=bytes.fromhex(refusal.start)))
            raise
        # The client joins before its open assignments are read: one that is made in between is sent twice, not lost.
        self._presence.join(attendance)
        log.info("%s attends with %s", client_id, ", ".join(attendance.tasks)[:200] or "no task")
        listener = asyncio.create_task(self._listen(request_iterator, attendance, caller))
        self._database.tally.add(STREAMS)
        try:
            addresses = (await self._addresses()).federation
            pending = await self._read(_pending, client_id, self._settings)
            yield await self._in_thread(self._welcome, first.hello, client_id, addresses, pending)
            await self._read(self._offers.tell, [attendance])
            # Before the outbox, which may tell of the end of one of them.
            still_open = await self._read(open_assignments_of, client_id)
            attendance.note_open(still_open)  # at once: one may end while others are sent
            for assigned in still_open:
                yield await self._response(attendance, assigned)
            for ended in await self._read(sessions_ended_for, client_id, self._clock()):
                yield await self._response(attendance, ended)
            while (message := await attendance.outbox.get()) is not None:
                if isinstance(message, Refusal):
                    raise message
                yield await self._response(attendance, message)
        finally:
            self._database.tally.add(STREAMS, amount=-1)
            listener.cancel()
            self._presence.leave(attendance, self._clock())
            log.info("%s left", client_id)

    async def _enter(
        self, attendance: AttendanceStream, said: messages.Hello, hello: ReceivedHello, caller: PeerIdentity
    ) -> None:
        """Records the hello of a stream; if its call ends meanwhile, the stream has left."""

        def note(session: Session) -> None:
            # First: a copy changes nothing, and ends no certificate.
            take_start(session.get_one(Client, attendance.client_id, with_for_update=True), said)
            _note_hello(session, attendance, hello, caller)
            self._attendances.enter(session, attendance)

        try:
            await wait_ended(asyncio.create_task(self._write(note)))
        except BaseException:
            self._presence.leave(attendance, self._clock())
            raise

    async def _listen(
        self, requests: AsyncIterator[messages.AttendRequest], attendance: AttendanceStream, caller: PeerIdentity
    ) -> None:
        """Reads the worker's side of its stream until it ends or falls silent; then the stream ends."""
        end: Refusal | None = None
        try:
            while (
                request := await next_message(requests, self._settings.heartbeat_seconds * MISSED_HEARTBEATS)
            ) is not None:
                self._access.charge(caller.uri, MESSAGE if request.HasField("heartbeat") else DECLINE)
                await self._take_message(request, attendance, caller)
        except Refusal as refusal:
            end = refusal
        except Exception as error:
            end = self._faults.refusal(error)
            if end is None:
                log.exception("the stream of %s failed", attendance.client_id)
        finally:
            attendance.outbox.put_nowait(end)

    async def _take_message(
        self, request: messages.AttendRequest, attendance: AttendanceStream, caller: PeerIdentity
    ) -> None:
        kind = request.WhichOneof("message")
        turn_to_assignment(named_assignment(request.decline, DeclineManifest) if kind == "decline" else "")
        if kind == "heartbeat":
            beat = request.heartbeat
            progress = min(max(beat.progress, 0.0), 1.0)
            attendance.log_size = beat.log_size
            self._presence.heartbeat(attendance, self._clock(), beat.assignment_id[:32], progress, closing_of(beat))
        elif kind == "decline":
            await self._in_thread(self._intake.decline, attendance.client_id, request.decline)
        elif kind == "consent":
            await self._take_consent(request.consent, caller)
        elif kind == "sessions_left":
            sessions = request.sessions_left
            await self._write(_note_left, attendance.client_id, sessions.task, left(sessions, attendance.tasks))
        elif kind == "hello":
            raise Refusal("hello", "a stream has one Hello, which comes first")
        # A message of a kind that only a newer worker knows is charged, and ignored.

    @to_the_end
    async def _take_consent(self, consent: SignedEnvelope, caller: PeerIdentity) -> None:
        """Records an answer to a run, and lets the run look again, also if the stream ends meanwhile."""
        run_id = await self._write(
            record_consent,
            caller.name,
            consent,
            federation_id=self._home.federation_id,
            now=self._clock(),
            changing=partial(self._access.charge, caller.uri, CONSENT),
        )
        if run_id:
            await self._in_thread(self._changes.notify, run_id)

    async def _response(self, attendance: AttendanceStream, message: Message) -> messages.AttendResponse:
        """A conductor's message to a worker, for its stream."""
        if isinstance(message, Assigned):
            return messages.AttendResponse(
                assignment=SignedEnvelope.FromString(message.envelope),
                inputs=message.inputs,
                log=await self._newer_log(attendance.log_size),
            )
        if isinstance(message, Offered):
            return messages.AttendResponse(run=SignedEnvelope.FromString(message.envelope))
        if isinstance(message, Admitted):
            return messages.AttendResponse(approved=messages.Approved())
        manifest = CancelManifest(
            federation_id=self._home.federation_id,
            client_id=attendance.client_id,
            assignment_id=message.assignment_id,
            reason=message.reason,
            session=message.session,
        )
        return messages.AttendResponse(cancel=sign(manifest, self._home.signing_key))

    def _welcome(
        self, hello: messages.Hello, client_id: str, addresses: Sequence[str], pending: messages.Pending | None
    ) -> messages.AttendResponse:
        federation_id = self._home.federation_id
        manifest = TimeManifest(federation_id=federation_id, client_id=client_id, nonce=hello.nonce)
        manifest.now.FromDatetime(self._clock())
        welcome = messages.Welcome(
            federation_id=federation_id,
            heartbeat_seconds=self._settings.heartbeat_seconds,
            time=sign(manifest, self._home.signing_key),
            restored=newest_restore(self._home.directory),
            log_key=self._home.log_key.certified(self._home.signing_key),
            log=self._sequencer.head(hello.log_size),
            rotations=self._home.rotations,
            addresses=addresses,
            pending=pending,
        )
        return messages.AttendResponse(welcome=welcome)

    async def FetchBlob(  # type: ignore[override]  # its responses are bytes on the wire
        self, request: messages.FetchBlobRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Streams a blob that an assignment offered to the caller, or a model that `GetModel` gave it."""
        client_id = self._access.caller().name
        assignment_id = ""
        if request.HasField("grant"):
            self._check_granted(client_id, request)
        elif not (assignment_id := self._presence.offering(client_id, request.digest)):
            document = await self._read(self._offered_document, client_id, request.digest)
            if document is not None and request.offset <= len(document):
                for start in range(request.offset, len(document), CHUNK_BYTES):
                    yield fetched(document[start : start + CHUNK_BYTES])
                return
            assignment_id = await self._read(_offering, client_id, request.digest)
        turn_to_assignment(assignment_id)
        tally = self._database.tally
        try:
            with tally.timing(BLOB_SECONDS, "read"):
                source = await self._in_thread(self._blobs.open_range, request.digest, request.offset)
        except (BlobCorrupt, BlobMissing) as error:
            if isinstance(error, BlobMissing):
                removed = await self._read(removed_offer, assignment_id, request.digest, self._settings.keep_rounds)
                if removed is not None:
                    raise removed from None
            await self._in_thread(self._commands.blob_failed, request.digest, error)
            raise
        except ValueError as error:
            raise Refusal("offset", str(error)) from None
        with closing(source):
            offset, buffer = request.offset, memoryview(bytearray(MAX_CHUNK_BYTES))
            for size in chunk_sizes():
                chunk = await self._read_file(source, offset, buffer[:size])
                if not len(chunk):
                    break
                yield fetched(chunk)
                offset += len(chunk)
                tally.add(PAYLOAD_BYTES, "sent", amount=len(chunk))

    async def LocateBlob(self, request: messages.LocateBlobRequest, context: Context) -> messages.LocateBlobResponse:
        """Gives the URL in the bucket of a blob that `FetchBlob` gives the caller; empty if there is none."""
        client_id = self._access.caller().name
        if request.HasField("grant"):
            self._check_granted(client_id, request)
        else:
            known = self._presence.offering(client_id, request.digest)
            turn_to_assignment(known or await self._read(_offering, client_id, request.digest))
        return messages.LocateBlobResponse(url=await self._in_thread(self._blobs.download_url, request.digest))

    async def GetModel(self, request: messages.GetModelRequest, context: Context) -> messages.GetModelResponse:
        """Says which model a run has made, and gives the caller the right to fetch it."""
        caller = self._access.caller()
        if not LEAST_NONCE_BYTES <= len(request.nonce) <= MAX_NONCE_BYTES:
            raise Refusal(
                "argument",
                f"a nonce of {len(request.nonce)} bytes; it has {LEAST_NONCE_BYTES} to {MAX_NONCE_BYTES}",
            )
        run, manifest = await self._read(member_model, caller.name, request)
        if not await self._in_thread(self._blobs.exists, manifest.model):
            keep = self._settings.keep_rounds
            removed = await self._read(removed_model, self._blobs, run, manifest.round, manifest.model, keep)
            raise removed or BlobMissing(manifest.model)
        manifest.federation_id, manifest.nonce = self._home.federation_id, request.nonce
        now = self._clock()
        manifest.created.FromDatetime(now)
        await self._write(
            audit.record,
            at=now,
            actor=caller.uri,
            action="model.exported",
            subject=run.run_id,
            detail=f"after round {manifest.round}",
            digest=manifest.model,
        )
        await self._in_thread(self._sequencer.sequence)
        if (mark := await self._read(marked, run, manifest.round)) is not None:
            manifest.record, manifest.entries = self._sequencer.digest(mark), mark
        signed = await self._in_thread(sign, manifest, self._home.signing_key)
        return messages.GetModelResponse(model=signed, spec=run.spec, rotations=self._home.rotations)

    def _offered_document(self, session: Session, client_id: str, digest: str) -> bytes | memoryview | None:
        """What the database has of this digest, and a run offers to a client; None without such a document."""
        try:
            parse(digest)
        except ValueError:
            return None  # without a query
        document = offered_specification(session, client_id, digest)
        return self._results.offered(session, client_id, digest) if document is None else document

    def _check_granted(self, client_id: str, request: messages.FetchBlobRequest | messages.LocateBlobRequest) -> None:
        """Checks that we have signed for this client, not long ago, that it may fetch a blob.

        Raises:
            Refusal: `blob-not-offered`.
        """
        try:
            given = verify(request.grant, ModelManifest, self._home.signing_key.public_key())
        except Refusal as refusal:
            raise Refusal("blob-not-offered", f"the grant beside the digest counts for nothing: {refusal}") from None
        if (given.federation_id, given.client_id, given.model) != (
            self._home.federation_id,
            client_id,
            request.digest,
        ):
            raise Refusal("blob-not-offered", "the grant beside the digest is another client's, or for another model")
        if self._clock() - given.created.ToDatetime(tzinfo=UTC) > GRANTED:
            raise Refusal("blob-not-offered", "the grant beside the digest is older than a day: call GetModel again")


def _note_hello(session: Session, attendance: AttendanceStream, hello: ReceivedHello, caller: PeerIdentity) -> None:
    client = session.get_one(Client, attendance.client_id, with_for_update=True)
    retire_older(session, attendance.client_id, caller.serial, by=caller.uri, now=attendance.last_seen)
    client.tasks, client.objectives, client.abilities = hello.tasks, hello.objectives, hello.abilities
    client.layouts, client.private_only, client.limits = hello.layouts, hello.private_only, hello.limits
    client.sessions_left, client.consents = hello.sessions_left, hello.consents
    client.run_kinds = hello.run_kinds
    client.noise_budgets = hello.noise_budgets
    client.software, client.device = hello.software, hello.device
    note_sign(client, LastSign(attendance.last_seen, attendance.closing))


def _pending(session: Session, client_id: str, settings: Settings) -> messages.Pending | None:
    """Since when a client waits for its approval, and how many officers it takes; None if it does not wait."""
    client = session.get_one(Client, client_id)
    if client.state is not ClientState.PENDING:
        return None
    pending = messages.Pending(officers=LEAST if Action.APPROVE in settings.two_officers else 1)
    pending.since.FromDatetime(client.enrolled)
    return pending


def _note_left(session: Session, client_id: str, task: str, sessions: dict[str, int]) -> None:
    client = session.get_one(Client, client_id, with_for_update=True)
    client.sessions_left = {**client.sessions_left, task: sessions}


def _offering(session: Session, client_id: str, digest: str) -> str:
    """The id of an assignment that offers a blob to a client. Refuses with `blob-not-offered`."""
    try:
        parse(digest)
    except ValueError:
        assignment_id = None  # without a query
    else:
        parameters = {"client": client_id, "digest": digest}
        assignment_id = session.connection().execute(_OFFERING, parameters).scalar()
    if assignment_id is None:
        raise Refusal("blob-not-offered", "no assignment of this client names that blob")
    return assignment_id
