"""The faults of a soak: drawn from a seed, each with the repair that ends it."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from tests.postgresql import Postgresql, end_sessions
from tests.soak.cluster import Cluster, Coordinator

Repair = Callable[[], None]


class Kind(StrEnum):
    """What can go wrong."""

    KILLED = "coordinator killed (SIGKILL) and started again"
    FROZEN = "coordinator stopped (SIGSTOP) and continued (SIGCONT)"
    CUT = "connections of a coordinator to PostgreSQL cut"
    SILENT = "nothing arrives between a coordinator and PostgreSQL for a while"
    ENDED = "every session of the database ended by PostgreSQL"
    FRONT = "front listener of a coordinator killed: its members lose their connections"
    WORKER = "worker killed (SIGKILL) and started again"
    DIRECTORY = "disk of a coordinator's directory full (tmpfs)"
    BLOBS = "disk of the blobs full (tmpfs)"
    POSTGRESQL = "PostgreSQL killed (SIGKILL) and started again"


WEIGHTS = {
    Kind.KILLED: 20,
    Kind.FROZEN: 20,
    Kind.CUT: 12,
    Kind.SILENT: 10,
    Kind.ENDED: 5,
    Kind.FRONT: 6,
    Kind.WORKER: 15,
    Kind.DIRECTORY: 5,
    Kind.BLOBS: 3,
    Kind.POSTGRESQL: 4,
}
_OF_COORDINATORS = (Kind.KILLED, Kind.FROZEN, Kind.CUT, Kind.SILENT, Kind.FRONT, Kind.DIRECTORY)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        after: seconds after the one before it.
        kind: of the fault.
        target: the name of a coordinator or a member; empty for what all share.
        seconds: how long it lasts.
    """

    after: float
    kind: Kind
    target: str
    seconds: float


def drawn(random: Random, cluster: Cluster, kinds: Sequence[Kind], *, pause: float, lease: float) -> Iterator[Fault]:
    """Draws faults without end.

    The first coordinator is never killed, so that its memory can be compared over the whole time.

    Args:
        random: draws them.
        cluster: what they befall.
        kinds: those that are possible here.
        pause: the mean of the seconds between two faults.
        lease: the seconds of a lease; faults are shorter and longer than it.
    """
    coordinators, members = [*cluster.coordinators], [*cluster.workers]
    while True:
        (kind,) = random.choices(kinds, [WEIGHTS[kind] for kind in kinds])
        after, seconds = random.expovariate(1 / pause), random.uniform(0.1, 2.5) * lease
        target = ""
        if kind in _OF_COORDINATORS:
            target = random.choice(coordinators[1:] if kind is Kind.KILLED else coordinators)
        elif kind is Kind.WORKER:
            target = random.choice(members)
        yield Fault(after, kind, target, seconds)


@dataclass(frozen=True)
class Inflictor:
    """Makes faults happen.

    Attributes:
        cluster: what they befall.
        server: its PostgreSQL.
        url: of the database.
    """

    cluster: Cluster
    server: Postgresql
    url: str

    def inflict(self, fault: Fault) -> Repair | None:
        """Makes a fault happen; returns what ends it, or None if the fault is over already."""
        coordinator = self.cluster.coordinators.get(fault.target)
        match fault.kind:
            case Kind.ENDED:
                end_sessions(self.url)
                return None
            case Kind.WORKER:
                self.cluster.workers[fault.target].kill()
                return lambda: (self.cluster.work(fault.target), None)[1]
            case Kind.BLOBS:
                return self._fill(self.cluster.directory / "blobs")
            case Kind.POSTGRESQL:
                self.server.kill()
                return self.server.start
        assert coordinator is not None
        return self._befall(coordinator, fault.kind)

    def _befall(self, coordinator: Coordinator, kind: Kind) -> Repair | None:
        match kind:
            case Kind.KILLED:
                coordinator.die()
                return coordinator.begin
            case Kind.FROZEN:
                coordinator.freeze()
                return coordinator.thaw
            case Kind.CUT:
                coordinator.line.cut()
            case Kind.SILENT:
                coordinator.line.hold()
                return coordinator.line.release
            case Kind.FRONT:
                if front := coordinator.front():
                    with suppress(ProcessLookupError):
                        os.kill(front, signal.SIGKILL)
            case Kind.DIRECTORY:
                return self._fill(coordinator.directory)
        return None

    def _fill(self, directory: Path) -> Repair:
        fill(directory)
        return lambda: (directory / "ballast").unlink(missing_ok=True)


def fill(directory: Path) -> None:
    """Takes every byte of a file system that is free now, and no more: a coordinator may release its reserve then."""
    system = os.statvfs(directory)
    free, size = system.f_bavail * system.f_frsize, 1 << 20
    with (directory / "ballast").open("ab", buffering=0) as file:
        while size and free:
            try:
                free -= file.write(bytes(min(size, free)))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[bool]:
    """Mounts a file system in memory, of "64m" or "128k", on a directory. False if that is not permitted here."""
    directory.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    mounted = subprocess.run(["mount", *options, str(directory)], capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
