"""The directory of a worker: membership, spool, cached models, and the lock that keeps it to one process."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MEMBER_FILE = "member.toml"


class HomeError(Exception):
    """A directory that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Home:
    """Where a worker keeps what must outlive it.

    Attributes:
        directory: made by `fedpareto worker join`, mode 0700.
    """

    directory: Path

    @property
    def spool(self) -> Path:
        """Finished replies that no receipt has acknowledged."""
        return self.directory / "spool"

    @property
    def handed_in(self) -> Path:
        """The payloads of the last replies that were acknowledged; safe to delete."""
        return self.directory / "handed-in"

    @property
    def cache(self) -> Path:
        """Models by digest; safe to delete."""
        return self.directory / "cache"

    @property
    def sessions(self) -> Path:
        """What is remembered of rounds that are under way, and which questions were answered."""
        return self.directory / "sessions.db"

    @property
    def receipts(self) -> Path:
        """The coordinator's signed receipts, JSON lines."""
        return self.directory / "receipts.jsonl"

    @property
    def policy(self) -> Path:
        """What the owner allows; written by hand, may be missing."""
        return self.directory / "policy.toml"

    @property
    def progress(self) -> Path:
        """How far the coordinator has come, by its signed words."""
        return self.directory / "progress.json"

    @property
    def accepted_restore(self) -> Path:
        """Names the restore that the owner accepts, until the worker has taken note."""
        return self.directory / "restore-accepted"

    @property
    def joined(self) -> bool:
        """Whether it holds a membership."""
        return (self.directory / MEMBER_FILE).is_file()

    def require_joined(self) -> None:
        """Makes sure that there is a membership to work with.

        Raises:
            HomeError: there is none.
        """
        if not self.joined:
            raise HomeError(
                f"{self.directory} holds no membership (no {MEMBER_FILE}): "
                f"ask a security officer for a join string and run `fedpareto worker join --home {self.directory}`"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the directory for this process. The lock goes with the process, however it ends.

        Raises:
            HomeError: another worker holds it.
        """
        descriptor = os.open(self.directory / "worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
                raise HomeError(
                    f"another worker (process {holder}) runs with {self.directory}: stop it first, "
                    "or join a second client into a directory of its own"
                ) from None
            with suppress(OSError):  # a full disk; the number is only for people
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Makes renames inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
