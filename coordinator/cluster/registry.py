"""The coordinators of one database: the row of this process, its signs of life, and what all must have in common."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from importlib.metadata import version

from sqlalchemy import ColumnElement, delete, insert, select, true, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from coordinator.cluster.leases import Moment, database_time
from coordinator.ownership import CoordinatorHomeError
from storage.database import Database
from storage.models import CoordinatorProcess

log = logging.getLogger(__name__)

CLOCK_TOLERANCE = timedelta(seconds=2)  # a coordinator whose clock differs more from the database's does not serve
FORGOTTEN_AFTER = timedelta(days=1)  # the row of a process that has died is removed


@cache
def software() -> str:
    """The name and version of this coordinator's program."""
    return f"fedpareto {version('fedpareto')}"


@dataclass(frozen=True)
class CoordinatorFacts:
    """What a coordinator process says of itself.

    Attributes:
        coordinator: its id, made at the start.
        software: its version.
        keys: the digest of its public keys.
        settings: the digest of the settings that all coordinators share.
        started: when.
    """

    coordinator: str
    software: str
    keys: str
    settings: str
    started: datetime


class Registry:
    """The coordinators of a database, as one of them sees them.

    Args:
        database: the record.
        facts: of this process.
        lease: how long a coordinator counts as alive after its last sign of life.
        clock: of this machine, aware.
        moment: the time of the database.
    """

    def __init__(
        self,
        database: Database,
        facts: CoordinatorFacts,
        *,
        lease: timedelta,
        clock: Callable[[], datetime],
        moment: Moment = database_time,
    ) -> None:
        self._database = database
        self._facts = facts
        self._lease = lease
        self._clock = clock
        self._moment = moment

    @property
    def coordinator(self) -> str:
        """The id of this process."""
        return self._facts.coordinator

    def enter(self) -> None:
        """Adds this process.

        Raises:
            HomeError: another coordinator that is alive has other keys or settings.
        """
        mine = self._facts
        with self._database.begin() as session:
            old = CoordinatorProcess.last_seen < self._moment(-FORGOTTEN_AFTER)
            session.execute(delete(CoordinatorProcess).where(old if self._database.serves_many else true()))
            for other in session.scalars(select(CoordinatorProcess).where(self.alive())):
                self._check_agrees(other)
            row = insert(CoordinatorProcess).values(**vars(mine), last_seen=self._moment(timedelta(0)))
            session.execute(row)

    def note_addresses(self, address: str, enrollment_address: str) -> None:
        """Notes where this process serves members, and newcomers: "host:port"."""
        self._change(address=address, enrollment_address=enrollment_address)

    def give_sign(self) -> timedelta | None:
        """Gives a sign of life. Returns how far this machine's clock is ahead; None if the row is gone.

        A restore of a backup removes the rows of all coordinators.
        """
        before = self._clock()
        with self._database.begin() as session:
            now = session.scalar(self._changed(last_seen=self._moment(timedelta(0))))
        after = self._clock()
        if now is None:
            return None
        # The database read its clock between the two: only what lies outside is a difference.
        return before - now if before > now else min(after - now, timedelta(0))

    def leave(self) -> None:
        """Removes this process."""
        mine = CoordinatorProcess.coordinator == self._facts.coordinator
        with self._database.begin() as session:
            session.execute(delete(CoordinatorProcess).where(mine))

    def alive(self) -> ColumnElement[bool]:
        """Selects the coordinators that have given a sign of life within a lease."""
        return CoordinatorProcess.last_seen > self._moment(-self._lease)

    def others_alive(self, session: Session) -> bool:
        """True if another coordinator is alive."""
        other = CoordinatorProcess.coordinator != self._facts.coordinator
        return session.scalar(select(CoordinatorProcess.coordinator).where(other, self.alive()).limit(1)) is not None

    def _check_agrees(self, other: CoordinatorProcess) -> None:
        mine = self._facts
        where = f"the coordinator at {other.address}" if other.address else "another coordinator"
        if other.keys != mine.keys:
            raise CoordinatorHomeError(
                f"{where} serves this federation with other keys: make this directory again, with `fedpareto "
                "coordinator copy-keys` from one whose keys are the newest"
            )
        if other.settings != mine.settings:
            raise CoordinatorHomeError(
                f"{where} serves this federation with other settings: give all coordinators the same coordinator.toml, "
                "except for the settings of each machine, and start this one again"
            )

    def _change(self, **values: object) -> None:
        with self._database.begin() as session:
            session.execute(self._changed(**values))

    def _changed(self, **values: object) -> ReturningUpdate[datetime]:
        mine = CoordinatorProcess.coordinator == self._facts.coordinator
        return update(CoordinatorProcess).where(mine).values(**values).returning(CoordinatorProcess.last_seen)
