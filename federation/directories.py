"""The directories that a process works in, which may be unmounted, moved or removed while it runs."""

import os
from collections.abc import Iterable
from pathlib import Path

from federation.errors import Error


class DirectoryGone(Error, RuntimeError):
    """A directory was unmounted, moved or removed, or cannot be used any more; the message says what to do."""


class Directories:
    """Directories that must stay what they are as long as a process runs.

    Args:
        paths: of the directories.
        process: the process, for messages, such as "the coordinator".
        waits: True if the process waits for a file system that has become read-only: its directories are not gone.

    Raises:
        OSError: one of them cannot be found.
    """

    def __init__(self, paths: Iterable[Path] = (), process: str = "", *, waits: bool = False) -> None:
        self._process = process
        self._waits = waits
        self._found = {path: _identity(path) for path in paths}

    def check_there(self) -> None:
        """Looks at each path, without opening it.

        Raises:
            DirectoryGone: another directory is there, or none, or it may not be read and written.
        """
        for path, before in self._found.items():
            try:
                now = _identity(path)
            except OSError as error:
                raise self._gone(path, error.strerror or str(error)) from None
            if now != before:
                raise self._gone(path, "another directory is there now")
            rights = os.R_OK | os.X_OK | (0 if self._waits and _is_read_only(path) else os.W_OK)
            if not os.access(path, rights):
                raise self._gone(path, "it cannot be read and written any more")

    def _gone(self, path: Path, cause: str) -> DirectoryGone:
        return DirectoryGone(
            f"{path} is gone: {cause}. So {self._process} has stopped, and has made nothing in its place. Mount the "
            "directory again, or put it back, and start again: all work goes on where it was"
        )


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
