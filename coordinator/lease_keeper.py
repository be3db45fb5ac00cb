"""The keeper of leases: one of several coordinators shows that it is alive, renews its leases, and takes over runs."""

import logging
import threading
from datetime import timedelta

from sqlalchemy import select

from coordinator.clock import SteadyClock
from coordinator.cluster.leases import SharedLeases
from coordinator.cluster.registry import CLOCK_TOLERANCE, Registry
from coordinator.fault_state import FaultState
from coordinator.rounds.conductors import Conductors
from coordinator.rounds.transitions import UNDER_WAY
from storage.database import Database
from storage.faults import StorageFault
from storage.models import Run

log = logging.getLogger(__name__)

LOOKS = 3  # in the time of a lease


class LeaseKeeper:
    """A thread that looks at the leases, three times in the time of one.

    Args:
        database: the record.
        leases: of this coordinator.
        registry: the coordinators.
        conductors: of the runs.
        faults: notes faults of the database and of the clock.
        clock: of the coordinator; None if nobody can set it.
    """

    def __init__(
        self,
        database: Database,
        leases: SharedLeases,
        registry: Registry,
        conductors: Conductors,
        faults: FaultState,
        clock: SteadyClock | None = None,
    ) -> None:
        self._database = database
        self._leases = leases
        self._registry = registry
        self._conductors = conductors
        self._faults = faults
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; called after the conductors have stopped, which need their leases until then."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Gives a sign of life, renews the leases, and takes over the runs that nobody conducts."""
        ahead = self._registry.give_sign()
        if ahead is None:
            return  # a backup was restored meanwhile: the monitor ends this process
        if self._clock is not None and abs(ahead) > CLOCK_TOLERANCE >= abs(ahead + self._clock.ahead):
            self._clock.follow()  # the machine's clock was set right, or the machine stood still
            log.warning("the time goes on from the machine's clock, which agrees with the database's")
            ahead = timedelta()
        if abs(ahead) > CLOCK_TOLERANCE:
            way = "ahead of" if ahead.total_seconds() > 0 else "behind"
            cause = f"{abs(ahead).total_seconds():.1f} s {way} the database's"
            self._faults.begin(StorageFault.CLOCK, cause)
            self._conductors.hold_back()
        elif StorageFault.CLOCK in self._faults.present:
            self._faults.over(StorageFault.CLOCK)
        if ended := self._leases.end_silent_transactions():
            log.warning("ended %d transactions whose coordinators have sent nothing for a lease", ended)
        for run_id in self._leases.renew(self._conductors.conducted()):
            self._conductors.lose(run_id)
        with self._database.read() as session:
            free = select(Run.run_id, Run.conductor).where(Run.state.in_(UNDER_WAY), self._leases.free())
            runs = {row.run_id: row.conductor for row in session.execute(free)}
        if runs:
            self._conductors.take_over(runs)

    def _run(self) -> None:
        while not self._stopping.wait(self._leases.duration.total_seconds() / LOOKS):
            try:
                self.look()
            except Exception as error:
                if self._faults.note(error) is None:
                    log.exception("the leases could not be looked at; it is tried again")
