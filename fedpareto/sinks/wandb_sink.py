"""Weights & Biases without a network: the file of an offline run, which `wandb sync` sends to a server.

The file is written here, in the format of wandb's own offline runs, and not by `wandb.init`: that starts a process of
its own, which writes later and goes on after a kill, so that nobody could say which rounds are there.

The format is that of LevelDB's logs: blocks of 32 KiB, and in them messages of `wandb_internal.proto`, which are cut
into parts at the end of a block. Tested with wandb 0.31.
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedpareto.sinks.counted_file import CountedFile
from fedpareto.sinks.sink import FollowedRun, RoundNumbers, RunEnd, Sink, SinkError

_PLACE = Path("wandb")  # where `wandb sync` looks
_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)  # the magic number, and the version of the format
_BLOCK, _HEAD = 32768, 7  # bytes of a block, and of the head of a part
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_EXIT_CODES = {"COMPLETED": 0, "FAILED": 1, "STOPPED": 1}
_OLDEST = "0.10.0"  # of wandb, which may read the file
_ADDRESS = re.compile(r"([^\s/\\#?%:]{1,128}/)?[^\s/\\#?%:]{1,128}")


class WandbSink(Sink):
    """Writes the offline run. The address is a project, or ENTITY/PROJECT."""

    packages = ("wandb",)

    def __init__(self, address: str) -> None:
        if _ADDRESS.fullmatch(address) is None:
            raise SinkError("expected a project, or ENTITY/PROJECT, such as wandb:scans")
        self._entity, _, self._project = address.rpartition("/")
        self._opened = ExitStack()

    def open(self, run: FollowedRun) -> int:
        """Finds the run's own directory, or makes it. Raises SinkError as `CountedFile`."""
        self._messages = _messages()
        self._begun = run.created.timestamp()
        name = sha256(f"{self._entity}/{self._project}/{run.key}".encode()).hexdigest()[:16]
        place = _PLACE / f"offline-run-{run.created:%Y%m%d_%H%M%S}-{name}"
        self._file = self._opened.enter_context(closing(CountedFile(place / f"run-{name}.wandb", run)))
        if not self._file.length:
            config = {"task": run.task, "algorithm": run.algorithm, "rounds": run.rounds, "run_id": run.run_id}
            started = self._messages.RunRecord(
                run_id=name,
                entity=self._entity,
                project=self._project,
                display_name=run.name,
                config={"update": [{"key": key, "value_json": json.dumps(value)} for key, value in config.items()]},
            )
            started.start_time.FromDatetime(run.created)
            producer = {"producer": version("wandb"), "min_consumer": _OLDEST}
            self._append({"header": {"version_info": producer}}, {"run": started}, next=0)
        return self._file.next

    def write(self, numbers: RoundNumbers) -> None:
        """Appends the numbers of a round, as the summary so far and as a step."""
        own = {"_step": numbers.round, "_timestamp": numbers.ended, "_runtime": numbers.ended - self._begun}
        items = _items({**numbers.values, **own})
        step = {"item": items, "step": {"num": numbers.round}}
        self._append({"summary": {"update": items}}, {"history": step}, next=numbers.round + 1)

    def finish(self, end: RunEnd) -> None:
        """Appends how the run ended, if it cannot go on."""
        if self._file.state == end.state:
            return
        records: list[dict[str, Any]] = []
        if end.state in _EXIT_CODES:
            told = {name: value for name, value in (("state", end.state), ("reason", end.reason)) if value}
            records = [{"summary": {"update": _items(told)}}, {"exit": {"exit_code": _EXIT_CODES[end.state]}}]
        self._append(*records, next=self._file.next, end=end)

    def close(self) -> None:
        """Closes the file, and lets another process write."""
        self._opened.close()

    def _append(self, *records: dict[str, Any], next: int, end: RunEnd | None = None) -> None:  # noqa: A002
        """Appends records: two at the beginning, two for each round, and two at the end."""
        first = 2 * self._file.next + 3 if self._file.length else 1
        content = b"" if self._file.length else _HEADER
        for number, record in enumerate(records, first):
            message = self._messages.Record(num=number, **record).SerializeToString(deterministic=True)
            content += b"".join(_parts(message, self._file.length + len(content)))
        self._file.append(content, next=next, end=end)


def _items(values: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"nested_key": [name], "value_json": json.dumps(value)} for name, value in values.items()]


def _parts(message: bytes, place: int) -> Iterator[bytes]:
    """A message as the parts of a log, from this place of the file on."""
    begun, over = False, False
    while not over:
        room = _BLOCK - place % _BLOCK
        if room < _HEAD:
            yield bytes(room)
            place, room = place + room, _BLOCK
        part, message = message[: room - _HEAD], message[room - _HEAD :]
        over = not message
        kind = (_LAST if begun else _FULL) if over else (_MIDDLE if begun else _FIRST)
        yield struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
        place, begun = place + _HEAD + len(part), True


def _messages() -> Any:
    """The messages of wandb, which reports no errors of its own."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # it is read at the import
    return import_module("wandb.proto.wandb_internal_pb2")
