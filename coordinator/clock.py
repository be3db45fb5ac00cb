"""The time of the coordinator, which every part takes as an argument; tests give another one."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from federation.errors import Error
from storage import audit
from storage.database import Database

# A clock that lies further behind the newest entry of the record is wrong, or was wrong when the entry was written.
BEHIND_RECORD = timedelta(minutes=5)


def utc_now() -> datetime:
    """The time by the machine's clock, aware."""
    return datetime.now(UTC)


def boot_seconds() -> float:
    """Seconds since the machine's start, also those in which it was suspended; setting its clock changes nothing."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def past(at: datetime | None, now: datetime) -> datetime | None:
    """A time on record; None if it is still to come by more than `BEHIND_RECORD`.

    A clock that was ahead noted it, and was set right. What is judged by it would wait until then.
    """
    return None if at is None or at > now + BEHIND_RECORD else at


class SteadyClock:
    """The time of a coordinator that runs: that of the machine's clock at its start, and the seconds since then.

    Deadlines are judged by it, and members keep the newest time that they have seen signed. So it never goes back, and
    goes on evenly when somebody sets the machine's clock. Any thread may call.

    Attributes:
        machine: the machine's clock, aware.
    """

    def __init__(self, machine: Callable[[], datetime] = utc_now, elapsed: Callable[[], float] = boot_seconds) -> None:
        self.machine = machine
        self._elapsed = elapsed
        self._set = (machine(), elapsed())

    def __call__(self) -> datetime:
        """The time, aware."""
        base, at = self._set
        return base + timedelta(seconds=self._elapsed() - at)

    @property
    def ahead(self) -> timedelta:
        """How far the machine's clock is ahead of this one: it was set, or the machine stood still."""
        return self.machine() - self()

    def follow(self) -> None:
        """Goes on from the time of the machine's clock, which is right."""
        self._set = (self.machine(), self._elapsed())


class ClockBehind(Error, RuntimeError):
    """The machine's clock is behind the record; the message says by how much."""


def check_follows(database: Database, now: datetime) -> None:
    """Raises ClockBehind if a time is more than `BEHIND_RECORD` before the newest entry of the record."""
    with database.read() as session:
        newest = audit.last_time(session)
    if newest is not None and now < newest - BEHIND_RECORD:
        raise ClockBehind(
            f"the clock of this machine says {now:%Y-%m-%d %H:%M:%S} UTC, and the newest entry of the record is of "
            f"{newest:%Y-%m-%d %H:%M:%S} UTC: nobody is served until the clock is right. If that entry is of a wrong "
            "clock, run `fedpareto coordinator restored`, which also tells the members"
        )
