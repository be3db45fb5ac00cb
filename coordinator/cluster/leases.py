"""Leases: which coordinator conducts a run, and until when.

A lease has an epoch, which grows whenever a coordinator takes the run. A transaction of a conductor locks the run's row
and compares the epoch (`RunFacts.locked`), so a coordinator that slept past its lease changes nothing. The end of a
lease only says when another coordinator may take the run; times are those of the database's clock.
"""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Protocol

from sqlalchemy import ColumnElement, Interval, func, literal, or_, select, true, type_coerce, update

from storage.columns import UtcDateTime
from storage.database import Database
from storage.models import Run

Moment = Callable[[timedelta], ColumnElement[datetime]]
"""The present time, plus a duration, as an expression of SQL."""


def time_of(clock: Callable[[], datetime]) -> Moment:
    """The time of another clock than the database's."""
    return lambda after: literal(clock() + after, UtcDateTime())


def database_time(after: timedelta) -> ColumnElement[datetime]:
    """The time of PostgreSQL's clock, plus a duration."""
    return type_coerce(func.clock_timestamp() + literal(after, Interval()), UtcDateTime())


class Leases(Protocol):
    """Says which runs this coordinator may conduct. Every method is callable from any thread.

    Attributes:
        shared: True if other coordinators may conduct runs, too.
    """

    shared: bool

    def take(self, run_id: str) -> int | None:
        """Takes a run, and returns the epoch of the lease; None while another coordinator conducts the run."""

    def release(self, run_id: str, epoch: int) -> None:
        """Ends a lease, so that any coordinator may take the run at once."""

    def unclaimed(self) -> ColumnElement[bool]:
        """Selects the runs that no coordinator takes, although this one holds back."""


class OneConductor:
    """The leases of a coordinator that has the database for itself, by the exclusive lock: it may conduct every run."""

    shared = False

    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, run_id: str) -> int | None:
        """The epoch on record; nothing is written."""
        with self._database.read() as session:
            return session.scalar(select(Run.epoch).where(Run.run_id == run_id))

    def release(self, run_id: str, epoch: int) -> None:
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

    def take(self, run_id: str) -> int | None:
        """Takes a run whose lease is over, or was never taken, or is this coordinator's own."""
        taken = (
            update(Run)
            .where(Run.run_id == run_id, or_(Run.conductor == self._coordinator, self.free()))
            .values(conductor=self._coordinator, epoch=Run.epoch + 1, lease_until=self._moment(self.duration))
            .returning(Run.epoch)
        )
        with self._database.begin() as session:
            return session.scalar(taken)

    def release(self, run_id: str, epoch: int) -> None:
        """Ends a lease, unless it is another one's by now."""
        mine = Run.run_id == run_id, Run.conductor == self._coordinator, Run.epoch == epoch
        ended = update(Run).where(*mine).values(conductor="", lease_until=self._moment(timedelta(0)))
        with self._database.begin() as session:
            session.execute(ended)

    def renew(self, epochs: Mapping[str, int]) -> set[str]:
        """Renews the leases of runs, given by their epochs; returns the runs whose leases are lost.

        A lease whose row is locked is left for the next time: a transaction of its own conductor locks it, or somebody
        else's that is short.
        """
        if not epochs:
            return set()
        mine = select(Run.run_id).where(Run.conductor == self._coordinator, Run.run_id.in_(epochs))
        renewed = (
            update(Run)
            .where(Run.run_id.in_(mine.with_for_update(skip_locked=True)))
            .values(lease_until=self._moment(self.duration))
        )
        with self._database.begin() as session:
            session.execute(renewed, execution_options={"synchronize_session": False})
            rows = session.execute(select(Run.run_id, Run.conductor, Run.epoch).where(Run.run_id.in_(epochs))).all()
        held = {row.run_id for row in rows if (row.conductor, row.epoch) == (self._coordinator, epochs[row.run_id])}
        return epochs.keys() - held

    def free(self, since: timedelta = timedelta(0)) -> ColumnElement[bool]:
        """Selects the runs that no coordinator has conducted for some time."""
        if not since:
            return or_(Run.lease_until.is_(None), Run.lease_until <= self._moment(since))
        return func.coalesce(Run.lease_until, Run.created) <= self._moment(-since)

    def unclaimed(self) -> ColumnElement[bool]:
        """Selects the runs that no coordinator has conducted for two leases: each has had the time to take them."""
        return self.free(2 * self.duration)
