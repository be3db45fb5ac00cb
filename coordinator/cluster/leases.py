"""Leases: which coordinator conducts a run, and until when.

A lease has an epoch, which grows whenever a coordinator takes the run. A transaction of a conductor locks the run's row
and compares the lease (`RunFacts.locked`), so a coordinator that slept past its lease changes nothing. The end of a
lease only says when another coordinator may take the run; times are those of the database's clock.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

from sqlalchemy import ColumnElement, Interval, func, literal, or_, select, text, true, type_coerce, update
from sqlalchemy.exc import OperationalError

from storage.columns import UtcDateTime
from storage.database import Database
from storage.models import Run

_LOCK_NOT_AVAILABLE = "55P03"  # the code of PostgreSQL

_END_SILENT = text("""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()
AND backend_xid IS NOT NULL AND wait_event = 'ClientRead'
AND state_change < clock_timestamp() - make_interval(secs => :seconds)
""")

Moment = Callable[[timedelta], ColumnElement[datetime]]
"""The present time, plus a duration, as an expression of SQL."""


def time_of(clock: Callable[[], datetime]) -> Moment:
    """The time of another clock than the database's."""
    return lambda after: literal(clock() + after, UtcDateTime())


def database_time(after: timedelta) -> ColumnElement[datetime]:
    """The time of PostgreSQL's clock, plus a duration."""
    return type_coerce(func.clock_timestamp() + literal(after, Interval()), UtcDateTime())


class Lease(NamedTuple):
    """The lease of a run, as the run's row has it; by default that of a coordinator which needs none."""

    coordinator: str = ""  # the id of the process
    epoch: int = 0


NO_LEASE = Lease()


class Leases(Protocol):
    """Says which runs this coordinator may conduct. Every method is callable from any thread.

    Attributes:
        shared: True if other coordinators may conduct runs, too.
    """

    shared: bool

    def take(self, run_id: str) -> Lease | None:
        """Takes a run; returns None while another coordinator conducts it."""

    def release(self, run_id: str, lease: Lease) -> None:
        """Ends a lease, so that any coordinator may take the run at once."""

    def unclaimed(self) -> ColumnElement[bool]:
        """Selects the runs that no coordinator takes, although this one holds back."""


class OneConductor:
    """The leases of a coordinator that has the database for itself, by the exclusive lock: it may conduct every run."""

    shared = False

    def take(self, run_id: str) -> Lease | None:
        """The lease that every run has without leases."""
        return NO_LEASE

    def release(self, run_id: str, lease: Lease) -> None:
        """Does nothing: nobody else can take the run."""

    def unclaimed(self) -> ColumnElement[bool]:
        """Selects every run."""
        return true()


class SharedLeases:
    """The leases of one of several coordinators.

    Args:
        database: the record, which the coordinators share.
        coordinator: the id of this process.
        duration: of a lease, from when it was taken or renewed.
        moment: the present time.
    """

    shared = True

    def __init__(
        self, database: Database, coordinator: str, *, duration: timedelta, moment: Moment = database_time
    ) -> None:
        self._database = database
        self._coordinator = coordinator
        self.duration = duration
        self._moment = moment
        self._postgresql = database.engine.dialect.name == "postgresql"

    def take(self, run_id: str) -> Lease | None:
        """Takes a run whose lease is over, or was never taken, or is this coordinator's own."""
        taken = (
            update(Run)
            .where(Run.run_id == run_id, or_(Run.conductor == self._coordinator, self.free()))
            .values(conductor=self._coordinator, epoch=Run.epoch + 1, lease_until=self._moment(self.duration))
            .returning(Run.epoch)
        )
        with self._database.begin() as session:
            epoch = session.scalar(taken)
        return None if epoch is None else Lease(self._coordinator, epoch)

    def release(self, run_id: str, lease: Lease) -> None:
        """Ends a lease, unless it is another one's by now."""
        mine = Run.run_id == run_id, Run.conductor == lease.coordinator, Run.epoch == lease.epoch
        ended = update(Run).where(*mine).values(conductor="", lease_until=self._moment(timedelta(0)))
        with self._database.begin() as session:
            session.execute(ended)

    def renew(self, leases: Mapping[str, Lease]) -> set[str]:
        """Renews the leases of runs; returns the runs whose leases are lost.

        The row of a run under way is locked often, mostly by its own conductor. So a row that is locked is waited for,
        for a sixth of a lease, and after the other runs.
        """
        if not leases:
            return set()
        mine = select(Run.run_id).where(Run.conductor == self._coordinator, Run.run_id.in_(leases))
        renewed = (
            update(Run)
            .where(Run.run_id.in_(mine.with_for_update(skip_locked=True, key_share=True)))
            .values(lease_until=self._moment(self.duration))
            .returning(Run.run_id)
        )
        with self._database.begin() as session:
            done = set(session.scalars(renewed, execution_options={"synchronize_session": False}))
        for run_id in sorted(leases.keys() - done):
            if self._postgresql:
                self._renew_locked(run_id)
        with self._database.read() as session:
            rows = session.execute(select(Run.run_id, Run.conductor, Run.epoch).where(Run.run_id.in_(leases))).all()
        held = {row.run_id for row in rows if Lease(row.conductor, row.epoch) == leases[row.run_id]}
        return leases.keys() - held

    def _renew_locked(self, run_id: str) -> None:
        """Renews a lease whose row is locked, if it is released in time; otherwise the next look tries again."""
        renewed = update(Run).where(Run.run_id == run_id, Run.conductor == self._coordinator)
        try:
            with self._database.begin() as session:
                session.execute(
                    text(f"SET LOCAL lock_timeout = {round(self.duration.total_seconds() * 1000 / 6) or 1}")
                )
                session.execute(renewed.values(lease_until=self._moment(self.duration)))
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", "") != _LOCK_NOT_AVAILABLE:
                raise

    def end_silent_transactions(self) -> int:
        """Ends the sessions that hold locks, and whose client has sent nothing for a lease; returns their number.

        The limit on idle transactions (`Database.open`) ends most of them before. It does not count while a message of
        several parts is incomplete, as when the network fails in the middle of it. SQLite, which the simulation of
        faults uses, has no such sessions.
        """
        if not self._postgresql:
            return 0
        with self._database.begin() as session:
            ended = session.execute(_END_SILENT, {"seconds": self.duration.total_seconds()})
            return len(ended.all())

    def free(self, since: timedelta = timedelta(0)) -> ColumnElement[bool]:
        """Selects the runs that no coordinator has conducted for some time."""
        if not since:
            return or_(Run.lease_until.is_(None), Run.lease_until <= self._moment(since))
        return func.coalesce(Run.lease_until, Run.created) <= self._moment(-since)

    def unclaimed(self) -> ColumnElement[bool]:
        """Selects the runs that no coordinator has conducted for two leases: each has had the time to take them."""
        return self.free(2 * self.duration)
