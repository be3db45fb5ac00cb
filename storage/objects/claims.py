"""Claims: when each blob was last stored or claimed, and the lock between a claim and a deletion.

Object storages have neither. These claims are files of one machine, for one coordinator and the commands beside it:

    DIRECTORY/ages/blake3/ab/cdef...   an empty file, whose time is that of the last claim of a blob
    DIRECTORY/ages.lock                held for the instants in which a blob is claimed (shared) or deleted (exclusive)

`storage.table_claims` has those of several coordinators.
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from federation import digests
from storage.blob_directory import locked


@dataclass(frozen=True)
class Deletion:
    """The deletion of a blob that is under way; claims of the blob wait for its end.

    Attributes:
        claimed: when the blob was last claimed, in seconds since the epoch; None if no claim is known.
        begin: called right before the request that removes the blob. False if the blob must stay for now, since another
            request may yet remove it. It fails if the deletion has lost its lock.
        finish: called when the blob is gone, and removes the time of its last claim.
    """

    claimed: float | None
    begin: Callable[[], bool]
    finish: Callable[[], None]


class Claims(Protocol):
    """The claims of the blobs in one bucket, for all processes that use the bucket.

    A blob is claimed before it is looked up or sent, so that no lock is held during a request: a deletion either sees
    the claim and keeps the blob, or is over when the look-up begins.
    """

    def note(self, digest: str) -> None:
        """Claims a blob, which need not be stored. Waits for the end of a deletion of it."""

    def last(self, digest: str) -> float | None:
        """When a blob was last claimed, in seconds since the epoch; None if no claim is known."""

    def times(self) -> dict[str, float]:
        """The same of all blobs whose claims are known, by their digests."""

    def deletion(self, digest: str) -> AbstractContextManager[Deletion]:
        """Keeps others from claiming or deleting a blob until the block ends."""


class FileClaims:
    """The claims of one coordinator, in a directory of its machine."""

    def __init__(self, directory: Path) -> None:
        self._ages = directory / "ages"
        self._lock = directory / "ages.lock"

    def note(self, digest: str) -> None:
        """Sets the time of the blob's file."""
        path = self.file(digest)
        with locked(self._lock, fcntl.LOCK_SH):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)

    def last(self, digest: str) -> float | None:
        """The time of the blob's file."""
        try:
            return self.file(digest).stat().st_mtime
        except FileNotFoundError:
            return None

    def times(self) -> dict[str, float]:
        """The times of all files."""
        parts = (path.parts[-3:] for path in self._ages.glob("*/*/*"))
        names = (f"{algorithm}:{head}{tail}" for algorithm, head, tail in parts)
        return {digest: time for digest in names if (time := self.last(digest)) is not None}

    @contextmanager
    def deletion(self, digest: str) -> Iterator[Deletion]:
        """Holds the lock, which is one for all blobs."""
        with locked(self._lock, fcntl.LOCK_EX):
            yield Deletion(self.last(digest), lambda: True, partial(self.file(digest).unlink, missing_ok=True))

    def file(self, digest: str) -> Path:
        """The file of a blob. Raises ValueError if it is not a digest."""
        algorithm, value = digests.parse(digest)
        return self._ages / algorithm / value[:2] / value[2:]
