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
from coordinator.cluster.registry import Registry
from coordinator.fault_state import PAUSING, FaultState
from coordinator.rounds.run_commands import RunCommands
from federation.directories import DirectoryGone
from federation.errors import Error
from storage.blobs import BlobStore, BlobStoreUnavailable
from storage.database import Database, DatabaseBusy
from storage.faults import StorageFault
from storage.reserve import Reserve

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


@dataclass(eq=False, kw_only=True)
class Monitor:
    """Watches over one coordinator's database, disk and bucket; made on the event loop.

    Attributes:
        registry: has the row of this process.
        clocks: compares the machine's clock with the coordinator's; None if there is only one.
        changed: called with the faults when they have changed, for the health service.
        clock: seconds that only grow.
    """

    database: Database
    blobs: BlobStore
    reserve: Reserve
    commands: RunCommands
    faults: FaultState
    registry: Registry
    clocks: ClockWatch | None
    changed: Callable[[frozenset[StorageFault]], Awaitable[None]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stopping = False
        self._lock_missing_since: float | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._resume = True  # runs that a fault paused, also those from before the start
        self._looks = {fault: Looks() for fault in PAUSING}
        self.faults.noted.listen(self._on_fault)

    def _on_fault(self, fault: StorageFault | None) -> None:
        """Callable from any thread."""
        if fault is StorageFault.DISK:
            self.reserve.release()  # at once: writes under way may still succeed
        if fault is None:
            for looks in self._looks.values():
                looks.retry = -math.inf
        elif fault in self._looks:
            self._looks[fault].postpone(self.clock())
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
            faults = frozenset(self.faults.present)
            if faults != shown:
                shown = faults
                await self.changed(faults)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAULT_CHECK_SECONDS if faults else CHECK_SECONDS):
                    await self._wake.wait()
        self.reserve.release()  # only a running coordinator needs it

    def look(self) -> None:
        """Checks directories, database, disk and a bucket that has failed once.

        Raises:
            DirectoryGone: a directory of the coordinator is.
            LockLost: another coordinator has the database, or had it meanwhile.
        """
        self._look_at_directories()
        if self.clocks is not None:
            self.clocks.look()
        try:
            self._look_at_database()
            self._look_at_disk()
            self._hold_runs()
            self._look_at_blobs()
            self._hold_runs()
        except (SQLAlchemyError, OSError, DatabaseBusy) as error:  # busy: no turn to write
            if self.faults.note(error, lasts=True) is None:
                log.exception("the monitor failed; it looks again")
            self._look_at_directories()

    def _look_at_directories(self) -> None:
        if (gone := self.faults.gone()) is not None:
            raise gone

    def _look_at_database(self) -> None:
        try:
            anew = self.database.keep_lock()
        except DatabaseBusy as error:
            if not self.database.serves_many or self._waited_for_lock() > LOCK_SECONDS:
                raise LockLost(f"the connection that reserved the database broke, and now {error}") from None
            self.faults.begin(StorageFault.DATABASE, str(error))  # mostly another coordinator, which starts
            return
        self._lock_missing_since = None
        if (anew or StorageFault.DATABASE in self.faults.present) and self.registry.give_sign() is None:
            raise LockLost(
                f"the connection to the database {self.database.url} broke, and another coordinator had the database "
                "meanwhile: stopped; start again"
            )
        if anew or StorageFault.DATABASE in self.faults.present:
            self.faults.over(StorageFault.DATABASE)

    def _waited_for_lock(self) -> float:
        """Seconds since another process was first found to have the database for itself."""
        now = self.clock()
        self._lock_missing_since = now if self._lock_missing_since is None else self._lock_missing_since
        return now - self._lock_missing_since

    def _look_at_disk(self) -> None:
        """Takes the reserve: it is there only if there is space again."""
        now, looks = self.clock(), self._looks[StorageFault.DISK]
        if StorageFault.DISK in self.faults.present and now < looks.retry:
            return
        try:
            self.reserve.hold()
        except OSError as error:
            if self.faults.note(error, lasts=True) is not StorageFault.DISK:
                raise
            looks.postpone(now)
            return
        if StorageFault.DISK in self.faults.present:
            self.registry.give_sign()  # the database takes writes
            looks.end(now)  # there was space for the reserve, but perhaps not for the next write
            self.faults.over(StorageFault.DISK)

    def _look_at_blobs(self) -> None:
        """Probes the bucket if it has failed; it may refuse one object and work for the probe."""
        now, looks = self.clock(), self._looks[StorageFault.BLOB_STORE]
        if StorageFault.BLOB_STORE not in self.faults.present or now < looks.retry:
            return
        try:
            self.blobs.probe()
        except BlobStoreUnavailable as error:
            self.faults.note(error, lasts=True)
            looks.postpone(self.clock())
        else:
            looks.end(now)
            self.faults.over(StorageFault.BLOB_STORE)

    def _hold_runs(self) -> None:
        """Pauses the runs while a fault lasts, and resumes them after it."""
        faults = self.faults.present
        for fault in PAUSING if self.database.serves_many else (*PAUSING, StorageFault.CLOCK):
            if fault in faults:
                self._resume = True
                return self.commands.pause_for_fault(fault, faults[fault])
        if self._resume:
            self.commands.resume_after_fault()
            self._resume = False
        return None


def shown(span: timedelta) -> str:
    """A span of time in whole seconds."""
    return str(timedelta(seconds=round(span.total_seconds())))
