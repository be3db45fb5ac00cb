"""A lock file, which one process holds at a time; the number of that process in it is for people."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held(path: Path, taken: Callable[[str], Exception]) -> Iterator[None]:
    """Holds a lock file until the block or the process ends; the file is made if it is missing.

    Args:
        path: of the file.
        taken: makes what is raised if another process holds it, from that process's number, or "unknown".

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken(os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown") from None
        with suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
