"""Event files of TensorBoard, read with its own reader."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpareto.sinks.sink import SinkError
from fedpareto.sinks.targets import target_of
from tests.fedpareto.sinks.scene import RUN, numbers, send
from tests.paths import ROOT

pytestmark = pytest.mark.full
accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs fedpareto[tracking]"
)
ROUNDS = 4


def target(directory: Path) -> str:
    return f"tensorboard:{directory}"


def event_file(directory: Path) -> Path:
    (found,) = directory.glob("*/events.out.tfevents.*")
    return found


def read(directory: Path) -> Any:
    (run,) = directory.iterdir()
    reader = accumulator.EventAccumulator(str(run))
    reader.Reload()
    return reader


def points(reader: Any, name: str) -> list[tuple[int, float, float]]:
    return [(event.step, event.wall_time, event.value) for event in reader.Scalars(name)]


def wanted(name: str, rounds: int = ROUNDS) -> list[tuple[int, float, Any]]:
    return [
        (number, numbers(number).ended, pytest.approx(numbers(number).values[name], rel=1e-6))
        for number in range(rounds)
    ]


def run_and_kill(directory: Path, function: str, count: int, when: str) -> int:
    words = ["-m", "tests.programs.sending", target(directory), str(ROUNDS), function, str(count), when]
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("undisturbed")
    send([target(directory)], ROUNDS)
    return event_file(directory).read_bytes()


def test_its_own_reader_finds_each_number_of_each_round(tmp_path: Path) -> None:
    (delivered,) = send([target(tmp_path)], ROUNDS)
    assert (delivered.rounds, delivered.problem) == (ROUNDS, "")
    reader = read(tmp_path)
    assert set(reader.Tags()["scalars"]) == set(numbers(0).values)
    for name in numbers(0).values:
        assert points(reader, name) == wanted(name)


def test_a_second_call_writes_only_what_the_first_has_not(tmp_path: Path, undisturbed: bytes) -> None:
    send([target(tmp_path)], 2)
    send([target(tmp_path)], 2)
    assert points(read(tmp_path), "accuracy/mean") == wanted("accuracy/mean", 2)
    send([target(tmp_path)], ROUNDS)
    assert event_file(tmp_path).read_bytes() == undisturbed


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("function", ["os:fsync", "pathlib:Path.replace"])
def test_a_process_that_is_killed_at_any_point_leaves_no_gap_and_no_repetition(
    tmp_path: Path, undisturbed: bytes, function: str, when: str
) -> None:
    kills = 0
    while (code := run_and_kill(tmp_path, function, 1 + kills, when)) != 0:
        assert code == -9
        kills += 1
    assert kills >= 3
    assert event_file(tmp_path).read_bytes() == undisturbed
    assert points(read(tmp_path), "accuracy/mean") == wanted("accuracy/mean")


@pytest.mark.parametrize("cut", [1, 11, 12, 30])
def test_a_record_that_was_cut_off_is_written_again(tmp_path: Path, undisturbed: bytes, cut: int) -> None:
    send([target(tmp_path)], 2)
    path = event_file(tmp_path)
    written = path.stat().st_size
    path.write_bytes(undisturbed[: written + cut])
    reader = read(tmp_path)  # TensorBoard shows the directory meanwhile
    send([target(tmp_path)], ROUNDS)
    assert path.read_bytes() == undisturbed
    reader.Reload()
    assert points(reader, "loss/train") == wanted("loss/train")


def test_another_process_that_writes_a_shorter_file_and_a_damaged_state_are_refused(tmp_path: Path) -> None:
    send([target(tmp_path)], 2)
    (directory,) = tmp_path.iterdir()
    first, second = target_of(target(tmp_path)).make(), target_of(target(tmp_path)).make()
    assert first.open(RUN) == 2
    with pytest.raises(SinkError, match="another process writes"):
        second.open(RUN)
    first.close()
    second.close()
    path = event_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    (shorter,) = send([target(tmp_path)], 2)
    assert "is shorter than it was" in shorter.problem
    path.write_bytes(content)
    for damage in ("{", "[]", '{"run": "x", "next": -1, "length": 0}', '{"run": "x", "next": 1, "length": "9"}'):
        (directory / "state.json").write_text(damage)
        (damaged,) = send([target(tmp_path)], 2)
        assert "is damaged" in damaged.problem
    assert path.read_bytes() == content


def test_a_directory_that_cannot_be_made_is_told_of_and_delays_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    away, complete = send([target(tmp_path / "file" / "runs"), target(tmp_path / "runs")], ROUNDS)
    assert "FileExistsError" in away.problem
    assert complete.problem == ""
    assert capfd.readouterr().err.count("cannot be reached") == 1
