"""Presence: the clients that attend now, and messages to them.

It connects the services, on an event loop, with the conductors, in threads. Nothing here has to survive a crash:
workers that come back get their messages from the database.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from federation.refusals import Refusal


@dataclass(frozen=True)
class Assigned:
    """An assignment for a client: its signed envelope, serialized, and the content of its inputs if they are small."""

    envelope: bytes
    inputs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Cancelled:
    """A cancelled assignment, and the reason."""

    assignment_id: str
    reason: str


@dataclass(frozen=True)
class Offered:
    """A run that asks a client to take part: its signed envelope, serialized."""

    envelope: bytes


Message = Assigned | Cancelled | Offered


@dataclass(eq=False)
class AttendanceStream:
    """One worker's open stream."""

    client_id: str
    tasks: dict[str, int]  # that it offers, with its training samples
    objectives: dict[str, list[str]]  # that it serves, of each task
    loop: asyncio.AbstractEventLoop  # of the stream
    last_seen: datetime  # its last heartbeat
    # The next messages. A refusal ends the stream with it, None ends it quietly.
    outbox: "asyncio.Queue[Message | Refusal | None]" = field(default_factory=asyncio.Queue)
    assignment_id: str = ""  # of its current work, by its last heartbeat
    progress: float = 0.0  # of that work, 0 to 1
    consents: bool = False  # True if it answers each run before it works for it
    closed_until: datetime | None = None  # while its site is closed
    log_size: int = 0  # of the newest checkpoint of the audit log that the worker has reported

    def say(self, message: Message | Refusal) -> None:
        """Sends a message, or the refusal that ends the stream. Callable from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and the stream with it
            self.loop.call_soon_threadsafe(self.outbox.put_nowait, message)


class Presence:
    """Streams by client id. Every method is callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, AttendanceStream] = {}
        self._seen: dict[str, datetime] = {}
        self._left: dict[str, datetime] = {}  # clients that attended since the start, and do not now
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever a client comes or goes."""
        self._listeners.append(listener)

    def join(self, attendance: AttendanceStream) -> None:
        """Takes in a stream; an older one of the same client ends with `superseded`."""
        with self._lock:
            older = self._streams.get(attendance.client_id)
            self._streams[attendance.client_id] = attendance
            self._seen[attendance.client_id] = attendance.last_seen
            self._left.pop(attendance.client_id, None)
        if older is not None:
            older.say(Refusal("superseded", "another stream with this client's certificate took over"))
        self._changed()

    def leave(self, attendance: AttendanceStream, at: datetime) -> None:
        """Removes a stream that ended at a time, unless another one of the same client has taken its place."""
        with self._lock:
            if self._streams.get(attendance.client_id) is attendance:
                del self._streams[attendance.client_id]
                self._left[attendance.client_id] = at
        self._changed()

    def heartbeat(
        self,
        attendance: AttendanceStream,
        at: datetime,
        assignment_id: str,
        progress: float,
        closed_until: datetime | None = None,
    ) -> None:
        """Notes a sign of life, and the closing time of the client's site."""
        attendance.last_seen = at
        attendance.assignment_id = assignment_id
        attendance.progress = progress
        with self._lock:
            self._seen[attendance.client_id] = at
        if closed_until != attendance.closed_until:
            attendance.closed_until = closed_until
            self._changed()

    def attending(self) -> dict[str, AttendanceStream]:
        """The open streams by client id."""
        with self._lock:
            return dict(self._streams)

    def left(self) -> dict[str, datetime]:
        """The time at which each client left, of those that attended since the start and do not attend now."""
        with self._lock:
            return dict(self._left)

    def take_seen(self) -> dict[str, datetime]:
        """The signs of life since the last call, by client id, for the database."""
        with self._lock:
            seen, self._seen = self._seen, {}
        return seen

    def say(self, client_id: str, message: Message) -> None:
        """Sends a message to one client if it attends."""
        attendance = self.attending().get(client_id)
        if attendance is not None:
            attendance.say(message)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()
