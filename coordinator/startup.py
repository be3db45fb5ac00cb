"""The start of a coordinator on its database, alone or as one of several; and the scope of what it starts.

SQLite has one coordinator, which holds the exclusive lock of the database. PostgreSQL can have several: they share the
lock, and each has a row in the registry, and leases of the runs that it conducts.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import select, update

from coordinator.audit.checkpoints import LogError
from coordinator.audit.sequencer import Sequencer
from coordinator.backups.statement import kept_statement
from coordinator.clock import SteadyClock, check_follows
from coordinator.cluster.leases import Leases, Moment, OneConductor, SharedLeases, database_time, time_of
from coordinator.cluster.registry import CoordinatorFacts, Registry, software
from coordinator.fault_state import FaultState
from coordinator.home import CoordinatorHome
from coordinator.members.logged_rights import LoggedRights
from coordinator.members.requests import officers_caution
from coordinator.ownership import CoordinatorHomeError
from coordinator.rounds.transitions import interrupt_simulations
from coordinator.thread_pool import ThreadPool, all_started
from federation.digests import digest
from federation.directories import Directories
from federation.trust.keys import make_private_directory
from storage import audit
from storage.blobs import BlobStore
from storage.database import UNAVAILABLE, Database, DatabaseBusy, DatabaseTooOld
from storage.faults import explain_fault
from storage.models import Federation
from storage.reserve import Reserve

log = logging.getLogger(__name__)

START_SECONDS = 30.0  # how long a coordinator waits for another one that is starting, or for a restore
_PAUSE_SECONDS = 0.2


class Startable(Protocol):
    """A part of the coordinator with a thread of its own."""

    def start(self) -> None:
        """Starts it."""

    def stop(self) -> None:
        """Ends it, also after a start that has failed half way."""


StartableT = TypeVar("StartableT", bound=Startable)


class Scope(AsyncExitStack):
    """What is started in it is stopped at its end, in reverse order, also if the start of a later part fails."""

    async def start(self, part: StartableT) -> StartableT:
        """Starts a part; the event loop does not wait for it, nor for its end."""
        self.push_async_callback(asyncio.to_thread, part.stop)
        await asyncio.to_thread(part.start)
        return part

    def threads(self, database: Database, count: int, prefix: str) -> ThreadPool:
        """Starts threads."""
        executor = all_started(count, prefix)
        self.push_async_callback(asyncio.to_thread, executor.shutdown)
        return ThreadPool(database, executor)


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


@dataclass(frozen=True)
class OpenRecord:
    """What a coordinator has when its record is open and verified, before it goes on with the runs.

    Attributes:
        startup: its row among the coordinators, and its leases.
        reserve: of space on its disks.
        rights: as the log tells of them.
        sequencer: of the audit log.
        clock: the time, aware.
        steady: the same, where it is compared with the machine's clock; None if it is not.
    """

    home: CoordinatorHome
    database: Database
    faults: FaultState
    startup: Startup
    reserve: Reserve
    rights: LoggedRights
    sequencer: Sequencer
    blobs: BlobStore
    clock: Callable[[], datetime]
    steady: SteadyClock | None

    @property
    def machine_clock(self) -> Callable[[], datetime]:
        """The time of the machine, by which files are dated."""
        return self.clock if self.steady is None else self.steady.machine

    def is_submitted(self, run_id: str, spec: str) -> bool:
        """True if the audit log tells of the submission of a run with a specification of this digest."""
        if not self.rights.tells_of_run(run_id, spec):  # it may have been submitted a moment ago
            try:
                self.sequencer.sequence()
            except LogError as error:
                log.error("audit log: %s", error)
        return self.rights.tells_of_run(run_id, spec)


async def open_record(
    scope: Scope, home: CoordinatorHome, clock: Callable[[], datetime] | None, *, conduct: bool
) -> OpenRecord:
    """Takes the database, enters the registry, verifies the audit log and the rights, and probes the blobs.

    Args:
        scope: ends all of this.
        home: of the coordinator.
        clock: the time, aware; None for a `SteadyClock`. Such a clock is compared with the machine's.
        conduct: True if runs shall advance: the start is recorded.

    Raises:
        ClockBehind: the machine's clock is behind the record.
        DatabaseBusy: another coordinator has the database.
        DatabaseIncompatible: a newer or an unreleased version made it.
        HomeError: the directory and the database do not belong together, or not to the other coordinators.
        LogError: the audit log differs from what was signed, or an administrator or a member from the log.
        BlobStoreUnavailable: the bucket of the blobs does not work.
    """
    clock = clock or SteadyClock()
    steady = clock if isinstance(clock, SteadyClock) else None
    database = await asyncio.to_thread(home.open_database)  # it may wait ten seconds for an answer
    scope.callback(database.close)
    if steady is not None:
        await asyncio.to_thread(check_follows, database, steady.machine())
    process_lock = await asyncio.to_thread(lock_database, home, database)  # it may wait
    scope.callback(process_lock.release)
    scope.callback(database.close)  # before the directory is free for a process that wants the database for itself
    make_private_directory(home.blobs_dir)
    on_disks = [*filter(None, [database.directory]), home.blobs_dir]
    directories = Directories([home.directory, *on_disks], "the coordinator", waits=True)
    faults = FaultState(alone=not database.serves_many, directories=directories)
    reserve = _hold_reserve(scope, on_disks, faults)
    home.ports_file.unlink(missing_ok=True)
    startup = start_up(home, database, process_lock, secrets.token_hex(16), clock=clock)
    scope.push_async_callback(asyncio.to_thread, _leave, startup.registry, faults)
    with database.read() as session:
        if (caution := officers_caution(session, home.settings)) is not None:
            log.warning("%s", caution)
    if conduct:
        with database.begin() as session:
            audit.record(session, at=clock(), actor="coordinator", action="coordinator.started", detail=software())
    rights = LoggedRights()
    sequencer = Sequencer(database, home.log_key, home.directory, faults=faults, clock=clock, listener=rights.learn)
    await scope.start(sequencer)
    await asyncio.to_thread(_check_logged, database, sequencer, rights)
    blobs = home.open_blobs(database)
    blobs.sweep_temporary()
    blobs.probe(takes_new=True)
    check_shares_blobs(database, blobs, startup.registry)
    return OpenRecord(home, database, faults, startup, reserve, rights, sequencer, blobs, clock, steady)


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
    try:
        database.lock_shared()
    except BaseException:
        with suppress(*UNAVAILABLE):  # or others would wait for its signs of life
            registry.leave()
        raise
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


def _hold_reserve(scope: Scope, directories: Sequence[Path], faults: FaultState) -> Reserve:
    """The reserve on the disks of the database and the blobs; on a disk that is full already, it is released."""
    reserve = Reserve(directories)

    def release() -> None:
        if faults.gone() is None:  # or it would be that of another directory
            reserve.release()

    scope.callback(release)
    try:
        reserve.hold()
    except OSError as error:
        if faults.note(error) is None:
            raise
    return reserve


def _check_logged(database: Database, sequencer: Sequencer, rights: LoggedRights) -> None:
    """Compares administrators and members with the log; looks twice, since one may be issued meanwhile."""
    problems = list[str]()
    for _ in range(2):
        sequencer.sequence()
        with database.read() as session:
            problems = rights.problems(session)
        if not problems:
            return
    raise LogError(
        f"the database gives rights that the audit log does not tell of: {'; '.join(problems[:5])}. Somebody has "
        "changed the database: keep a copy of it, and restore the newest backup"
    )


def _leave(registry: Registry, faults: FaultState) -> None:
    """Leaves the registry, so that other coordinators need not wait for a sign of life."""
    try:
        if faults.gone() is None:
            registry.leave()
    except UNAVAILABLE as error:
        log.warning("could not note that this coordinator has stopped: %s", explain_fault(error))


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
