"""Attendances: the table of who attends at which coordinator, kept in step with the streams of this one.

A stream gets its number in the transaction that takes in its hello. Where the row of a client has a higher number than
its stream here, the client has a newer stream elsewhere, and the one here ends. Faults of the database end no stream:
what could not be written is written later, and what was lost is written again.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import NamedTuple

from sqlalchemy import DateTime, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from coordinator.cluster.announcements import Announcement, AnnouncementKind, Announcements
from coordinator.fault_state import FaultState
from coordinator.rounds.fleets.consents import Offers
from coordinator.rounds.fleets.deliveries import deliver
from coordinator.rounds.fleets.presence import AttendanceStream, Attending, EndedStream, Presence
from federation.work.closing import SiteClosing
from storage.database import Database
from storage.models import AttendanceRow, CoordinatorProcess

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0  # between two statements that write the signs of life of all streams
PAUSE_SECONDS = 0.05  # after a look, so that many changes at once cause few looks
_BEAT = text(
    "UPDATE attendances SET last_seen = beat.seen, closed_until = beat.closed, paused = beat.paused "
    "FROM unnest(CAST(:clients AS text[]), CAST(:streams AS integer[]), CAST(:seen AS timestamptz[]), "
    "CAST(:closed AS timestamptz[]), CAST(:paused AS boolean[])) AS beat (client, stream, seen, closed, paused) "
    "WHERE attendances.client_id = beat.client AND attendances.stream = beat.stream "
    "AND attendances.coordinator = :coordinator"
)
_LEAVE = text(
    'UPDATE attendances SET "left" = ended.at FROM unnest(CAST(:clients AS text[]), CAST(:streams AS integer[]), '
    "CAST(:at AS timestamptz[])) AS ended (client, stream, at) WHERE attendances.client_id = ended.client "
    "AND attendances.stream = ended.stream AND attendances.coordinator = :coordinator"
)
_HEARD = frozenset({AnnouncementKind.ATTENDANCE, AnnouncementKind.MESSAGES, AnnouncementKind.REVOCATION})


class _Written(NamedTuple):
    """What the table has of a stream."""

    number: int
    last_seen: datetime
    closing: SiteClosing | None


class _StreamRow(NamedTuple):
    """A row of the table, with the last sign of life of the client's coordinator."""

    client_id: str
    coordinator: str
    stream: int
    last_seen: datetime
    left: datetime | None
    closed_until: datetime | None
    paused: bool
    sign: datetime | None  # None if that coordinator is not on record any more
    alive: bool


class Attendances:
    """Those of a coordinator that is alone on its database: `Presence` knows all of them."""

    def enter(self, session: Session, stream: AttendanceStream) -> None:
        """Numbers a stream that begins, in the transaction that takes in its hello."""

    def start(self) -> None:
        """Learns who attends elsewhere, then keeps in step."""

    def stop(self) -> None:
        """Records who has left, and ends."""


class SharedAttendances(Attendances):
    """Those of one of several coordinators: a thread that looks at the record every second, and after announcements.

    Args:
        database: a PostgreSQL database.
        presence: the streams to this coordinator; learns of the others.
        announcements: of other coordinators, and for them.
        offers: the questions about runs.
        faults: notes that the database is away.
        coordinator: the id of this process.
        lease_seconds: without a sign of life for so long, a coordinator is dead, and its clients have left.
        clock: the time, aware.
    """

    def __init__(
        self,
        database: Database,
        presence: Presence,
        announcements: Announcements,
        offers: Offers,
        faults: FaultState,
        *,
        coordinator: str,
        lease_seconds: float,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._presence = presence
        self._announcements = announcements
        self._offers = offers
        self._faults = faults
        self._coordinator = coordinator
        self._lease = timedelta(seconds=lease_seconds)
        self._clock = clock
        self._ended: list[EndedStream] = []  # that the table does not tell of yet
        self._written: dict[str, _Written] = {}  # by client id
        self._alive = set[str]()  # other coordinators, at the last look
        self._died: dict[str, datetime] = {}  # when this coordinator noticed
        self._next_beats = 0.0
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="attendances", daemon=True)
        presence.changed.listen(self._on_change)
        announcements.heard.listen(self._hear)

    def enter(self, session: Session, stream: AttendanceStream) -> None:
        values = self._row(stream) | {"stream": 1, "since": stream.last_seen}
        entered = insert(AttendanceRow).values(values)
        entered = entered.on_conflict_do_update(
            index_elements=[AttendanceRow.client_id], set_=values | {"stream": AttendanceRow.stream + 1}
        )
        stream.number = session.execute(entered.returning(AttendanceRow.stream)).scalar_one()

    def start(self) -> None:
        self.look()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
            self._try(self._write)

    def look(self) -> None:
        """Writes what has changed here, and reads what has changed elsewhere."""
        self._write()
        self._read()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._announcements.look_seconds)
            self._wake.clear()
            self._try(self.look)
            self._stopping.wait(PAUSE_SECONDS)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # the next look tries again
            if self._faults.note(error) is None:
                log.exception("could not compare the members that attend with the database; it is tried again")

    def _on_change(self) -> None:
        if threading.current_thread() is not self._thread:  # it tells of what it has just read
            self._wake.set()

    def _hear(self, announcement: Announcement | None) -> None:
        if announcement is None or announcement.kind in _HEARD:
            self._wake.set()

    # --- from here to the table

    def _row(self, stream: AttendanceStream) -> dict[str, object]:
        return {
            "client_id": stream.client_id,
            "coordinator": self._coordinator,
            "last_seen": stream.last_seen,
            "left": None,
            **_closing_columns(stream.closing),
        }

    def _write(self) -> None:
        """Writes which streams have begun, closed, paused or ended, and once in a second the other signs of life."""
        self._ended += self._presence.take_ended()
        now = {
            name: _Written(stream.number, stream.last_seen, stream.closing)
            for name, stream in self._presence.streams().items()
            if stream.number
        }
        news = {name: stream for name, stream in now.items() if self._tells(name, stream)}
        if beats := monotonic() >= self._next_beats:
            self._next_beats = monotonic() + BEAT_SECONDS
        changed = {name: stream for name, stream in now.items() if self._written.get(name) != stream} if beats else news
        if changed or self._ended:
            with self._database.begin() as session:
                if changed:
                    self._write_beats(session, changed)
                if self._ended:
                    self._write_ends(session, self._ended)
        if news or self._ended:
            self._announcements.announce(AnnouncementKind.ATTENDANCE, self._coordinator)
        self._written = {name: stream for name, stream in self._written.items() if name in now} | changed
        self._ended = []

    def _tells(self, name: str, stream: _Written) -> bool:
        """True if more than the last sign of life differs from what the table has: others should know at once."""
        before = self._written.get(name)
        return before is None or before._replace(last_seen=stream.last_seen) != stream

    def _write_beats(self, session: Session, changed: Mapping[str, _Written]) -> None:
        closings = [_closing_columns(stream.closing) for stream in changed.values()]
        columns = {
            "clients": list(changed),
            "streams": [stream.number for stream in changed.values()],
            "seen": [stream.last_seen for stream in changed.values()],
            "closed": [closing["closed_until"] for closing in closings],
            "paused": [closing["paused"] for closing in closings],
        }
        session.execute(_BEAT, {"coordinator": self._coordinator, **columns})

    def _write_ends(self, session: Session, ended: Sequence[EndedStream]) -> None:
        columns = {
            "clients": [stream.client_id for stream in ended],
            "streams": [stream.number for stream in ended],
            "at": [stream.at for stream in ended],
        }
        session.execute(_LEAVE, {"coordinator": self._coordinator, **columns})

    def _write_again(self, streams: Sequence[AttendanceStream]) -> None:
        """Writes rows that the database has lost, such as in a failover."""
        rows = [self._row(stream) | {"stream": stream.number, "since": stream.last_seen} for stream in streams]
        lost = insert(AttendanceRow)
        newer = {name: lost.excluded[name] for name in rows[0]}
        lost = lost.on_conflict_do_update(
            index_elements=[AttendanceRow.client_id], set_=newer, where=AttendanceRow.stream < lost.excluded.stream
        )
        with self._database.begin() as session:
            session.execute(lost, rows)
        self._announcements.announce(AnnouncementKind.ATTENDANCE, self._coordinator)

    # --- from the table to here

    def _read(self) -> None:
        """Learns who attends elsewhere, ends streams that have newer ones, and sends what is on record for the rest."""
        # Before the rows: the row of each of these streams is committed.
        streams = {name: stream for name, stream in self._presence.streams().items() if stream.number}
        with self._database.read() as session:
            rows = self._rows(session)
        numbers = {row.client_id: row.stream for row in rows}
        older = [stream for name, stream in streams.items() if numbers.get(name, 0) > stream.number]
        lost = [stream for name, stream in streams.items() if numbers.get(name, 0) < stream.number]
        others = [row for row in rows if row.coordinator != self._coordinator]
        self._note_deaths({row.coordinator: row.alive for row in others})
        attending = {
            row.client_id: Attending(
                client_id=row.client_id,
                last_seen=row.last_seen,
                closing=SiteClosing.of(row.closed_until, paused=row.paused),
            )
            for row in others
            if row.left is None and row.alive
        }
        self._presence.learn(
            attending, {row.client_id: self._end(row) for row in others if row.client_id not in attending}, older
        )
        if lost:
            self._write_again(lost)
        current = {name: stream for name, stream in streams.items() if stream not in older}
        if current:
            with self._database.read() as session:
                deliver(session, current)
                self._offers.tell(session, current.values())

    def _rows(self, session: Session) -> list[_StreamRow]:
        now = func.clock_timestamp(type_=DateTime(timezone=True))
        signs = CoordinatorProcess.last_seen
        rows = select(
            AttendanceRow.client_id,
            AttendanceRow.coordinator,
            AttendanceRow.stream,
            AttendanceRow.last_seen,
            AttendanceRow.left,
            AttendanceRow.closed_until,
            AttendanceRow.paused,
            signs,
            func.coalesce(signs > now - self._lease, False),
        ).outerjoin_from(AttendanceRow, CoordinatorProcess, CoordinatorProcess.coordinator == AttendanceRow.coordinator)
        return [_StreamRow(*row) for row in session.execute(rows)]

    def _note_deaths(self, coordinators: Mapping[str, bool]) -> None:
        """Notes which of the other coordinators, each of them alive or not, have died since the last look."""
        dead = {coordinator for coordinator, alive in coordinators.items() if not alive}
        now = self._clock()
        for coordinator in self._alive & dead:
            self._died[coordinator] = now
        self._died = {coordinator: at for coordinator, at in self._died.items() if coordinator in dead}
        self._alive = coordinators.keys() - dead

    def _end(self, row: _StreamRow) -> datetime:
        """When a client left that does not attend any more.

        If its coordinator died: when this was noticed here, or, if it was dead at the first look, a lease after its
        last sign of life. Then a wait for the client lasts its whole grace, also after the database was away.
        """
        if row.left is not None:
            return row.left
        last = row.last_seen if row.sign is None else row.sign + self._lease
        return self._died.get(row.coordinator, last)


def _closing_columns(closing: SiteClosing | None) -> dict[str, object]:
    return {
        "closed_until": None if closing is None else closing.until,
        "paused": closing is not None and closing.paused,
    }


def attendances_of(
    database: Database,
    presence: Presence,
    announcements: Announcements,
    offers: Offers,
    faults: FaultState,
    *,
    coordinator: str,
    clock: Callable[[], datetime],
    lease_seconds: float,
) -> Attendances:
    """The attendances of the coordinator with this id: silent, unless other coordinators can use its database."""
    if announcements.look_seconds is None:
        return Attendances()
    return SharedAttendances(
        database,
        presence,
        announcements,
        offers,
        faults,
        coordinator=coordinator,
        lease_seconds=lease_seconds,
        clock=clock,
    )
