"""Presence: who attends now, and the way to say something to them at once.

The services live on an event loop, the conductors in threads; they meet here. Nothing here has to survive a crash:
it is read from the database when the workers come back.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from federation.refusals import Refusal


@dataclass(frozen=True)
class Assigned:
    """An assignment for a client.

    Attributes:
        envelope: the signed assignment, serialized.
    """

    envelope: bytes


@dataclass(frozen=True)
class Cancelled:
    """An assignment that is no longer wanted.

    Attributes:
        assignment_id: its id.
        reason: a stable reason.
    """

    assignment_id: str
    reason: str


Message = Assigned | Cancelled


@dataclass(eq=False)
class Attendance:
    """One worker's open stream.

    Attributes:
        client_id: the client.
        tasks: the tasks that it offers, with its training samples.
        objectives: the objectives of each that it serves.
        assignment_id: what it is working on, as its last heartbeat told; empty when idle.
        progress: how far it is, 0 to 1.
        outbox: what to say next; a refusal ends the stream with it, None ends it quietly.
    """

    client_id: str
    tasks: dict[str, int]
    objectives: dict[str, list[str]]
    loop: asyncio.AbstractEventLoop
    last_seen: datetime
    outbox: "asyncio.Queue[Message | Refusal | None]" = field(default_factory=asyncio.Queue)
    assignment_id: str = ""
    progress: float = 0.0

    def say(self, message: Message | Refusal) -> None:
        """Puts a message, or the refusal that ends the stream, on its way. Callable from any thread."""
        try:
            self.loop.call_soon_threadsafe(self.outbox.put_nowait, message)
        except RuntimeError:
            return  # the loop is closed, so the stream is gone: the worker reads the database's word when it is back


class Presence:
    """Streams by client id. Every method is callable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, Attendance] = {}
        self._seen: dict[str, datetime] = {}
        self._left: dict[str, datetime] = {}  # those that attended since the start, and do not now
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever somebody comes or goes."""
        self._listeners.append(listener)

    def join(self, attendance: Attendance) -> None:
        """Takes in a stream; an older one of the same client ends with `superseded`."""
        with self._lock:
            older = self._streams.get(attendance.client_id)
            self._streams[attendance.client_id] = attendance
            self._seen[attendance.client_id] = attendance.last_seen
            self._left.pop(attendance.client_id, None)
        if older is not None:
            older.say(Refusal("superseded", "another stream with this client's certificate took over"))
        self._changed()

    def leave(self, attendance: Attendance, at: datetime) -> None:
        """Forgets a stream that ended at a time, unless another one of the same client has taken its place."""
        with self._lock:
            if self._streams.get(attendance.client_id) is attendance:
                del self._streams[attendance.client_id]
                self._left[attendance.client_id] = at
        self._changed()

    def heartbeat(self, attendance: Attendance, at: datetime, assignment_id: str, progress: float) -> None:
        """Notes a sign of life."""
        attendance.last_seen = at
        attendance.assignment_id = assignment_id
        attendance.progress = progress
        with self._lock:
            self._seen[attendance.client_id] = at

    def attending(self) -> dict[str, Attendance]:
        """The open streams by client id."""
        with self._lock:
            return dict(self._streams)

    def left(self) -> dict[str, datetime]:
        """When each client hung up that attended since the start of the coordinator and does not attend now."""
        with self._lock:
            return dict(self._left)

    def take_seen(self) -> dict[str, datetime]:
        """The signs of life since the last call, by client id, for the database."""
        with self._lock:
            seen, self._seen = self._seen, {}
        return seen

    def say(self, client_id: str, message: Message) -> None:
        """Sends to one client if it attends; if not, it hears of it when it is back."""
        attendance = self.attending().get(client_id)
        if attendance is not None:
            attendance.say(message)

    def end(self, client_id: str, refusal: Refusal) -> None:
        """Ends one client's stream."""
        attendance = self.attending().get(client_id)
        if attendance is not None:
            attendance.say(refusal)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()
