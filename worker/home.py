"""The directory of a worker: membership, spool, cached models, and the lock that keeps it to one process."""

import errno
import fcntl
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from federation.directories import Directories
from federation.errors import Error
from federation.owners_code import TwoTexts
from federation.process.lock_file import held
from federation.trust.member_files import COORDINATOR_ROTATIONS, OWN_ROTATIONS

MEMBER_FILE = "member.toml"
LOCK_FILE = "worker.lock"
MEASURE_SECONDS = 10.0


class WorkerHomeError(Error):
    """A worker's directory that cannot be used; the message says why and what to do."""


class DiskFull(Error, OSError):
    """A file of this worker cannot be written; the message names it and the cause."""


class FileLocked(Error, OSError):
    """Another process has locked a file of this worker; the message says which file and what to do."""


def with_remedy(error: OSError) -> str:
    """The message of an error of this worker's files, with what to do about it."""
    return str(error) if isinstance(error, FileLocked) else f"make room on this worker's disk: {error}"


def disk_texts(error: OSError) -> TwoTexts:
    """What is said where a file of this worker cannot be written or read: others are told no path."""
    if isinstance(error, FileLocked):
        return TwoTexts.of(with_remedy(error), "another process holds a file of this worker")
    kind = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return TwoTexts.of(with_remedy(error), f"a file of this worker cannot be written or read ({kind})")


class WorkerHome:
    """The directory of a worker, made by `fedpareto worker join` with mode 0700, and the paths in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pending = directory / "pending.txt"  # there while the member waits for its approval
        self.spool = directory / "spool"  # finished replies that no receipt has acknowledged
        self.handed_in = directory / "handed-in"  # payloads of the last acknowledged replies; safe to delete
        self.cache = directory / "cache"  # models by digest; safe to delete
        self.models = directory / "models"  # what `worker model` fetched last; safe to delete
        self.kept = directory / "kept"  # personal parameters of each run, and residuals, which are never sent
        self.memory = directory / "memory.db"  # values of rounds that are under way; answered questions
        self.privacy = directory / "privacy.db"  # the epsilon that training with noise has spent; never erased
        self.roster = directory / "roster.toml"  # the members and their keys, pinned by the owner
        self.rounds = directory / "private-rounds.db"  # the private rounds that count; never erased
        self.left = directory / "left.db"  # each reply that left the site, with its numbers; declines by reason
        self.receipts = directory / "receipts.jsonl"  # the coordinator's signed receipts
        self.runs = directory / "runs.db"  # the runs that asked to take part, and the owner's decisions
        self.evidence = directory / "evidence"  # signed orders that were refused because they attack this member
        self.policy = directory / "policy.toml"  # the owner's rules; written by hand, may be missing
        self.config = directory / "worker.toml"  # what its process runs with; written by `join`, changed by hand
        self.progress = directory / "progress.json"  # the coordinator's newest signed time and rounds
        self.begun = directory / "begun.json"  # the work that has begun and not ended
        self.pause = directory / "pause.json"  # there while the owner has paused the site
        self.leave = directory / "leave.json"  # there once the owner wants to leave the federation
        self.withdrawal = directory / "withdrawal.json"  # the signed withdrawal, kept after it was acknowledged
        self.starts = directory / "starts.json"  # the ids of its worker's starts, by which a copy of it is found
        self.start_decided = directory / "start-decided"  # the owner's decision which of two copies goes on
        self.status = directory / "status.json"  # what the worker does now; there while it runs
        self.log = directory / "log.json"  # the newest checkpoints of the coordinator's audit log
        self.forked_log = directory / "log-forked.json"  # evidence of an audit log that does not continue them
        self.rotating = directory / "rotating.json"  # a rotation of the signing key that has begun
        self.joining = directory / "joining.key"  # the TLS key of a member that joins again, until it has the answer
        self.coordinator_rotations = directory / COORDINATOR_ROTATIONS
        self.own_rotations = directory / OWN_ROTATIONS
        self.accepted_restore = directory / "restore-accepted"  # names the restore that the owner accepts

    @property
    def directories(self) -> Directories:
        """The directory as it is now, which has to stay there while a worker runs."""
        return Directories([self.directory], "the worker")

    @property
    def joined(self) -> bool:
        """True if it holds a membership."""
        return (self.directory / MEMBER_FILE).is_file()

    def check_joined(self) -> None:
        """Raises WorkerHomeError if there is no membership."""
        if not self.joined:
            raise WorkerHomeError(
                f"{self.directory} holds no membership (no {MEMBER_FILE}): "
                f"mount its disk if it had one; otherwise ask a security officer for a join string and run "
                f"`fedpareto worker join --home {self.directory}`"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the directory until this process ends; raises WorkerHomeError if another worker holds it."""
        directory = self.directory
        with held(
            directory / LOCK_FILE,
            lambda holder: WorkerHomeError(
                f"another worker (process {holder}) runs with {directory}: stop it first, "
                "or join a second client into a directory of its own"
            ),
        ):
            yield

    def locked_by_another(self) -> bool:
        """True if a worker in another process runs with this directory."""
        try:
            descriptor = os.open(self.directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return holder != str(os.getpid())
        finally:
            os.close(descriptor)
        return False


class DiskUse:
    """Measures the files in a directory and below it, at most once in `MEASURE_SECONDS`. Any thread may call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._measured = -math.inf
        self._bytes = 0

    def __call__(self) -> int:
        """The bytes of all files."""
        now = time.monotonic()
        if now - self._measured >= MEASURE_SECONDS:
            # Not rglob, which fails if a directory is removed meanwhile.
            files = (Path(folder, name) for folder, _, names in os.walk(self._directory) for name in names)
            self._bytes, self._measured = sum(map(_size, files)), now
        return self._bytes


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:  # it was removed meanwhile
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
