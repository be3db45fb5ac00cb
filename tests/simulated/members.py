"""The members: each works for the coordinator as a worker does, over calls and a stream that fail.

They use the workers' rules: an assignment counts with the coordinator's signature, a reply stays in the spool until a
verified receipt or a final refusal, and a question of a private round is answered once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.exc import SQLAlchemyError

from coordinator.rounds.fleets.presence import Assigned, AttendanceStream, Cancelled, Message
from coordinator.rounds.replies.intake import Admission
from coordinator.rounds.replies.uploads import ReplyUpload
from federation.digests import digest
from federation.record import bound_fields
from federation.record.bound_fields import difference
from federation.refusals import Refusal
from federation.spec.computation import Computation
from federation.trust.envelope import envelope_digest, sign, verify
from federation.trust.key_chain import KeyChain
from federation.v1 import common_pb2 as common
from federation.v1.federation_pb2 import Hello
from federation.vectors import payload_bytes
from federation.work.base import Memory, Result, Shape, Work, WorkError, WorkingClient, payload_layout
from federation.work.registry import decode
from federation.work.replies import reply_manifest
from federation.work.secure.orders import asked_session
from federation.work.secure.ready import Ready
from federation.work.site import Site
from federation.work.statistics.work import Statistics
from storage.blobs import BlobCorrupt, BlobMissing
from tests.simulated.faults import KILLED_AT_WELCOME, LOST, Faults
from tests.simulated.plans import CERTIFICATE, FEDERATION, TASK, Plan
from tests.simulated.process import Process
from tests.simulated.world import BEGINNING, World
from worker.connection.clock import TOLERANCE, TimeRefused
from worker.connection.starts import Starts
from worker.home import WorkerHome
from worker.work.computing import origin_of
from worker.work.memory import question_digest
from worker.work.submitter import _CLOSED, _WRONG

BEAT_SECONDS = 10.0
LOST_SECONDS = (30.0, 110.0)  # about the grace of the plans that lose members, and about twice
_FAILURES = (Refusal, SQLAlchemyError, OSError, BlobMissing, BlobCorrupt)


class _Memory(Memory):
    """The memory of an attempt; durable values survive a restart of the member."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._durable: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self._values.get(name)

    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        self._values[name] = value
        if durable:
            self._durable[name] = value

    def restart(self) -> None:
        """Forgets what is not durable."""
        self._values = dict(self._durable)


@dataclass(eq=False)
class _Stream(AttendanceStream):
    """A stream whose messages the world carries."""

    deliver: Callable[[Message], None] = lambda message: None

    def say(self, message: Message | Refusal) -> None:
        self.note(message)
        if not isinstance(message, Refusal):
            self.deliver(message)


@dataclass(frozen=True)
class SpoolEntry:
    """A finished reply."""

    envelope: common.SignedEnvelope
    manifest: common.ReplyManifest
    payload: bytes


@dataclass(eq=False)
class Member:
    """A member.

    Attributes:
        coordinator: the process of the coordinator that is reached now; None if there is none.
        spool: replies without a receipt, by assignment.
        receipts: all receipts that were verified: the envelopes of reply and receipt.
        answered: the first question of each name that a member answers once.
        nonces: the rounds and attempts in which it was asked for a private round with each nonce.
        over: the sessions of private rounds that the coordinator has called over.
        asked_after: assignments of such a session that came afterwards.
        withdrawal: what it has signed to leave the federation; None before.
        left: the coordinator has told it that it has left.
    """

    name: str
    key: Ed25519PrivateKey
    trusted: KeyChain
    plan: Plan
    site: Site
    world: World
    faults: Faults
    coordinator: Callable[[], Process | None]
    home: WorkerHome
    spool: dict[str, SpoolEntry] = field(default_factory=dict)
    receipts: list[tuple[common.SignedEnvelope, common.SignedEnvelope]] = field(default_factory=list)
    answered: dict[str, str] = field(default_factory=dict)
    nonces: dict[bytes, set[tuple[int, int]]] = field(default_factory=dict)
    over: set[bytes] = field(default_factory=set)
    asked_after: list[str] = field(default_factory=list)
    withdrawal: common.SignedEnvelope | None = None
    left: bool = False
    gone: bool = False
    taken_for_copy: bool = False  # it was refused as a copy, and is none
    _stream: _Stream | None = None
    _served: Process | None = None  # the process at the other end of the stream
    _newest: datetime = BEGINNING  # the newest time that it has seen signed
    _time: tuple[datetime, float] = (BEGINNING, 0.0)  # that time, and when it came in the world's seconds
    _arrives: float = 0.0  # when the last message of the stream arrives
    _orders: dict[str, common.SignedEnvelope] = field(default_factory=dict)  # under way
    _inputs: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    _cancelled: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _memories: dict[tuple[int, int], _Memory] = field(default_factory=dict)
    _back: float = 0.0  # when it attends again, in the world's seconds
    _born: int = 0  # restarts so far: what an earlier life has begun does not go on

    def __post_init__(self) -> None:
        self.home.directory.mkdir(parents=True)
        self._random = Random(f"starts/{self.name}")
        self._starts = Starts(self.home, self._random.randbytes)

    @property
    def busy(self) -> bool:
        """True while it has work, or a reply without a receipt, and until it has left if it wants to."""
        return not self.gone and bool(self._orders or self.spool or self.withdrawal)

    # --- the stream

    def attend(self) -> None:
        """Attends, again and again until it succeeds."""
        process = self.coordinator()
        if self.gone or self._stream is not None or self.world.seconds < self._back:
            return
        try:
            if process is None:
                raise ConnectionRefusedError
            stream = _Stream(
                client_id=self.name,
                tasks={TASK: self.plan.samples[self.name]},
                objectives={TASK: list(self.plan.objectives)},
                loop=None,  # type: ignore[arg-type]  # only `say` uses it
                last_seen=process.clock(),
                outbox=asyncio.Queue(),
                deliver=lambda message: self._carry(stream, message),
            )
            self._take_time(process.clock())
            self._stream, self._served, self._arrives = stream, process, self.world.seconds
            hello = Hello()
            self._starts.tell(hello)
            waiting = process.attends(stream, hello, self.plan.samples[self.name], list(self.plan.objectives))
        except TimeRefused:
            self.world.note("time refused", self.name)
            self.world.after(self.faults.seconds(1, 10), self.attend)
            return
        except _FAILURES as error:
            self._stream = None
            reason = "" if process is None else process.refusal(error).reason
            self.gone |= reason == "certificate-revoked"
            self.taken_for_copy |= reason == "home-copied"
            self.world.after(self.faults.seconds(1, 10), self.attend)
            return
        if self.faults.strikes(KILLED_AT_WELCOME, self.name):
            self.restart()
            return
        self._starts.welcomed()
        self.world.note("attends", self.name)
        for assigned in waiting:
            self._carry(stream, assigned)

    def _take_time(self, now: datetime) -> None:
        """Takes the time that the coordinator has signed, as a worker does: it keeps the newest one.

        Raises:
            TimeRefused: it lies too far behind that.
        """
        if now < self._newest - TOLERANCE:
            raise TimeRefused
        self._newest = max(now, self._newest)
        self._time = self._newest, self.world.seconds

    def now(self) -> datetime:
        """The coordinator's time as the member knows it."""
        base, at = self._time
        return base + timedelta(seconds=self.world.seconds - at)

    def hang_up(self, least: float = 0.5) -> None:
        """Loses the stream, and attends again after a while."""
        stream, process = self._stream, self._served
        if stream is not None and process is not None and process.alive:
            process.presence.leave(stream, process.clock())
        self._stream = None
        self.world.after(self.faults.seconds(least, 20), self.attend)

    def beat(self) -> None:
        """Gives signs of life while it attends."""
        self.world.after(BEAT_SECONDS, self.beat)
        if self._stream is not None and self._served is not None and self._served.alive:
            self._served.presence.heartbeat(self._stream, self._served.clock(), "", 0.0)

    def restart(self) -> None:
        """Is killed, and starts again: what it has not stored is lost."""
        self._born += 1
        self._starts = Starts(self.home, self._random.randbytes)
        self._orders.clear()
        for memory in self._memories.values():
            memory.restart()
        for entry in self.spool.values():
            self._later(self.faults.seconds(1, 10), partial(self._submit, entry))
        self.hang_up(1.0)

    def stay_away(self, seconds: float) -> None:
        """Does not attend for a while, whatever happens to the coordinator meanwhile."""
        self._back = self.world.seconds + seconds
        self.hang_up()
        self.world.after(seconds, self.attend)

    def leave(self) -> None:
        """Leaves for good."""
        self.gone = True
        self.hang_up()

    def withdraw(self, *, now: bool) -> None:
        """Wants to leave the federation: at once, or when it has no work. It does so over restarts."""
        self.withdrawal = sign(
            common.WithdrawalManifest(federation_id=FEDERATION, client_id=self.name, certificate=CERTIFICATE), self.key
        )
        if now:
            self._orders.clear()
            self.spool.clear()
        self._say_leave()

    def _say_leave(self) -> None:
        """Sends its withdrawal, again and again until the coordinator has recorded it."""
        if self.gone or self.withdrawal is None:
            return
        self.world.after(self.faults.seconds(5, 20), self._say_leave)
        process = self.coordinator()
        if process is None or self._orders or self.spool or self.faults.strikes("request lost", self.name):
            return
        try:
            process.leaves(self.name, self.withdrawal)
        except _FAILURES as error:
            self.world.note("not left", self.name, process.refusal(error).reason)
            return
        if not self.faults.strikes("answer lost", self.name):
            self.world.note("left", self.name)
            self.left = True
            self.leave()

    def _later(self, seconds: float, event: Callable[[], object]) -> None:
        """Lets something happen in this life of the member."""
        born = self._born
        self.world.after(seconds, lambda: event() if born == self._born and not self.gone else None)

    def _carry(self, stream: _Stream, message: Message) -> None:
        """Carries a message of the coordinator: in order, and lost with the stream."""
        self._arrives = max(self._arrives, self.world.seconds + self.faults.seconds(0.01, 0.5))

        def arrive() -> None:
            if self._stream is not stream or self.gone:
                return
            if self.faults.strikes("stream broken", self.name):
                self.hang_up()
                return
            self._receive(message)

        self.world.after(self._arrives - self.world.seconds, arrive)

    def _receive(self, message: Message) -> None:
        if isinstance(message, Cancelled):
            self._cancelled.add(message.assignment_id)
            self.over |= {message.session} - {b""}
            self._orders.pop(message.assignment_id, None)
        elif isinstance(message, Assigned):
            envelope = common.SignedEnvelope.FromString(message.envelope)
            order = self.trusted.verify(envelope, common.AssignmentManifest)
            name = order.assignment_id
            if name in self._orders or name in self.spool or name in self._done:
                return
            if asked_session(order) in self.over:
                self.asked_after.append(name)
            if self.withdrawal is not None:
                self._decline(order, "paused", "")
                return
            self._orders[name], self._inputs[name] = envelope, message.inputs
            self._later(self.faults.seconds(0.2, 3.0), lambda: self._work(order))

    # --- the work

    def _work(self, order: common.AssignmentManifest) -> None:
        name = order.assignment_id
        if name not in self._orders:
            return
        if self.faults.strikes("member restarted", self.name):
            self.restart()
            return
        if self.faults.strikes(LOST, self.name):
            self.restart()
            self.stay_away(self.faults.seconds(*LOST_SECONDS))
            return
        if self.now() > order.deadline.ToDatetime(UTC):
            self._decline(order, "deadline", "")
            return
        if self.faults.strikes("work declined", self.name, order.kind):
            self._decline(order, "busy", "")
            return
        process = self.coordinator()
        try:
            if process is None:
                raise ConnectionRefusedError
            entry = self._answered(order, partial(process.fetch, self.name))
        except WorkError as error:
            self._decline(order, error.reason or "failed", str(error))
            return
        except _FAILURES as error:
            reason = process.refusal(error).reason if process is not None else ""
            if reason == "certificate-revoked":  # a worker ends then
                self.leave()
                return
            if process is not None:
                self.world.note("work delayed", self.name, reason)
            self._later(self.faults.seconds(1, 10), lambda: self._work(order))
            return
        del self._orders[name]
        self.spool[name] = entry
        self._submit(entry)

    def _answered(self, order: common.AssignmentManifest, fetch: Callable[[str], bytes]) -> SpoolEntry:
        """Does the work of an assignment."""
        layout = self.plan.layout
        shape = Shape(layout, self.plan.objectives, tuple(order.objectives))
        work = decode(order.kind, order.work, shape)
        sent = self._inputs[order.assignment_id]
        found = sent or tuple(fetch(item.digest) for item in order.inputs)
        inputs = {item.name: content for item, content in zip(order.inputs, found, strict=True)}
        assert [digest(content) for content in found] == [item.digest for item in order.inputs]
        if not isinstance(work, Statistics):  # it takes no model
            assert digest(fetch(order.base_model)) == order.base_model
        again = self._note_question(order, work)
        client = WorkingClient(
            client_id=self.name,
            round=order.round,
            attempt=order.attempt,
            shape=shape,
            memory=self._memories.setdefault((order.round, order.attempt), _Memory()),
            origin=origin_of(order),
            site=self.site,
            inputs=inputs,
            again=again,
            data=self.plan.held(self.name),
        )
        computation: Computation | None = work.computation(client)
        result: Result = work.answer(client, self.plan.computed(self.name, order, computation))
        manifest = reply_manifest(order, result, software="simulated", repeatable=True)
        manifest.created.FromDatetime(self.world.now())
        payload = b""
        if order.rows:
            payload = b"".join(payload_bytes(payload_layout(work.rows(shape)), result.rows))
            manifest.payload, manifest.payload_bytes = digest(payload), len(payload)
        return SpoolEntry(sign(manifest, self.key), manifest, payload)

    def _note_question(self, order: common.AssignmentManifest, work: Work) -> bool:
        """Notes a question that is answered once; True if it was noted before. Raises if that was another one."""
        if not (question := work.once()):
            return False
        if isinstance(work, Ready):
            self.nonces.setdefault(work.agreed.nonce, set()).add((order.round, order.attempt))
        again, asked = question in self.answered, question_digest(order)
        if self.answered.setdefault(question, asked) != asked:
            raise WorkError("another question of this name was answered", reason="answered")
        return again

    def _decline(self, order: common.AssignmentManifest, reason: str, message: str) -> None:
        name = order.assignment_id
        self._orders.pop(name, None)
        self.world.note("declines", self.name, order.kind, reason)
        manifest = common.DeclineManifest(
            federation_id=order.federation_id,
            client_id=self.name,
            assignment_id=name,
            reason=reason,
            message=message,
        )
        envelope = sign(manifest, self.key)

        def arrive() -> None:
            process = self._served
            if self._stream is None or process is None or not process.alive:
                return  # it gets the assignment again, and declines again
            try:
                process.intake.decline(self.name, envelope)
            except _FAILURES as error:
                self.world.note("decline refused", self.name, process.refusal(error).reason)
                self.hang_up()
                return
            assert not process.is_open(name), f"the decline of {name} was taken, and it is still open"

        self._later(self.faults.seconds(0.01, 0.5), arrive)

    # --- the spool

    def _submit(self, entry: SpoolEntry) -> None:
        """Submits a reply, and again after a while, until it has left the spool."""
        name = entry.manifest.assignment_id
        if self.spool.get(name) is not entry:
            return
        self._later(self.faults.seconds(15, 40), lambda: self._submit(entry))
        if self.faults.strikes("request lost", self.name):
            return
        late = self.faults.strikes("request late", self.name)
        for _ in range(2 if self.faults.strikes("request doubled", self.name) else 1):
            delay = self.faults.seconds(20, 120) if late else self.faults.seconds(0.01, 2.0)
            self.world.after(delay, partial(self._arrive, entry, self._starts.start))

    def _arrive(self, entry: SpoolEntry, start: bytes) -> None:
        """A call of the member arrives at the coordinator."""
        process = self.coordinator()
        if process is None:
            return
        try:
            admitted = process.admit(self.name, entry.envelope, start)
        except _FAILURES as error:
            self._answer(entry, process.refusal(error))
            return
        if isinstance(admitted, common.SignedEnvelope):
            self._answer(entry, admitted)
            return
        self.world.after(self.faults.seconds(0.0, 1.0), lambda: self._take(process, entry, admitted))

    def _take(self, process: Process, entry: SpoolEntry, admission: Admission) -> None:
        """The payload of an admitted reply arrives, at once or in pieces; meanwhile another call may have come."""
        if not process.alive:
            return
        try:
            whole = self.world.random.random() < 0.7 and not process.uploads.broke_off(admission)
            if whole or admission.layout is None:
                process.take_whole(admission, entry.payload, partial(self._end_call, process, entry))
            else:
                self._upload(process, entry, admission, process.upload(admission))
        except _FAILURES as error:
            self._answer(entry, process.refusal(error))

    def _upload(self, process: Process, entry: SpoolEntry, admission: Admission, upload: ReplyUpload) -> None:
        """Takes the next piece of an upload, and more of them later."""
        if not process.alive:
            return
        ends = True
        try:
            admission.check_in_time(process.clock())
            if self.faults.strikes("upload broken off", self.name):
                return
            at = upload.arrived
            upload.take(entry.payload[at : at + max(1, len(entry.payload) // 3)], at)
            if upload.arrived < len(entry.payload):
                ends = False
                self.world.after(self.faults.seconds(0.1, 5), lambda: self._upload(process, entry, admission, upload))
                return
            process.stored(admission, upload, partial(self._end_call, process, entry))
        except _FAILURES as error:
            self._answer(entry, process.refusal(error))
        finally:
            if ends and process.alive:
                process.end(upload)

    def _end_call(self, process: Process, entry: SpoolEntry, record: Callable[[], common.SignedEnvelope]) -> None:
        """Ends a call whose reply is recorded now, alone or in a group."""
        try:
            answer: common.SignedEnvelope | Refusal = record()
        except _FAILURES as error:
            answer = refusal = process.refusal(error)
            if refusal.reason in _CLOSED:
                name = entry.manifest.assignment_id
                assert not process.takes(name), f"the reply to {name} was refused as {refusal.reason}, and it is open"
        self._answer(entry, answer)

    def _answer(self, entry: SpoolEntry, answer: common.SignedEnvelope | Refusal) -> None:
        """Carries the answer of a call to the member."""
        if self.faults.strikes("answer lost", self.name):
            return
        name = entry.manifest.assignment_id

        def arrive() -> None:
            receipt = answer
            if isinstance(receipt, Refusal):
                stem = receipt.reason.partition(":")[0]
                self.world.note("refused", self.name, receipt.reason)
                if not receipt.signed:
                    if not {stem, receipt.reason}.isdisjoint(_CLOSED | _WRONG | {"certificate-revoked"}):
                        self.spool.pop(name, None)
                    return
                receipt = common.SignedEnvelope.FromString(receipt.signed)
            self._verify(receipt, entry)
            self.receipts.append((entry.envelope, receipt))
            self.world.note("receipt", self.name, envelope_digest(receipt))
            self.spool.pop(name, None)
            self._done.add(name)

        self.world.after(self.faults.seconds(0.01, 1.0), arrive)

    def _verify(self, receipt: common.SignedEnvelope, entry: SpoolEntry) -> None:
        manifest = verify(receipt, common.ReceiptManifest, self.trusted.signer(receipt))
        assert not difference(entry.manifest, manifest, bound_fields.RECEIPT), "a receipt for another reply"
        assert manifest.envelope == envelope_digest(entry.envelope), "a receipt for another envelope"
