"""Announcements: what one coordinator tells the others through PostgreSQL, so that they look at the record at once.

An announcement carries ids only; a coordinator believes the record, never an announcement. One may be lost, with the
connection of either side. So a coordinator also looks at the record every `LOOK_SECONDS`.
"""

import logging
import re
import selectors
import socket
import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic
from typing import Any

from sqlalchemy import Connection, text

from coordinator.fault_state import FaultState
from coordinator.listeners import Listeners
from storage.database import Database
from storage.faults import explain_fault

log = logging.getLogger(__name__)

CHANNEL = "fedpareto"
LOOK_SECONDS = 1.0  # between two looks at the record, in case an announcement was lost
RECONNECT_SECONDS = 0.5
MAX_TIMES = 999_999
LOG_SECONDS = 60.0  # between two lines of the log about payloads that are no announcements
_PAYLOAD = re.compile(r"([0-9a-f]{32}) ([a-z]{1,20}) ([0-9a-z-]{1,63}) ([0-9]{1,6})")
_NOTIFY = text("SELECT pg_notify(:channel, payload) FROM unnest(CAST(:payloads AS text[])) AS payload")


class AnnouncementKind(StrEnum):
    """What other coordinators should look at."""

    RUN = "run"  # a run, by its id: something changed
    REPLY = "reply"  # a run, by its id: replies were recorded
    MESSAGES = "messages"  # messages for members that may attend elsewhere are on record, of a run or of a member
    ATTENDANCE = "attendance"  # members came to a coordinator, by its id, or left it
    REVOCATION = "revocation"  # a member or an administrator, by name


@dataclass(frozen=True)
class Announcement:
    """An announcement of another coordinator.

    Attributes:
        subject: the id or name of what changed.
        times: how often, such as the number of replies.
    """

    kind: AnnouncementKind
    subject: str
    times: int = 1


class Announcements:
    """Those of a coordinator that is alone on its database: there is nobody to tell.

    Attributes:
        look_seconds: how often to look at the record for changes by other coordinators; None if there are none.
        heard: those who are told of each announcement of another coordinator, and with None that some may be lost.
    """

    look_seconds: float | None = None

    def __init__(self) -> None:
        self.heard: Listeners[[Announcement | None]] = Listeners(self._failed)

    def announce(self, kind: AnnouncementKind, subject: str) -> None:
        """Tells the other coordinators, after the commit of what they should look at. Any thread may call."""

    def start(self) -> None:
        """Starts to announce and to listen."""

    def stop(self) -> None:
        """Announces what waits, and ends."""

    def _failed(self, error: Exception) -> None:
        log.error("an announcement of another coordinator was not taken in", exc_info=error)


class SharedAnnouncements(Announcements):
    """Those of one of several coordinators, over a connection and a thread of its own.

    Without a connection, announcements wait, and it connects again.

    Args:
        database: a PostgreSQL database.
        coordinator: the id of this process, 32 hexadecimal digits.
        faults: notes that the database is away.
    """

    look_seconds = LOOK_SECONDS

    def __init__(self, database: Database, coordinator: str, faults: FaultState) -> None:
        super().__init__()
        self._database = database
        self._coordinator = coordinator
        self._faults = faults
        self._lock = threading.Lock()
        self._waiting: Counter[tuple[AnnouncementKind, str]] = Counter()
        self._stopping = threading.Event()
        self._wakes, self._wake = socket.socketpair()  # a byte wakes the thread
        self._thread = threading.Thread(target=self._run, name="announcements", daemon=True)
        self._logged = -LOG_SECONDS

    def announce(self, kind: AnnouncementKind, subject: str) -> None:
        with self._lock:
            idle = not self._waiting
            self._waiting[kind, subject] += 1
        if idle:
            self._wake.send(b"\0")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._stopping.set()
            self._wake.send(b"\0")
            self._thread.join()
        self._wakes.close()
        self._wake.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with closing(self._connected()) as connection:
                    self.heard.tell(None)  # what was announced before the connection was there was lost
                    self._exchange(connection)
            except Exception as error:
                if self._faults.note(error) is None:
                    log.warning("no announcements of other coordinators: %s; connects again", explain_fault(error))
                self._stopping.wait(RECONNECT_SECONDS)

    def _connected(self) -> Connection:
        connection = self._database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # never back to the pool: it listens
        connection.execute(text(f"LISTEN {CHANNEL}"))
        return connection

    def _exchange(self, connection: Connection) -> None:
        """Sends and receives until the coordinator stops, or the connection breaks."""
        driver: Any = connection.connection.dbapi_connection  # of psycopg; detached, it has no driver_connection
        with selectors.DefaultSelector() as selector:
            selector.register(driver, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            while True:
                stopping = self._stopping.is_set()  # asked first: what was announced before the stop is sent
                self._send(connection)
                for notification in driver.notifies(timeout=0):
                    self._take(notification.payload)
                if stopping:
                    return
                if any(key.fileobj is self._wakes for key, _ in selector.select()):
                    self._wakes.recv(64)

    def _send(self, connection: Connection) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, Counter()
        if not waiting:
            return
        payloads = [
            f"{self._coordinator} {kind} {subject} {min(times, MAX_TIMES)}"
            for (kind, subject), times in waiting.items()
        ]
        connection.execute(_NOTIFY, {"channel": CHANNEL, "payloads": payloads})

    def _take(self, payload: str) -> None:
        """Tells the listeners of an announcement, unless it is this coordinator's own, or none."""
        found = _PAYLOAD.fullmatch(payload)
        if found is None or found[2] not in set(AnnouncementKind):
            if monotonic() - self._logged >= LOG_SECONDS:
                self._logged = monotonic()
                log.warning("ignored a notification that is no announcement of a coordinator: %.100r", payload)
        elif found[1] != self._coordinator:
            self.heard.tell(Announcement(AnnouncementKind(found[2]), found[3], int(found[4])))

    def _failed(self, error: Exception) -> None:
        if self._faults.note(error) is None:  # what it was about is found with the next look at the record
            super()._failed(error)


def announcements_of(database: Database, coordinator: str, faults: FaultState) -> Announcements:
    """The announcements of the coordinator with this id: silent, unless other coordinators can use its database."""
    if not database.serves_many:
        return Announcements()
    return SharedAnnouncements(database, coordinator, faults)
