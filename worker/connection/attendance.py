"""The attendance of a worker: one stream to the coordinator, which is made again each time that it breaks.

The worker dials out and says hello; the coordinator's assignments arrive on the same stream at once. After a
reconnection the coordinator sends again whatever is still open, so this module keeps no assignments.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import grpc

from federation.errors import Error
from federation.monitoring.events import Events
from federation.owners_code import Wire
from federation.text import escaped
from federation.transport.addresses import in_own_order, known_addresses
from federation.transport.channels import MAX_CHUNK_BYTES, RpcRefusal
from federation.trust.envelope import envelope_digest, sign
from federation.trust.keys import IdentityError
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import DeclineManifest, LogHead, SignedEnvelope
from federation.v1.federation_pb2 import (
    AttendRequest,
    AttendResponse,
    Heartbeat,
    Hello,
    SessionsLeft,
    Welcome,
)
from federation.v1.federation_pb2_grpc import FederationStub
from federation.work.closing import SiteClosing
from worker.connection.address_turn import AddressTurn
from worker.connection.approval import Approval
from worker.connection.backoff import Backoff
from worker.connection.clock import CoordinatorClock, TimeRefused
from worker.connection.closing_words import tell_closing
from worker.connection.coordinator_key import follow_coordinator
from worker.connection.file_calls import CHANNEL_OPTIONS, FileCalls
from worker.connection.revocation import ADVICE, FINAL_REASONS, LEFT, end_of_membership
from worker.connection.starts import Starts
from worker.connection.witness import Witness
from worker.home import with_remedy
from worker.progress import Progress, StatementError, open_restore
from worker.status import CoordinatorConnection

# A message of the coordinator is a chunk of a model or an assignment. gRPC refuses a larger one before it is in memory.
MAX_MESSAGE_BYTES = MAX_CHUNK_BYTES + (64 << 10)
NONCE_BYTES = 32
MAX_OUTBOX = 1000  # messages that wait to be sent
WELCOME_SECONDS = 30.0
TURN_SECONDS = 10.0  # for the welcome where there are several addresses
WELCOME_REFUSED = "welcome"  # the reason of a refusal that is this worker's own
# A stream that lasted this long was a success: the next failure counts as the first, and is followed by a quick retry.
SETTLED_SECONDS = 1.0
WRONG_CLOCK_SECONDS = 60.0
# A transfer without an answer is repeated after this time plus the time that its bytes may take.
ANSWER_SECONDS = 120.0
MAX_PROBLEM = 1000  # characters


class AttendanceError(Error):
    """The coordinator refuses this worker for good; the message says what to do."""


class WelcomeRefused(Exception):
    """A first message that this worker does not accept; the message says why."""


@dataclass(frozen=True, eq=False)
class Handlers:
    """Handle the coordinator's messages and report the work in progress; the threads of the stream call them.

    Attributes:
        assigned: takes an assignment, with the contents of its inputs that came with it, in their order.
        cancelled: takes the cancellation of an assignment.
        asked: takes a run that asks this site to take part.
        restored: goes on with what was held until the owner accepted a restore.
        working: returns the assignment in work, empty when idle, and the share of it that is done.
    """

    assigned: Callable[[SignedEnvelope, Sequence[bytes]], None]
    cancelled: Callable[[SignedEnvelope], None]
    asked: Callable[[SignedEnvelope], None]
    restored: Callable[[], None]
    working: Callable[[], tuple[str, float]]


class Attendance:
    """Holds the stream to the coordinator, and lends its channel to the code that fetches and submits.

    `rotations` is the file with the rotations of the coordinator's keys; `note` keeps the coordinators' addresses, in
    the order in which the next start tries them; `hello` makes the first message, without its nonce and the `starts`;
    `closing` returns why the site begins no work now, None while it is open; `leaving` is true while its owner wants to
    leave the federation; `patience` gives the delays after a
    refusal, which grow longer than the delays of `backoff` after a broken connection.

    Attributes:
        connection: as it is now; None before the first try has ended.
    """

    def __init__(
        self,
        *,
        member: MemberFiles,
        rotations: Path,
        note: Callable[[tuple[str, ...]], None],
        hello: Callable[[], Hello],
        starts: Starts,
        clock: CoordinatorClock,
        progress: Progress,
        witness: Witness,
        backoff: Backoff,
        patience: Backoff,
        events: Events,
        approval: Approval,
        closing: Callable[[], SiteClosing | None] = lambda: None,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._member = member
        self._closing = closing
        self._leaving = leaving
        self.connection: CoordinatorConnection | None = None
        self._federation_id = member.federation_id
        self._rotations = rotations
        self._note = note
        self._hello = hello
        self._starts = starts
        self._clock = clock
        self._progress = progress
        self._witness = witness
        self._backoff = backoff
        self._patience = patience
        self._events = events
        self._approval = approval
        self._changed = threading.Condition()
        self._stopping = False
        self._files: FileCalls | None = None  # while attending
        self._outbox: queue.SimpleQueue[AttendRequest | None] | None = None  # of the present stream
        self._close: Callable[[], None] | None = None
        self._heartbeat_seconds = WELCOME_SECONDS
        self._calls = 0  # of the worker on the channel that is lent, besides the stream
        self._again = False  # it tries again at once
        self._renewed = False  # the stream ends because the worker has a new certificate, or other abilities
        self._turn = AddressTurn()
        self._noted = member.addresses

    def run(self, handlers: Handlers) -> None:
        """Attends until `stop`, and gives each message to its handler.

        Raises:
            AttendanceError: the client was revoked or has left, its place is taken, or its certificate has expired.
        """
        while not self._stopping:
            if (now := datetime.now(UTC)) >= (not_after := self._member.not_after):
                raise AttendanceError(
                    f"this client's certificate expired on {not_after:%Y-%m-%d %H:%M} UTC, and this machine's "
                    f"clock says {now:%Y-%m-%d %H:%M} UTC: set the clock if it is wrong, or else "
                    f"{FINAL_REASONS['certificate-expired']}"
                )
            if self._progress.accepted():
                handlers.restored()
            began = time.monotonic()
            address = self._turn.next(self._member.addresses) or self._member.address
            refusal, welcomed = self._attend(handlers, address)
            if self._stopping:
                return
            with self._changed:
                renewed, self._renewed = self._renewed, False
            if renewed:
                continue
            message = escaped(refusal.message)
            if refusal.reason in FINAL_REASONS:
                raise AttendanceError(f"{refusal.reason}: {message}; {FINAL_REASONS[refusal.reason]}")
            if welcomed:
                self._patience.reset()
            if welcomed and time.monotonic() - began >= SETTLED_SECONDS:
                self._backoff.reset()
            elif welcomed:
                self._backoff.ease()
            refused = refusal.reason in ADVICE or refusal.reason == WELCOME_REFUSED
            moves = self._turn.ended(address, refusal, welcomed=welcomed)
            other = self._turn.next(self._member.addresses)
            if moves and other and not refused:
                self._lost(message or refusal.status)
                self._events.warn(
                    "disconnected",
                    f"not attending at {address}: {message or refusal.status}; trying {other}",
                    reason=refusal.reason,
                    status=refusal.status,
                    retry_seconds=0.0,
                )
                continue
            delay = max((self._patience if refused else self._backoff).delay(), refusal.retry_seconds)
            advice = f"; {ADVICE[refusal.reason]}" if refusal.reason in ADVICE else ""
            problem = self._turn.problems() or message or refusal.status
            self._lost(f"{problem}{advice}")
            if not other:
                self._turn.begin()
            self._events.warn(
                "refused" if refused else "disconnected",
                f"not attending: {problem}{advice}; trying again in {delay:.1f} s",
                reason=refusal.reason,
                status=refusal.status,
                retry_seconds=delay,
            )
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._again, timeout=delay)
                self._again = False

    def _lost(self, problem: str) -> None:
        since = self.connection.since if self.connection and not self.connection.connected else datetime.now(UTC)
        self.connection = CoordinatorConnection(False, since, problem[:MAX_PROBLEM])

    def stop(self) -> None:
        """Ends the stream and every call on its channel; `run` returns soon after. Callable from any thread."""
        with self._changed:
            self._stopping = True
            close = self._close
            self._changed.notify_all()
        if close is not None:
            close()

    @property
    def member(self) -> MemberFiles:
        """The member, with the certificate that the next stream shows."""
        return self._member

    def renewed(self, member: MemberFiles) -> None:
        """Attends with a new certificate from the next stream on, which begins once no other call is under way.

        Calls that take longer than half of what is left of the old certificate are ended; transfers then go on.
        """
        self._clock.renewed(member)
        with self._changed:
            left = (self._member.not_after - datetime.now(UTC)).total_seconds()
            self._member = replace(member, addresses=self._member.addresses)
            self._changed.wait_for(lambda: self._calls == 0 or self._stopping, timeout=max(left, 0.0) / 2)
            self._files, close = None, self._close
            self._renewed = close is not None
        if close is not None:
            close()

    def try_again(self) -> None:
        """Tries to attend at once, instead of after the delay that a refusal has."""
        with self._changed:
            self._again = True
            self._changed.notify_all()

    @property
    def start(self) -> bytes:
        """The id of this start of the worker, as the coordinator knows it."""
        return self._starts.start

    def introduce_again(self) -> None:
        """Says hello again, on a new stream, unless another call is under way."""
        with self._changed:
            close = None if self._calls or self._files is None else self._close
            self._renewed = self._renewed or close is not None
        if close is not None:
            close()

    @contextmanager
    def calling(self) -> Iterator[FileCalls | None]:
        """The channel's calls for files, for one call, as soon as the worker attends; None once it is stopping."""
        with self._changed:
            self._changed.wait_for(lambda: self._files is not None or self._stopping)
            files = None if self._stopping else self._files
            self._calls += 1
        try:
            yield files
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def decline(self, assignment_id: str, reason: str, message: Wire, asked: SignedEnvelope | None) -> None:
        """Sends a signed decline of an assignment. `asked` is its envelope, None if it could not be verified.

        Without a stream the message is lost, and the coordinator sends the assignment again.
        """
        decline = DeclineManifest(
            federation_id=self._federation_id,
            client_id=self._member.client_id,
            assignment_id=assignment_id,
            assignment="" if asked is None else envelope_digest(asked),
            reason=reason,
            message=message[:1000],
        )
        decline.created.FromDatetime(self.now())
        self._say(AttendRequest(decline=sign(decline, self._member.signing_key)))

    def beat(self, assignment_id: str, progress: float) -> None:
        """Sends the assignment in work and its progress at once, before the next heartbeat is due."""
        self._say(AttendRequest(heartbeat=self._beat(assignment_id, progress)))

    def _beat(self, assignment_id: str, progress: float) -> Heartbeat:
        beat = Heartbeat(assignment_id=assignment_id, progress=progress, log_size=self.log_size)
        tell_closing(beat, self._closing())
        return beat

    def consent(self, envelope: SignedEnvelope) -> None:
        """Sends the signed answer to a run. Without a stream it is lost, and the coordinator asks again."""
        self._say(AttendRequest(consent=envelope))

    def files_now(self) -> FileCalls | None:
        """The channel's calls for files; None while the worker does not attend."""
        with self._changed:
            return self._files

    def tell_left(self, left: SessionsLeft) -> None:
        """Sends the number of private rounds that a task has left. If it is lost, the next Hello has it."""
        self._say(AttendRequest(sessions_left=left))

    @property
    def log_size(self) -> int:
        """The number of entries in the newest checkpoint of the coordinator's log that this worker keeps."""
        return self._witness.size

    def saw_log(self, head: LogHead) -> None:
        """Checks a checkpoint that came with a receipt. Ends the stream if the log does not continue the kept one."""
        try:
            self._witness.saw(head)
        except StatementError as error:
            self._events.warn("log", str(error))
            close = self._close
            if close is not None:
                close()

    def now(self) -> datetime:
        """The time by the coordinator's clock, which its deadlines refer to."""
        return self._clock.now()

    def _say(self, request: AttendRequest) -> None:
        outbox = self._outbox
        # The queue is bounded, in case the coordinator does not read; it asks again for lost messages.
        if outbox is not None and outbox.qsize() < MAX_OUTBOX:
            outbox.put(request)

    def _attend(self, handlers: Handlers, address: str) -> tuple[RpcRefusal, bool]:
        """Holds one stream to the coordinator at `address`, to its end.

        Returns the reason of the end, and True if there was a welcome.

        Each stream has a fresh channel: a channel has a back-off of its own, which would delay the next attempt.
        """
        options = [*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        channel = self._member.channel(options, address=address)
        outbox: queue.SimpleQueue[AttendRequest | None] = queue.SimpleQueue()
        with self._changed:
            if self._stopping:
                channel.close()
                return RpcRefusal("CANCELLED", "", "stopping"), False
            stub = FederationStub(channel)  # before another thread can close the channel: gRPC does not survive that
            self._close = channel.close
            self._heartbeat_seconds = WELCOME_SECONDS if len(self._member.addresses) == 1 else TURN_SECONDS
        welcomed = False
        hello = self._hello()
        hello.nonce, hello.log_size = secrets.token_bytes(NONCE_BYTES), self.log_size
        tell_closing(hello, self._closing())
        try:
            try:
                self._starts.tell(hello)
            except OSError as error:
                raise WelcomeRefused(f"the starts of this worker cannot be written: {with_remedy(error)}") from None
            call = stub.Attend(self._requests(hello, outbox, handlers))
            for response in call:
                if response.WhichOneof("message") == "home_copied":
                    self._starts.refused(response.home_copied.start)
                elif not welcomed:
                    self._welcome(response, hello.nonce)
                    self._starts.welcomed()
                    welcomed = True
                    self.connection = CoordinatorConnection(True, datetime.now(UTC))
                    self._learn(address, response.welcome.addresses)
                    self._outbox = outbox
                    outbox.put(self._heartbeat(handlers))
                    with self._changed:
                        self._files = FileCalls(channel)
                        self._changed.notify_all()
                elif response.WhichOneof("message") == "assignment":
                    if response.HasField("log"):
                        self._witness.saw(response.log)
                    handlers.assigned(response.assignment, response.inputs)
                elif response.WhichOneof("message") == "cancel":
                    handlers.cancelled(response.cancel)
                elif response.WhichOneof("message") == "approved":
                    self._approval.told(None)
                elif response.WhichOneof("message") == "run":
                    handlers.asked(response.run)
            return RpcRefusal("OK", "", "the coordinator ended the stream"), welcomed
        except (WelcomeRefused, StatementError, TimeRefused) as error:
            return RpcRefusal("", WELCOME_REFUSED, str(error)), welcomed
        except grpc.RpcError as error:
            refusal = self._member.refusal(error, address)
            if refusal.reason == LEFT and self._leaving():  # what it has asked for; it is about to end
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, timeout=WELCOME_SECONDS)
            elif (ended := end_of_membership(error, self._member)) is not None:
                raise AttendanceError(ended) from error
            return refusal, welcomed
        except ValueError as error:  # gRPC's answer to a call on a channel that `stop` closed a moment ago
            return RpcRefusal("CANCELLED", "", str(error)), welcomed
        finally:
            with self._changed:
                self._files = None
                self._close = None
            self._outbox = None
            outbox.put(None)
            channel.close()

    def _learn(self, address: str, told: Sequence[str]) -> None:
        """Learns the addresses that a coordinator tells of. Until the next start, the one that worked comes first.

        An address that worked and is not told of, such as that of a tunnel, is the first one also then: the others may
        be out of reach.
        """
        worked = "" if address in told else address
        noted = known_addresses(worked, in_own_order(self._member.client_id, told), self._member.addresses)
        with self._changed:
            changed, self._noted = noted != self._noted, noted
            self._member = replace(self._member, addresses=known_addresses(address, noted, ()))
        if changed:
            try:
                self._note(noted)
            except (OSError, IdentityError) as error:
                self._events.warn("addresses", f"the coordinators' addresses could not be noted: {error}")

    def _requests(
        self, hello: Hello, outbox: "queue.SimpleQueue[AttendRequest | None]", handlers: Handlers
    ) -> Iterator[AttendRequest]:
        yield AttendRequest(hello=hello)
        while True:
            try:
                request = outbox.get(timeout=self._heartbeat_seconds)
            except queue.Empty:
                if self._files is None:  # no welcome came
                    if self._close is not None:
                        self._close()
                    return
                request = self._heartbeat(handlers)
            if request is None:
                return
            yield request

    def _heartbeat(self, handlers: Handlers) -> AttendRequest:
        if self._progress.accepted():
            handlers.restored()
        assignment_id, progress = handlers.working()
        return AttendRequest(heartbeat=self._beat(assignment_id, progress))

    def _welcome(self, response: AttendResponse, nonce: bytes) -> None:
        """Checks the coordinator's first message. Raises WelcomeRefused, StatementError or TimeRefused."""
        if response.WhichOneof("message") != "welcome":
            raise WelcomeRefused("the server at this address is not a coordinator: its first message was not a Welcome")
        welcome: Welcome = response.welcome
        if welcome.federation_id != self._federation_id:
            raise WelcomeRefused(
                f"the coordinator there is of federation {escaped(welcome.federation_id, 80)!r}; "
                f"this client is a member of {self._federation_id!r}"
            )
        follow_coordinator(self._member, welcome.rotations, self._rotations, self._events)
        restored = None
        if welcome.HasField("restored"):
            restored = open_restore(welcome.restored, self._member)
            self._progress.restored(welcome.restored)
        self._witness.welcome(welcome.log_key, welcome.log, restored)
        offset = self._clock.set(welcome.time, nonce).total_seconds()
        self._heartbeat_seconds = min(max(0.1, welcome.heartbeat_seconds), WELCOME_SECONDS)  # NaN: 0.1
        self._events.tell("attending", f"attending federation {self._federation_id}")
        self._approval.told(welcome.pending if welcome.HasField("pending") else None)
        if abs(offset) > WRONG_CLOCK_SECONDS:
            self._events.warn(
                "clock",
                f"this machine's clock and the coordinator's differ by {offset:.0f} s: "
                "certificates and records go by them, so set the wrong one right",
                offset_seconds=offset,
            )
