"""A file that only grows, and beside it how much of that file counts: what is written once is there once.

What is appended counts once `state.json` says so. What a killed process has written after that is cut off when the next
one opens the file, and is then written again with the same bytes, since it is made from the record alone. So a reader
of the file meanwhile reads each round once.
"""

import fcntl
import json
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from federation.durable_files import make_directories, rename_durably, sync_directory
from fedpareto.sinks.sink import FollowedRun, RunEnd, SinkError

_STATE = "state.json"


@dataclass(frozen=True)
class _Counted:
    """What counts of a file: `length` bytes of it, with the rounds before `next`; and how the run ended."""

    run: str
    next: int
    length: int
    state: str = ""
    reason: str = ""


class CountedFile:
    """The file of one run, in a directory of its own. One process at a time has it open.

    Raises:
        SinkError: another process writes there, or what stands there is not what this class has written.
    """

    def __init__(self, path: Path, run: FollowedRun) -> None:
        directory = path.parent
        make_directories(directory)
        self._state = directory / _STATE
        with ExitStack() as opened:
            self._lock(opened.enter_context(FileIO(directory / ".lock", "wb")))
            self._counted = self._read(run)
            self._file = opened.enter_context(FileIO(path, "ab"))
            if os.fstat(self._file.fileno()).st_size < self._counted.length:
                raise SinkError(
                    f"{path} is shorter than it was: a part of it was deleted; remove {directory} to begin anew"
                )
            self._file.truncate(self._counted.length)
            sync_directory(directory)
            self._open = opened.pop_all()

    @property
    def next(self) -> int:
        """The first round that is not in the file."""
        return self._counted.next

    @property
    def length(self) -> int:
        """The number of bytes that count."""
        return self._counted.length

    @property
    def state(self) -> str:
        """How the run ended, as it was noted; empty before."""
        return self._counted.state

    def append(self, content: bytes, *, next: int, end: RunEnd | None = None) -> None:  # noqa: A002 - as in the file
        """Appends bytes, after which the file has the rounds before `next`, and notes how the run ended, if it has."""
        unwritten = content
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]
        os.fsync(self._file.fileno())
        state, reason = (end.state, end.reason) if end is not None else ("", "")
        self._count(_Counted(self._counted.run, next, self._counted.length + len(content), state, reason))

    def close(self) -> None:
        """Closes the file, and lets another process write."""
        self._open.close()

    def _lock(self, lock: FileIO) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with the process
        except BlockingIOError:
            raise SinkError(f"another process writes to {self._state.parent}") from None

    def _read(self, run: FollowedRun) -> _Counted:
        try:
            counted = _Counted(**json.loads(self._state.read_text(encoding="utf-8")))
            numbers = (counted.next, counted.length)
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("no counts")
        except FileNotFoundError:
            return _Counted(run.key, 0, 0)
        except (ValueError, TypeError) as error:
            raise SinkError(f"{self._state} is damaged ({error}); remove its directory to begin anew") from None
        if counted.run != run.key:
            raise SinkError(f"{self._state} is of another run, {counted.run}, not of {run.key}: name another directory")
        return counted

    def _count(self, counted: _Counted) -> None:
        """From here on, this counts, also after a loss of power."""
        written = self._state.with_name(f"{_STATE}.new")
        with open(written, "w", encoding="utf-8") as file:
            json.dump(asdict(counted), file)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(written, self._state)
        self._counted = counted
