"""Presence: the clients that attend now, here and at other coordinators, and messages to those that attend here.

It connects the services, on an event loop, with the conductors, in threads. Nothing here has to survive a crash:
workers that come back get their messages from the database. `fleets.attendances` brings what other coordinators know.
"""

import asyncio
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Self

from coordinator.cluster.announcements import AnnouncementKind, Announcements
from coordinator.listeners import Listeners
from federation.refusals import Refusal
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from federation.work.closing import SiteClosing
from federation.work.secure.orders import asked_session
from storage.models import Assignment, Client


@dataclass(frozen=True)
class Assigned:
    """An assignment for a client: its signed envelope, serialized, and the content of its inputs if they are small."""

    assignment_id: str
    envelope: bytes
    inputs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Given:
    """An assignment that a client was given and has neither answered nor heard the end of, as far as is known here."""

    envelope: bytes  # as it was sent

    @cached_property
    def order(self) -> AssignmentManifest:
        """What was asked."""
        return AssignmentManifest.FromString(SignedEnvelope.FromString(self.envelope).manifest)

    def offers(self, digest: str) -> bool:
        """True if the client may fetch a blob for it."""
        return self.order.base_model == digest or any(item.digest == digest for item in self.order.inputs)


@dataclass(frozen=True)
class Cancelled:
    """A cancelled assignment, and the reason; or the newest one in a private round that is over for its client.

    `session` is the digest of that round's session; empty for other work.
    """

    assignment_id: str
    reason: str
    session: bytes = b""

    @classmethod
    def of(cls, assignment_id: str, reason: str, envelope: bytes) -> Self:
        """The cancellation of the assignment in this serialized envelope.

        A client whose assignment was cancelled is asked nothing more in the same session.
        """
        order = AssignmentManifest.FromString(SignedEnvelope.FromString(envelope).manifest)
        return cls(assignment_id, reason, asked_session(order))


@dataclass(frozen=True)
class Offered:
    """A run that asks a client to take part: its signed envelope, serialized."""

    envelope: bytes


@dataclass(frozen=True)
class Admitted:
    """The approval of a client that waited for it."""


Message = Assigned | Cancelled | Offered | Admitted


@dataclass(eq=False, kw_only=True)
class Attending:
    """A client that attends."""

    client_id: str
    last_seen: datetime  # its last heartbeat
    closing: SiteClosing | None = None  # None while its site is open


@dataclass(eq=False, kw_only=True)
class AttendanceStream(Attending):
    """One worker's open stream to this coordinator."""

    tasks: dict[str, int]  # that it offers, with its training samples
    objectives: dict[str, list[str]]  # that it serves, of each task
    loop: asyncio.AbstractEventLoop  # of the stream
    # The next messages. A refusal ends the stream with it, None ends it quietly.
    outbox: "asyncio.Queue[Message | Refusal | None]" = field(default_factory=asyncio.Queue)
    assignment_id: str = ""  # of its current work, by its last heartbeat
    progress: float = 0.0  # of that work, 0 to 1
    consents: bool = False  # True if it answers each run before it works for it
    log_size: int = 0  # of the newest checkpoint of the audit log that the worker has reported
    number: int = 0  # among the streams of the client at all coordinators; 0 if there is only one coordinator
    # With several coordinators: ids of assignments that were sent and are open, or in a private round that goes on.
    given: set[str] = field(default_factory=set)
    # Assignments that were sent on this stream, by id. They are on record, and may have ended: a reply is recorded only
    # after a look at its assignment.
    orders: dict[str, Given] = field(default_factory=dict)
    # Ids of assignments that have ended since the stream began; None once those are noted that were open then.
    ended: set[str] | None = field(default_factory=set)
    asked: set[str] = field(default_factory=set)  # ids of runs about which it was asked, or that it has no task for

    def say(self, message: Message | Refusal) -> None:
        """Sends a message, or the refusal that ends the stream. Callable from any thread."""
        self.note(message)
        with suppress(RuntimeError):  # the loop is closed, and the stream with it
            self.loop.call_soon_threadsafe(self.outbox.put_nowait, message)

    def note(self, message: Message | Refusal) -> None:
        """Notes a message that is sent in another way."""
        if isinstance(message, Assigned):
            self.orders[message.assignment_id] = Given(message.envelope)
            if self.number:
                self.given.add(message.assignment_id)
        elif isinstance(message, Cancelled):
            self.given.discard(message.assignment_id)
            self.forget(message.assignment_id)

    def note_open(self, messages: Iterable[Assigned]) -> None:
        """Notes the assignments that a look at the record has found open, unless they have ended since; once."""
        for message in messages:
            self.note(message)
        # After that: what ends from now on is forgotten by the thread that tells of its end.
        ended, self.ended = self.ended, None
        for assignment_id in list(ended or ()):
            self.orders.pop(assignment_id, None)

    def forget(self, assignment_id: str) -> None:
        """Forgets an assignment that has ended. Callable from any thread."""
        if (ended := self.ended) is not None:
            ended.add(assignment_id)  # first: it may be noted now
        self.orders.pop(assignment_id, None)


@dataclass(frozen=True)
class LastSign:
    """The last sign of life of a client: when it came, and why its site was closed then; None if it was open."""

    at: datetime
    closing: SiteClosing | None


@dataclass(frozen=True)
class EndedStream:
    """A numbered stream that has ended."""

    client_id: str
    number: int
    at: datetime


class Presence:
    """Streams by client id. Every method is callable from any thread.

    `announcements` tell other coordinators of messages to the clients that do not attend here. `changed` has those who
    are told when a client comes, goes, or closes its site.
    """

    def __init__(self, announcements: Announcements | None = None) -> None:
        self._announcements = announcements or Announcements()
        self.changed: Listeners[[]] = Listeners()
        self._lock = threading.Lock()
        self._streams: dict[str, AttendanceStream] = {}
        self._seen: dict[str, LastSign] = {}
        self._left: dict[str, datetime] = {}  # clients that attended here since the start, and do not now
        self._ended: list[EndedStream] = []
        self._elsewhere: Mapping[str, Attending] = {}  # at other coordinators
        self._left_elsewhere: Mapping[str, datetime] = {}

    def join(self, attendance: AttendanceStream) -> None:
        """Takes in a stream. Of two streams of one client the older one ends with `superseded`.

        The older one has the lower number. Streams without numbers are taken in in the order in which they began.
        """
        with self._lock:
            older = self._streams.get(attendance.client_id)
            if older is not None and older.number > attendance.number:  # the newer one was taken in first
                older = attendance
            else:
                self._streams[attendance.client_id] = attendance
                self._seen[attendance.client_id] = LastSign(attendance.last_seen, attendance.closing)
                self._left.pop(attendance.client_id, None)
        if older is not None:
            older.say(superseded())
        self.changed.tell()

    def leave(self, attendance: AttendanceStream, at: datetime) -> None:
        """Removes a stream that ended at a time, unless another one of the same client has taken its place."""
        with self._lock:
            if self._streams.get(attendance.client_id) is attendance:
                del self._streams[attendance.client_id]
                self._left[attendance.client_id] = at
            if attendance.number:
                self._ended.append(EndedStream(attendance.client_id, attendance.number, at))
        self.changed.tell()

    def heartbeat(
        self,
        attendance: AttendanceStream,
        at: datetime,
        assignment_id: str,
        progress: float,
        closing: SiteClosing | None = None,
    ) -> None:
        """Notes a sign of life, and whether the client's site is closed or paused."""
        attendance.last_seen = at
        attendance.assignment_id = assignment_id
        attendance.progress = progress
        with self._lock:
            self._seen[attendance.client_id] = LastSign(at, closing)
        if closing != attendance.closing:
            attendance.closing = closing
            self.changed.tell()

    def streams(self) -> dict[str, AttendanceStream]:
        """The open streams to this coordinator, by client id."""
        with self._lock:
            return dict(self._streams)

    def attending(self) -> dict[str, Attending]:
        """The clients that attend, here or elsewhere, by client id."""
        with self._lock:
            return {**self._elsewhere, **self._streams}

    def left(self) -> dict[str, datetime]:
        """The time at which each client left, of those that attended since the start and do not attend now."""
        with self._lock:
            if not self._left_elsewhere and not self._elsewhere:
                return dict(self._left)
            left = {**self._left_elsewhere, **self._left}
            for client_id in self._left.keys() & self._left_elsewhere.keys():
                left[client_id] = max(self._left[client_id], self._left_elsewhere[client_id])
            return {name: at for name, at in left.items() if name not in self._streams and name not in self._elsewhere}

    def learn(
        self,
        attending: Mapping[str, Attending],
        left: Mapping[str, datetime],
        newer_elsewhere: Iterable[AttendanceStream] = (),
    ) -> None:
        """Takes in who attends at other coordinators and who has left them, by client id.

        Streams to this coordinator that have newer ones elsewhere end with `superseded`.
        """
        with self._lock:
            before, self._elsewhere = self._elsewhere, attending
            changed = _closings(before) != _closings(attending) or self._left_elsewhere.keys() != left.keys()
            self._left_elsewhere = left
            older = [stream for stream in newer_elsewhere if self._streams.get(stream.client_id) is stream]
            for stream in older:
                del self._streams[stream.client_id]
        for stream in older:
            stream.say(superseded())
        if changed or older:
            self.changed.tell()

    def take_seen(self) -> dict[str, LastSign]:
        """The signs of life since the last call, by client id, for the database."""
        with self._lock:
            seen, self._seen = self._seen, {}
        return seen

    def take_ended(self) -> list[EndedStream]:
        """The numbered streams that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def given(self, client_id: str, assignment_id: str) -> AssignmentManifest | None:
        """An assignment that a client was given on its stream to this coordinator; None if none is known."""
        with self._lock:
            stream = self._streams.get(client_id)
        found = None if stream is None else stream.orders.get(assignment_id)
        return None if found is None else found.order

    def offering(self, client_id: str, digest: str) -> str:
        """The id of an assignment that was given likewise, and offers a blob; empty if none is known."""
        with self._lock:
            stream = self._streams.get(client_id)
        orders = {} if stream is None else dict(stream.orders)
        return next((assignment_id for assignment_id, given in orders.items() if given.offers(digest)), "")

    def forget(self, client_id: str, assignment_id: str) -> None:
        """Forgets an assignment that its client has answered."""
        with self._lock:
            stream = self._streams.get(client_id)
        if stream is not None:
            stream.forget(assignment_id)

    def say(self, client_id: str, message: Message) -> None:
        """Sends a message to one client if it attends here."""
        with self._lock:
            attendance = self._streams.get(client_id)
        if attendance is not None:
            attendance.say(message)

    def say_all(self, run_id: str, messages: Iterable[tuple[str, Message]]) -> None:
        """Sends messages about a run, which are on record, to clients by id, wherever they attend."""
        here, elsewhere = self.streams(), False
        for client_id, message in messages:
            self.say(client_id, message)
            elsewhere |= client_id not in here
        if elsewhere:
            self.tell_elsewhere(run_id)

    def say_cancelled(self, run_id: str, assignments: Iterable[Assignment]) -> None:
        """Tells the clients of these assignments of a run, which have ended, that they are cancelled."""
        messages = [
            (item.client_id, Cancelled.of(item.assignment_id, item.reason, item.envelope)) for item in assignments
        ]
        self.say_all(run_id, messages)

    def tell_elsewhere(self, subject: str) -> None:
        """Lets other coordinators look for messages to their clients, of a run or to a client, by its id."""
        self._announcements.announce(AnnouncementKind.MESSAGES, subject)


def note_sign(client: Client, sign: LastSign) -> None:
    """Notes a client's last sign of life in its row."""
    client.last_seen = sign.at
    client.closed_until = None if sign.closing is None else sign.closing.until
    client.paused = sign.closing is not None and sign.closing.paused


def announced(client: Client, now: datetime) -> SiteClosing | None:
    """Why the site of a client is closed, by what it has told last; None once that time is over."""
    closing = SiteClosing.of(client.closed_until, paused=client.paused)
    return closing if closing is not None and closing.lasts_beyond(now) else None


def superseded() -> Refusal:
    """The refusal that ends a stream when a newer one takes over."""
    return Refusal("superseded", "another stream with this client's certificate took over")


def _closings(attending: Mapping[str, Attending]) -> dict[str, SiteClosing | None]:
    return {client_id: item.closing for client_id, item in attending.items()}
