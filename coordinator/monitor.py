"""The monitor: keeps the database and the disk's reserve, and notes when a fault has ended.

directory gone  end: nothing can be read or written, and nothing must be made in its place
database away   wait; take the lock again when it is back, if no other coordinator has had it meanwhile
disk full       release the reserve, pause every run, and take the reserve again when there is space
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from coordinator.condition import Condition
from coordinator.ownership import in_office, take_office
from coordinator.rounds.supervisor import Supervisor
from storage.database import Database, DatabaseBusy
from storage.faults import StorageFault
from storage.reserve import Reserve

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
FAULT_CHECK_SECONDS = 1.0  # while there is a fault
SOON_SECONDS = 600.0  # a disk that is full again within this time is looked at less often, up to
MAX_PAUSE_SECONDS = 60.0


class LockLost(RuntimeError):
    """Another coordinator has the database."""


@dataclass(eq=False, kw_only=True)
class Monitor:
    """Watches over one coordinator's database and disk; made on the event loop.

    Attributes:
        coordinator: the id of this process, as `take_office` recorded it.
        changed: called with the faults when they have changed, for the health service.
        clock: seconds that only grow.
    """

    database: Database
    reserve: Reserve
    supervisor: Supervisor
    condition: Condition
    coordinator: str
    changed: Callable[[frozenset[StorageFault]], Awaitable[None]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stopping = False
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._resume = True  # runs that a full disk paused, also those from before the start
        self._pause = FAULT_CHECK_SECONDS  # before the next check of a full disk
        self._retry = self._freed = -math.inf  # the time of that check; the time when a disk last had space again
        self.condition.on_fault(self._on_fault)

    def _on_fault(self, fault: StorageFault | None) -> None:
        """Callable from any thread."""
        if fault is StorageFault.DISK:
            self.reserve.release()  # at once: writes under way may still succeed
            self._retry = self.clock() + self._pause
        elif fault is None:
            self._retry = -math.inf
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
            await asyncio.to_thread(self.look)
            faults = frozenset(self.condition.faults)
            if faults != shown:
                shown = faults
                await self.changed(faults)
            with suppress(TimeoutError):
                async with asyncio.timeout(FAULT_CHECK_SECONDS if faults else CHECK_SECONDS):
                    await self._wake.wait()
        self.reserve.release()  # only a running coordinator needs it

    def look(self) -> None:
        """Checks directories, database and disk once.

        Raises:
            DirectoryGone: a directory of the coordinator is.
            LockLost: another coordinator has the database, or had it meanwhile.
        """
        self._look_at_directories()
        try:
            self._look_at_database()
            self._look_at_disk()
        except (SQLAlchemyError, OSError, DatabaseBusy) as error:  # busy: no turn to write
            if self.condition.note(error, lasts=True) is None:
                log.exception("the monitor failed; it looks again")
            self._look_at_directories()

    def _look_at_directories(self) -> None:
        if (gone := self.condition.gone()) is not None:
            raise gone

    def _look_at_database(self) -> None:
        try:
            anew = self.database.keep_lock()
        except DatabaseBusy as error:
            raise LockLost(f"the connection that reserved the database broke, and now {error}") from None
        if anew and not in_office(self.database, self.coordinator):
            raise LockLost(
                f"the connection to the database {self.database.url} broke, and another coordinator had the database "
                "meanwhile: stopped; start again"
            )
        if anew or StorageFault.DATABASE in self.condition.faults:
            take_office(self.database, self.coordinator)  # this also shows that the database takes writes
            self.condition.over(StorageFault.DATABASE)

    def _look_at_disk(self) -> None:
        now = self.clock()
        if StorageFault.DISK not in self.condition.faults or now >= self._retry:
            self._hold(now)
        full = self.condition.faults.get(StorageFault.DISK)
        if full is not None:
            self.supervisor.pause_for_disk(full)
        elif self._resume:
            self.supervisor.resume_after_disk()
            self._resume = False

    def _hold(self, now: float) -> None:
        """Takes the reserve: it is there only if there is space again."""
        try:
            self.reserve.hold()
        except OSError as error:
            if self.condition.note(error, lasts=True) is not StorageFault.DISK:
                raise
            self._retry = now + self._pause
            return
        if StorageFault.DISK in self.condition.faults:
            take_office(self.database, self.coordinator)
            # There was space for the reserve, but perhaps not for the next write: then look less often.
            soon = now - self._freed < SOON_SECONDS
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS) if soon else FAULT_CHECK_SECONDS
            self._freed = now
            self._resume = True
            self.condition.over(StorageFault.DISK)
