"""The start of a coordinator on its database, alone or as one of several.

SQLite has one coordinator, which holds the exclusive lock of the database. PostgreSQL can have several: they share the
lock, and each has a row in the registry, and leases of the runs that it conducts.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import select, update

from coordinator.backups.statement import kept_statement
from coordinator.cluster.leases import Leases, Moment, OneConductor, SharedLeases, database_time, time_of
from coordinator.cluster.registry import CoordinatorFacts, Registry, software
from coordinator.home import CoordinatorHome
from coordinator.ownership import CoordinatorHomeError
from coordinator.rounds.transitions import interrupt_simulations
from federation.digests import digest
from storage.blobs import BlobStore
from storage.database import Database, DatabaseBusy, DatabaseTooOld
from storage.models import Federation

log = logging.getLogger(__name__)

START_SECONDS = 30.0  # how long a coordinator waits for another one that is starting, or for a restore
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class ProcessLock:
    """The locks of a coordinator process.

    Attributes:
        alone: True if no other coordinator serves.
        directory: the file that keeps a second process out of the directory; None if the lock of the database does.
    """

    alone: bool
    directory: int | None

    def release(self) -> None:
        """Frees the directory for another process."""
        if self.directory is not None:
            os.close(self.directory)


@dataclass(frozen=True)
class Startup:
    """What a coordinator process has while it serves: its row among the coordinators, and its leases of runs."""

    registry: Registry
    leases: Leases


def lock_database(home: CoordinatorHome, database: Database) -> ProcessLock:
    """Locks the database, alone or with other coordinators, and the directory.

    Raises:
        DatabaseBusy: another process has the database, or this directory.
    """
    directory = _lock_directory(home) if database.serves_many else None
    try:
        return ProcessLock(_lock(database), directory)
    except BaseException:
        if directory is not None:
            os.close(directory)
        raise


def forget_ports(home: CoordinatorHome) -> None:
    """Removes the ports that a process which was killed has left in a directory, unless another one serves from it."""
    with suppress(DatabaseBusy):
        descriptor = _lock_directory(home)
        home.ports_file.unlink(missing_ok=True)
        os.close(descriptor)


def start_up(
    home: CoordinatorHome,
    database: Database,
    process_lock: ProcessLock,
    coordinator: str,
    *,
    clock: Callable[[], datetime],
) -> Startup:
    """Brings the schema up to date, and enters the registry under an id.

    Raises:
        DatabaseIncompatible: a newer or an unreleased version made the database.
        HomeError: another coordinator has other keys or settings, or the database is of an older version.
    """
    if process_lock.alone:
        database.migrate()
        with database.begin() as session:
            interrupt_simulations(session, clock())
    else:
        try:
            database.check_current()
        except DatabaseTooOld as error:
            raise CoordinatorHomeError(f"{error}: stop every coordinator, then start this one first") from None
    lease = timedelta(seconds=home.settings.lease_seconds)
    moment: Moment = database_time if database.serves_many else time_of(clock)
    registry = Registry(database, _facts(home, coordinator, clock()), lease=lease, clock=clock, moment=moment)
    home.record_configuration(database, by="coordinator", now=clock())
    registry.enter()
    if not database.serves_many:
        return Startup(registry, OneConductor())
    database.lock_shared()
    return Startup(registry, SharedLeases(database, coordinator, duration=lease))


def check_shares_blobs(database: Database, blobs: BlobStore, registry: Registry) -> None:
    """Compares the blob store with that of the other coordinators, by a blob that all must find.

    Raises:
        HomeError: another coordinator that is alive has another store.
    """
    if not database.serves_many:
        return
    with database.read() as session:
        known = session.scalar(select(Federation.shared_blob)) or ""
        others = registry.others_alive(session)
    if known and blobs.exists(known):
        return
    if known and others:
        raise CoordinatorHomeError(
            "the blobs of this coordinator are not those of the others: give all the same bucket, or the same "
            "directory on a file system that they share, as `blobs` in coordinator.toml"
        )
    made = blobs.put(f"the blobs of one federation's coordinators, {os.urandom(16).hex()}\n".encode())
    with database.begin() as session:
        noted = update(Federation).where(Federation.shared_blob == known).values(shared_blob=made)
        first = session.execute(noted.returning(Federation.shared_blob)).one_or_none() is not None
    if not first:  # another coordinator was faster
        check_shares_blobs(database, blobs, registry)


def _facts(home: CoordinatorHome, coordinator: str, now: datetime) -> CoordinatorFacts:
    restored = digest(kept_statement(home.directory))
    return CoordinatorFacts(
        coordinator=coordinator,
        software=software(),
        keys=digest(" ".join([*home.public_keys().values(), restored]).encode()),
        settings=digest(home.settings.shared.model_dump_json().encode()),
        started=now,
    )


def _lock(database: Database) -> bool:
    """Takes the exclusive lock and returns True, or shares the lock of other coordinators and returns False."""
    ends = time.monotonic() + START_SECONDS
    while True:
        try:
            database.lock_exclusive()
            return True
        except DatabaseBusy:
            if not database.serves_many:
                raise
        try:
            database.lock_shared()
            return False
        except DatabaseBusy:
            if time.monotonic() > ends:
                raise
        time.sleep(_PAUSE_SECONDS)  # PostgreSQL tells nobody that an advisory lock was released


def _lock_directory(home: CoordinatorHome) -> int:
    """Keeps a second coordinator out of this directory; each has one of its own."""
    descriptor = os.open(home.directory / "serving.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DatabaseBusy(
            f"another coordinator serves from {home.directory}: give each a directory of its own, made by `fedpareto "
            "coordinator copy-keys`"
        ) from None
    return descriptor
