"""Compares the machine's clock with the coordinator's own, which goes on evenly when that one is set.

set back                       nothing changes but an alert: the coordinator's time goes on
set forward by up to a minute  the coordinator's time follows
set forward by more            the fault `clock`: with SQLite nobody can say which one is right, so the runs pause until
                               both agree again, or an operator resumes one; PostgreSQL's clock decides it otherwise
"""

import logging
from datetime import datetime, timedelta

from coordinator.clock import BEHIND_RECORD, SteadyClock
from coordinator.condition import Condition
from storage import audit
from storage.database import Database
from storage.faults import StorageFault

log = logging.getLogger(__name__)

LARGEST_STEP = timedelta(minutes=1)
_SMALLEST_STEP = timedelta(seconds=1)


class ClockBehind(RuntimeError):
    """The machine's clock is behind the record; the message says by how much."""


class ClockWatch:
    """Watches over the clocks of a coordinator.

    Args:
        clock: the coordinator's.
        condition: notes the fault.
        judged: True if a database has a clock of its own, by which the coordinator's is judged (`LeaseKeeper`).
    """

    def __init__(self, clock: SteadyClock, condition: Condition, *, judged: bool) -> None:
        self._clock = clock
        self._condition = condition
        self._judged = judged

    def look(self) -> None:
        """Compares the clocks; to be called every few seconds."""
        ahead, doubted = self._clock.ahead, StorageFault.CLOCK in self._condition.faults
        self._condition.clock_back = -ahead if ahead < -LARGEST_STEP else timedelta()
        if self._judged:
            return
        if ahead > LARGEST_STEP and not self._condition.clock_vouched:
            cause = f"it was set forward by {shown(ahead)}, or the machine stood still"
            self._condition.begin(StorageFault.CLOCK, cause)
            return
        self._condition.clock_vouched = False
        if ahead > _SMALLEST_STEP:
            self._clock.follow()
            log.warning("the time goes on from the machine's clock, which was set forward by %s", shown(ahead))
        if doubted:
            self._condition.over(StorageFault.CLOCK)


def must_follow(database: Database, now: datetime) -> None:
    """Raises ClockBehind if a time is more than `BEHIND_RECORD` before the newest entry of the record."""
    with database.read() as session:
        newest = audit.last_time(session)
    if newest is not None and now < newest - BEHIND_RECORD:
        raise ClockBehind(
            f"the clock of this machine says {now:%Y-%m-%d %H:%M:%S} UTC, and the newest entry of the record is of "
            f"{newest:%Y-%m-%d %H:%M:%S} UTC: nobody is served until the clock is right. If that entry is of a wrong "
            "clock, run `fedpareto coordinator restored`, which also tells the members"
        )


def shown(span: timedelta) -> str:
    """A span of time in whole seconds."""
    return str(timedelta(seconds=round(span.total_seconds())))
