"""A run that goes to targets, and sinks that a test owns."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fedpareto.sinks.sink import FollowedRun, RoundNumbers, RunEnd, Sink, SinkError
from fedpareto.sinks.target_threads import Delivered, Deliveries
from fedpareto.sinks.targets import targets_of
from tests.programs.crashing import before

RUN = FollowedRun("3f2a91c05be7", "scans, ålder", "digits", "fedmgda+", datetime(2026, 5, 4, 12, tzinfo=UTC), 6)
END = RunEnd("COMPLETED", "")


def numbers(number: int) -> RoundNumbers:
    values: Mapping[str, float] = {
        "accuracy/mean": number / 8,
        "loss/train": float("inf") if number == 2 else 1 / (number + 1),
        "loss/train/left half": 2.0**-number,
        "evaluated": 3.0,
    }
    return RoundNumbers(number, 1_777_896_000.0 + 10 * number, values)


def send(addresses: Sequence[str], rounds: int, end: RunEnd = END) -> list[Delivered]:
    """The whole run goes to targets, as a command does it."""
    deliveries = Deliveries(RUN, targets_of(addresses), lambda text: print(text, file=sys.stderr), pause=0.01)
    for number in range(rounds):
        deliveries.add(numbers(number))
    return deliveries.finish(end)


def kill_at(owner: Any, name: str, count: int, *, returned: bool, target: str, rounds: int, end: RunEnd = END) -> int:
    """Sends the run from a process that is killed before the call of a function, or when it has returned; its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            before(owner, name, count=count, returned=returned)
            code = 0 if not send([target], rounds, end)[0].problem else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Lines(Sink):
    """A file with a line for each round, whose lines say what it has."""

    takes_files = True

    def __init__(self, address: str) -> None:
        if not address.endswith(".jsonl"):
            raise SinkError(f"{address} is no .jsonl")
        self.path = Path(address)

    def open(self, run: FollowedRun) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0

    def write(self, numbers: RoundNumbers) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([numbers.round, dict(numbers.values)]) + "\n")

    def finish(self, end: RunEnd) -> None:
        names = [file.name for file in end.files if file.stat().st_size > 100]
        self.path.with_suffix(".end").write_text(" ".join([end.state, *names]))


class Needing(Lines):
    packages = ("no_such_package",)


def rounds_in(path: Path) -> list[int]:
    return [json.loads(line)[0] for line in path.read_text().splitlines()]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with entry points, in a directory on Python's path."""
    package = tmp_path / "packages" / "own_sinks-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own-sinks\nVersion: 1\n")
    points = {"own": f"{__name__}:Lines", "needing": f"{__name__}:Needing", "broken": "broken_sink:Broken"}
    lines = [f"{name} = {place}" for name, place in points.items()]
    (package / "entry_points.txt").write_text("\n".join(["[fedpareto.sinks]", *lines, ""]))
    (package.parent / "broken_sink.py").write_text("import no_module_of_ours\n")
    monkeypatch.syspath_prepend(package.parent)
    return tmp_path
