"""A directory of TensorBoard: an event file for each run, and beside it how much of that file counts.

A round counts once `state.json` says so. What a killed process has written after that is cut off when the next one
opens the file, and is then written again with the same bytes, since it is made from the record alone. So a TensorBoard
that shows the directory meanwhile reads each round once.
"""

import fcntl
import json
import os
import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

from federation.durable_files import make_directories, rename_durably, sync_directory
from fedpareto.sinks.sink import FollowedRun, RoundNumbers, RunEnd, Sink, SinkError

_STATE = "state.json"
_VERSION = "brain.Event:2"  # of the format, in the first event of a file
_NAME = 60  # characters of the run's name in that of its directory


@dataclass(frozen=True)
class _Counted:
    """What counts of an event file: `length` bytes of it, with the rounds before `next`; and how the run ended."""

    run: str
    next: int
    length: int
    state: str = ""
    reason: str = ""


class TensorBoardSink(Sink):
    """Writes scalars for `tensorboard --logdir DIR`. The address is the directory, which may hold many runs."""

    packages = ("tensorboard",)

    def __init__(self, address: str) -> None:
        self._directory = Path(address)
        self._open = ExitStack()

    def open(self, run: FollowedRun) -> int:
        """Finds the run's own directory, or makes it.

        Raises:
            SinkError: another process writes there, or what stands there is not what this class has written.
        """
        directory = self._directory / _directory_name(run)
        make_directories(directory)
        self._lock(directory)
        self._state = directory / _STATE
        self._counted = self._read(run)
        path = directory / f"events.out.tfevents.{run.created.timestamp():.0f}.{run.run_id}"
        self._file = self._open.enter_context(FileIO(path, "ab"))
        if os.fstat(self._file.fileno()).st_size < self._counted.length:
            raise SinkError(
                f"{path} is shorter than it was: a part of it was deleted; remove {directory} to begin anew"
            )
        self._file.truncate(self._counted.length)
        sync_directory(directory)
        if not self._counted.length:
            self._append(_event(run.created.timestamp(), file_version=_VERSION), next=0)
        return self._counted.next

    def write(self, numbers: RoundNumbers) -> None:
        """Appends one event with all numbers of the round."""
        summary = _module("summary").Summary(
            value=[{"tag": name, "simple_value": value} for name, value in numbers.values.items()]
        )
        event = _event(numbers.ended, step=numbers.round, summary=summary)
        self._append(event, next=numbers.round + 1)

    def finish(self, end: RunEnd) -> None:
        """Notes beside the event file how the run ended."""
        self._count(_Counted(self._counted.run, self._counted.next, self._counted.length, end.state, end.reason))

    def close(self) -> None:
        """Closes the file, and lets another process write."""
        self._open.close()

    def _lock(self, directory: Path) -> None:
        lock = self._open.enter_context(FileIO(directory / ".lock", "wb"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with the process
        except BlockingIOError:
            raise SinkError(f"another process writes to {directory}") from None

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

    def _append(self, event: bytes, *, next: int) -> None:  # noqa: A002 - the name in the file
        record = _Buffer()
        import_module("tensorboard.summary.writer.record_writer").RecordWriter(record).write(event)
        _write_all(self._file, bytes(record.content))
        os.fsync(self._file.fileno())
        self._count(_Counted(self._counted.run, next, self._counted.length + len(record.content)))

    def _count(self, counted: _Counted) -> None:
        """From here on, this counts, also after a loss of power."""
        written = self._state.with_name(f"{_STATE}.new")
        with open(written, "w", encoding="utf-8") as file:
            json.dump(asdict(counted), file)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(written, self._state)
        self._counted = counted


class _Buffer:
    """Collects what TensorBoard's writer of records writes."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: bytes) -> None:
        self.content += data


def _write_all(file: FileIO, content: bytes) -> None:
    while content:
        content = content[file.write(content) :]


def _module(name: str) -> Any:
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


def _event(wall_time: float, **fields: Any) -> bytes:
    content: bytes = _module("event").Event(wall_time=wall_time, **fields).SerializeToString(deterministic=True)
    return content


def _directory_name(run: FollowedRun) -> str:
    """Such as `digits-2026-05-04-120000-3f2a91c05be7`: sorted by name and time, and one for each run."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", run.name)[:_NAME].strip(".-")
    return f"{name or 'run'}-{run.created:%Y-%m-%d-%H%M%S}-{run.run_id}"
