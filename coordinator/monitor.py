"""The monitor: keeps the database and the disk's reserve, probes a bucket, and notes when a fault has ended.

directory gone  end: nothing can be read or written, and nothing must be made in its place
database away   wait; take the lock again when it is back, if no other coordinator has had it meanwhile
disk full       release the reserve, pause every run, and take the reserve again when there is space; so if it is
                read-only or reports errors
bucket away     pause every run, and probe the bucket until it works
clock set back  alert, and nothing more: the coordinator's time goes on evenly
clock forward   follow it by up to a minute. By more it is the fault `clock`: with SQLite nobody can say which time is
                right, so pause every run until both agree again, or an operator resumes one. PostgreSQL's clock
                decides it otherwise
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from coordinator.clock import SteadyClock
from coordinator.fault_state import PAUSING, FaultState
from coordinator.rounds.run_commands import RunCommands
from coordinator.startup import OpenRecord
from federation.directories import DirectoryGone
from federation.errors import Error
from storage.blobs import BlobStoreUnavailable
from storage.database import DatabaseBusy
from storage.faults import StorageFault

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
FAULT_CHECK_SECONDS = 1.0  # while there is a fault
LOCK_SECONDS = 10.0  # how long another process may have the database for itself: a coordinator has it while it starts
SOON_SECONDS = 600.0  # a disk or bucket that fails again within this time is looked at less often, up to
MAX_PAUSE_SECONDS = 60.0
# How far the machine's clock may be set forward without a doubt; less than the second one is not a step.
LARGEST_STEP, _SMALLEST_STEP = timedelta(minutes=1), timedelta(seconds=1)


class LockLost(Error, RuntimeError):
    """Another coordinator has the database."""


class ClockWatch:
    """Watches over the clocks of a coordinator.

    Args:
        clock: the coordinator's.
        faults: notes the fault.
        judged: True if a database has a clock of its own, by which the coordinator's is judged (`LeaseKeeper`).
    """

    def __init__(self, clock: SteadyClock, faults: FaultState, *, judged: bool) -> None:
        self._clock = clock
        self._faults = faults
        self._judged = judged

    def look(self) -> None:
        """Compares the clocks; to be called every few seconds."""
        ahead, doubted = self._clock.ahead, StorageFault.CLOCK in self._faults.present
        self._faults.clock_back = -ahead if ahead < -LARGEST_STEP else timedelta()
        if self._judged:
            return
        if ahead > LARGEST_STEP and not self._faults.clock_vouched:
            cause = f"it was set forward by {shown(ahead)}, or the machine stood still"
            self._faults.begin(StorageFault.CLOCK, cause)
            return
        self._faults.clock_vouched = False
        if ahead > _SMALLEST_STEP:
            self._clock.follow()
            log.warning("the time goes on from the machine's clock, which was set forward by %s", shown(ahead))
        if doubted:
            self._faults.over(StorageFault.CLOCK)


@dataclass
class Looks:
    """The times of looks at a disk or bucket that fails, in seconds that only grow."""

    pause: float = FAULT_CHECK_SECONDS  # before the next look
    retry: float = -math.inf  # when it is due
    ended: float = -math.inf  # when the last fault was over

    def postpone(self, now: float) -> None:
        """The fault lasts."""
        self.retry = now + self.pause

    def end(self, now: float) -> None:
        """The fault is over, or at least it looks so: one that soon returns is looked at less often."""
        soon = now - self.ended < SOON_SECONDS
        self.pause = min(2 * self.pause, MAX_PAUSE_SECONDS) if soon else FAULT_CHECK_SECONDS
        self.ended = now


class Monitor:
    """Watches over one coordinator's database, disk and bucket; made on the event loop.

    Args:
        record: of the coordinator.
        commands: pause the runs while a fault lasts.
        changed: called with the faults when they have changed, for the health service.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        record: OpenRecord,
        commands: RunCommands,
        changed: Callable[[frozenset[StorageFault]], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = record.database
        self._blobs = record.blobs
        self._reserve = record.reserve
        self._registry = record.startup.registry
        self._faults = record.faults
        self._commands = commands
        self._changed = changed
        self._clock = clock
        judged = record.database.serves_many
        self._clocks = None if record.steady is None else ClockWatch(record.steady, record.faults, judged=judged)
        self._stopping = False
        self._lock_missing_since: float | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._resume = True  # runs that a fault paused, also those from before the start
        self._looks = {fault: Looks() for fault in PAUSING}
        record.faults.noted.listen(self._on_fault)

    def _on_fault(self, fault: StorageFault | None) -> None:
        """Callable from any thread."""
        if fault is StorageFault.DISK:
            self._reserve.release()  # at once: writes under way may still succeed
        if fault is None:
            for looks in self._looks.values():
                looks.retry = -math.inf
        elif fault in self._looks:
            self._looks[fault].postpone(self._clock())
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def stop(self) -> None:
        """Ends `run` after the look that is under way; called on the event loop."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Watches until `stop`.

        Raises:
            DirectoryGone: a directory of the coordinator is.
            LockLost: another coordinator has the database, or had it meanwhile.
        """
        shown: frozenset[StorageFault] | None = None
        while not self._stopping:
            self._wake.clear()
            try:
                await asyncio.to_thread(self.look)
            except (DirectoryGone, LockLost):
                raise
            except Exception:
                log.exception("the monitor failed; it looks again")
            faults = frozenset(self._faults.present)
            if faults != shown:
                shown = faults
                await self._changed(faults)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAULT_CHECK_SECONDS if faults else CHECK_SECONDS):
                    await self._wake.wait()
        self._reserve.release()  # only a running coordinator needs it

    def look(self) -> None:
        """Checks directories, database, disk and a bucket that has failed once.

        Raises:
            DirectoryGone: a directory of the coordinator is.
            LockLost: another coordinator has the database, or had it meanwhile.
        """
        self._look_at_directories()
        if self._clocks is not None:
            self._clocks.look()
        try:
            self._look_at_database()
            self._look_at_disk()
            self._hold_runs()
            self._look_at_blobs()
            self._hold_runs()
        except (SQLAlchemyError, OSError, DatabaseBusy) as error:  # busy: no turn to write
            if self._faults.note(error, lasts=True) is None:
                log.exception("the monitor failed; it looks again")
            self._look_at_directories()

    def _look_at_directories(self) -> None:
        if (gone := self._faults.gone()) is not None:
            raise gone

    def _look_at_database(self) -> None:
        try:
            anew = self._database.keep_lock()
        except DatabaseBusy as error:
            if not self._database.serves_many or self._waited_for_lock() > LOCK_SECONDS:
                raise LockLost(f"the connection that reserved the database broke, and now {error}") from None
            self._faults.begin(StorageFault.DATABASE, str(error))  # mostly another coordinator, which starts
            return
        self._lock_missing_since = None
        if (anew or StorageFault.DATABASE in self._faults.present) and self._registry.give_sign() is None:
            raise LockLost(
                f"the connection to the database {self._database.url} broke, and another coordinator had the database "
                "meanwhile: stopped; start again"
            )
        if anew or StorageFault.DATABASE in self._faults.present:
            self._faults.over(StorageFault.DATABASE)

    def _waited_for_lock(self) -> float:
        """Seconds since another process was first found to have the database for itself."""
        now = self._clock()
        self._lock_missing_since = now if self._lock_missing_since is None else self._lock_missing_since
        return now - self._lock_missing_since

    def _look_at_disk(self) -> None:
        """Takes the reserve: it is there only if there is space again."""
        now, looks = self._clock(), self._looks[StorageFault.DISK]
        if StorageFault.DISK in self._faults.present and now < looks.retry:
            return
        try:
            self._reserve.hold()
        except OSError as error:
            if self._faults.note(error, lasts=True) is not StorageFault.DISK:
                raise
            looks.postpone(now)
            return
        if StorageFault.DISK in self._faults.present:
            self._registry.give_sign()  # the database takes writes
            looks.end(now)  # there was space for the reserve, but perhaps not for the next write
            self._faults.over(StorageFault.DISK)

    def _look_at_blobs(self) -> None:
        """Probes the bucket if it has failed; it may refuse one object and work for the probe."""
        now, looks = self._clock(), self._looks[StorageFault.BLOB_STORE]
        if StorageFault.BLOB_STORE not in self._faults.present or now < looks.retry:
            return
        try:
            self._blobs.probe()
        except BlobStoreUnavailable as error:
            self._faults.note(error, lasts=True)
            looks.postpone(self._clock())
        else:
            looks.end(now)
            self._faults.over(StorageFault.BLOB_STORE)

    def _hold_runs(self) -> None:
        """Pauses the runs while a fault lasts, and resumes them after it."""
        faults = self._faults.present
        for fault in PAUSING if self._database.serves_many else (*PAUSING, StorageFault.CLOCK):
            if fault in faults:
                self._resume = True
                return self._commands.pause_for_fault(fault, faults[fault])
        if self._resume:
            self._commands.resume_after_fault()
            self._resume = False
        return None


def shown(span: timedelta) -> str:
    """A span of time in whole seconds."""
    return str(timedelta(seconds=round(span.total_seconds())))
