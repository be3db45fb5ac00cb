"""A reserve of disk space: released when the disk is full, so that the coordinator can still record that it is full."""

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 8 << 20
# A disk counts as free again only with this much more, or it would be full at the next write.
MARGIN_BYTES = 8 << 20


class Reserve:
    """A file of `RESERVE_BYTES` in each file system of some directories, in the first directory on it."""

    def __init__(self, directories: Iterable[Path]) -> None:
        by_device: dict[int, Path] = {}
        for directory in directories:
            by_device.setdefault(directory.stat().st_dev, directory / "reserve")
        self._files = tuple(by_device.values())

    def hold(self) -> None:
        """Takes the space unless it is held already.

        Raises:
            OSError: the disk or a quota has not enough space, or the disk takes no writes; no space is held then.
        """
        try:
            for path in self._files:
                _take(path)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Releases the space; may be called twice. On a disk that takes no writes it stays, where it is of no use."""
        for path in self._files:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _take(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # fails on a read-only disk
    try:
        if os.fstat(descriptor).st_size >= RESERVE_BYTES:
            return
        # Ask before allocating: a failing allocation takes the last space from other writers for a moment.
        system = os.fstatvfs(descriptor)
        if system.f_bavail * system.f_frsize < RESERVE_BYTES + MARGIN_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.posix_fallocate(descriptor, 0, RESERVE_BYTES + MARGIN_BYTES)
        os.ftruncate(descriptor, RESERVE_BYTES)
    finally:
        os.close(descriptor)
