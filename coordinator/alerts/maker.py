"""The maker of alerts: a thread that reads the record after a commit, and writes the rows. No round waits for it.

Alerts about rounds follow from the record alone. The maker reads the rounds that have ended since its last look; at its
start all rounds of the runs whose alerts are not complete, so a crash between a commit and its alert loses none.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.alerts import about_federation, about_runs, rows
from coordinator.alerts.about_rounds import RoundFacts
from coordinator.alerts.facts import AlertFact
from coordinator.alerts.recording import record_run
from coordinator.rounds.changes import RunChanges
from coordinator.rounds.fleets.presence import Presence
from coordinator.settings import Settings
from coordinator.startup import OpenRecord
from federation.text import escaped
from storage.database import Duty
from storage.models import Alert, Run
from storage.states import AlertKind, AlertSeverity

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.2  # between two looks at the runs: several changes are one look
LOOK_SECONDS = 20.0  # between two looks at members and runs that stand still
TURN_SECONDS = 120  # after which another coordinator may make alerts although this one has not ended its look
SLOW_LOOK_SECONDS = 300.0  # between two looks at certificates, backup and disk space
GRACE = timedelta(minutes=1)  # after a start, in which members come back
_SLOW = (AlertKind.DISK_LOW, AlertKind.BACKUP_OLD, AlertKind.CERTIFICATE_ENDS, AlertKind.CLOCK_WRONG)
_LEVELS = {
    AlertSeverity.NOTICE: logging.INFO,
    AlertSeverity.WARNING: logging.WARNING,
    AlertSeverity.CRITICAL: logging.ERROR,
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a federation; None where there is no alert."""

    silent: timedelta | None  # since a member attended
    backup: timedelta | None  # since the last backup

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        """Those of the settings, where 0 is no limit."""
        seconds = settings.silent_seconds, settings.backup_seconds
        silent, backup = (timedelta(seconds=count) if count else None for count in seconds)
        return cls(silent=silent, backup=backup)


class AlertMaker:
    """Makes the alerts of one coordinator; the methods that look may be called from one thread at a time.

    Args:
        record: has the database, the space on the disk of the blobs, the faults of the machine, and the limits.
        presence: the members that attend.
        changes: of runs, and of their alerts.
        monotonic: seconds that only grow.
    """

    def __init__(
        self,
        record: OpenRecord,
        presence: Presence,
        changes: RunChanges,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = record.database
        self._blobs = record.blobs
        self._presence = presence
        self._changes = changes
        self._faults = record.faults
        self._certificates = record.home.ca, record.home.server
        self._limits = Limits.of(record.home.settings)
        self._clock = clock = record.clock
        self._monotonic = monotonic
        self._runs: dict[str, RoundFacts] = {}
        self._lock = threading.Lock()
        self._pending = set[str]()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._since = clock() + GRACE
        self._backup: datetime | None = None
        self._backup_looked: datetime | None = None
        self._next_look = self._next_slow_look = -float("inf")

    def start(self) -> None:
        """Starts the thread; it first looks at the runs whose alerts are not complete."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. The next start goes on from the record."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def changed(self, run_id: str) -> None:
        """Notes that a run has changed. Callable from any thread; it does not wait."""
        if threading.current_thread() is self._thread:
            return  # it told of its own alerts
        with self._lock:
            self._pending.add(run_id)
        self._wake.set()

    def _run(self) -> None:
        unwatch = self._changes.courses.listen(self.changed)  # before the first look, which is at everything
        everything = True
        while not self._stopping.is_set():
            try:
                with self._database.turn(Duty.ALERTS, seconds=TURN_SECONDS) as mine:
                    if mine:
                        self._look(everything=everything)
                    everything = not mine  # another coordinator makes them: this one knows nothing of its own later
            except BaseException as error:  # the code of a rule may try to end the process
                everything = True
                if self._faults.note(error) is None:
                    log.exception("no alerts could be made; the next look makes them")
            self._wake.wait(LOOK_SECONDS)
            self._stopping.wait(PAUSE_SECONDS)
            self._wake.clear()
        unwatch()

    def _look(self, *, everything: bool) -> None:
        if everything:
            self.look_at_incomplete()
        self.look_at_changed()
        self.look_at_time()

    # --- runs

    def look_at_incomplete(self) -> None:
        """Looks at every run whose alerts are not complete."""
        complete = select(Alert.run_id).where(Alert.kind == AlertKind.RUN_ENDED)
        with self._database.read() as session:
            incomplete = session.scalars(select(Run.run_id).where(Run.run_id.not_in(complete))).all()
        for run_id in incomplete:
            self._look_at_run(run_id)

    def look_at_changed(self) -> None:
        """Looks at the runs that have changed since the last look."""
        with self._lock:
            changed, self._pending = self._pending, set()
        for run_id in sorted(changed):
            self._look_at_run(run_id)

    def _look_at_run(self, run_id: str) -> None:
        before = self._runs.pop(run_id, None)  # after an error all its rounds are read again
        recorded = record_run(self._database, run_id, before, self._clock())
        if recorded.facts is not None:
            self._runs[run_id] = recorded.facts
        self._tell(recorded.new)
        if recorded.changed:
            self._changes.tell_watchers(run_id)

    # --- members, and the machine

    def look_at_time(self) -> None:
        """Looks at what depends on the time: runs that stand still, silent members, certificates, backup, disk."""
        if (at := self._monotonic()) < self._next_look:
            return
        self._next_look = at + LOOK_SECONDS
        now = self._clock()
        with self._database.read() as session:
            stalled = self._stalled(session, now) if now >= self._since else []
            silent = self._silent(session, now) if now >= self._since else []
            pending = about_federation.pending(session)
            copied = about_federation.copied(session, now)
            forget = about_federation.asks_to_be_forgotten(session)
        self._record([AlertKind.RUN_STALLED], stalled, now)
        self._record([AlertKind.MEMBER_SILENT], silent, now)
        self._record([AlertKind.MEMBER_PENDING], pending, now)
        self._record([AlertKind.HOME_COPIED], copied, now)
        self._record([AlertKind.FORGET_ASKED], forget, now)
        if at >= self._next_slow_look or self._faults.present or self._faults.clock_back:
            self._next_slow_look = at + SLOW_LOOK_SECONDS
            with self._database.read() as session:
                slow = self._slow(session, now)
            self._record(_SLOW, slow, now)
            self._end_failed(now)

    def _stalled(self, session: Session, now: datetime) -> list[AlertFact]:
        facts = []
        for run_id, of_rounds in self._runs.items():
            run = session.get_one(Run, run_id)
            facts += about_runs.stalled(session, run, of_rounds.seconds, since=self._since, now=now)
        return facts

    def _silent(self, session: Session, now: datetime) -> list[AlertFact]:
        if self._limits.silent is None:
            return []
        attending = self._presence.attending()
        return about_federation.silent(session, attending, after=self._limits.silent, since=self._since, now=now)

    def _slow(self, session: Session, now: datetime) -> list[AlertFact]:
        facts = about_federation.disk(session, self._blobs.free_bytes(), self._faults.present, now)
        facts += about_federation.clock(self._faults.clock_back, self._faults.present, now)
        facts += about_federation.member_certificates(session, now)
        facts += about_federation.own_certificates(*self._certificates, now)
        if self._limits.backup is not None:
            newest = about_federation.last_backup(session, self._backup_looked, now)
            self._backup, self._backup_looked = newest or self._backup, now - timedelta(hours=1)
            facts += about_federation.backup(session, self._backup, after=self._limits.backup, now=now)
        return facts

    def _record(self, kinds: Iterable[AlertKind], facts: list[AlertFact], now: datetime) -> None:
        with self._database.read() as session:
            if not rows.differ(session, None, kinds, facts):
                return
        with self._database.begin() as session:
            new = rows.reconcile(session, None, kinds, facts, now)
        self._tell(new)
        for run_id in {fact.run_id for fact in facts if fact.run_id}:
            self._changes.tell_watchers(run_id)

    def _end_failed(self, now: datetime) -> None:
        """A run that failed a week ago needs nobody any more."""
        old = Alert.began < now - about_runs.FAILED_SHOWN
        query = select(Alert).where(Alert.kind == AlertKind.RUN_ENDED, Alert.ended.is_(None), old)
        with self._database.read() as session:
            if session.scalar(query.limit(1)) is None:
                return
        with self._database.begin() as session:
            for row in session.scalars(query):
                row.ended = row.began + about_runs.FAILED_SHOWN

    def _tell(self, new: Sequence[Alert]) -> None:
        for alert in new:
            about = f"run {alert.run_id}: " if alert.run_id else ""
            log.log(_LEVELS[alert.severity], "alert: %s%s", about, escaped(alert.message))
