"""A directory of TensorBoard: an event file for each run, and beside it how much of that file counts."""

import re
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import Any

from fedpareto.sinks.counted_file import CountedFile
from fedpareto.sinks.sink import FollowedRun, RoundNumbers, RunEnd, Sink

_VERSION = "brain.Event:2"  # of the format, in the first event of a file
_NAME = 60  # characters of the run's name in that of its directory


class TensorBoardSink(Sink):
    """Writes scalars for `tensorboard --logdir DIR`. The address is the directory, which may hold many runs."""

    packages = ("tensorboard",)

    def __init__(self, address: str) -> None:
        self._directory = Path(address)
        self._opened = ExitStack()

    def open(self, run: FollowedRun) -> int:
        """Finds the run's own directory, or makes it. Raises SinkError as `CountedFile`."""
        directory = self._directory / _directory_name(run)
        name = f"events.out.tfevents.{run.created.timestamp():.0f}.{run.run_id}"
        self._file = self._opened.enter_context(closing(CountedFile(directory / name, run)))
        if not self._file.length:
            self._append(_event(run.created.timestamp(), file_version=_VERSION), next=0)
        return self._file.next

    def write(self, numbers: RoundNumbers) -> None:
        """Appends one event with all numbers of the round."""
        summary = _module("summary").Summary(
            value=[{"tag": name, "simple_value": value} for name, value in numbers.values.items()]
        )
        self._append(_event(numbers.ended, step=numbers.round, summary=summary), next=numbers.round + 1)

    def finish(self, end: RunEnd) -> None:
        """Notes beside the event file how the run ended."""
        self._file.append(b"", next=self._file.next, end=end)

    def close(self) -> None:
        """Closes the file, and lets another process write."""
        self._opened.close()

    def _append(self, event: bytes, *, next: int) -> None:  # noqa: A002 - as in the state
        record = _Buffer()
        import_module("tensorboard.summary.writer.record_writer").RecordWriter(record).write(event)
        self._file.append(bytes(record.content), next=next)


class _Buffer:
    """Collects what TensorBoard's writer of records writes."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: bytes) -> None:
        self.content += data


def _module(name: str) -> Any:
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


def _event(wall_time: float, **fields: Any) -> bytes:
    content: bytes = _module("event").Event(wall_time=wall_time, **fields).SerializeToString(deterministic=True)
    return content


def _directory_name(run: FollowedRun) -> str:
    """Such as `digits-2026-05-04-120000-3f2a91c05be7`: sorted by name and time, and one for each run."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", run.name)[:_NAME].strip(".-")
    return f"{name or 'run'}-{run.created:%Y-%m-%d-%H%M%S}-{run.run_id}"
