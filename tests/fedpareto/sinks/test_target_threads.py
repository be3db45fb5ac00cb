"""Rounds on their way to targets: each once, in order, whatever another target does."""

import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from federation.errors import Error
from federation.v1.admin_pb2 import RoundSummary
from fedpareto.missing_packages import PackagesMissing
from fedpareto.sinks.round_numbers import numbers_of
from fedpareto.sinks.sink import FollowedRun, RoundNumbers, Sink, SinkError
from fedpareto.sinks.target_threads import Delivered, Deliveries
from fedpareto.sinks.targets import SinkTarget, target_of, targets_of
from tests.fedpareto.sinks.scene import END, RUN, Lines, installed, numbers, rounds_in

__all__ = ["installed"]

SECRET_ADDRESS = "http://reader:pa%24%24word@127.0.0.1:9/x?token=t0ken&more=1"


class Scripted(Lines):
    """Lines, with something that happens first."""

    before: ClassVar[Any] = staticmethod(lambda numbers: None)

    def write(self, numbers: RoundNumbers) -> None:
        type(self).before(numbers)
        super().write(numbers)


def scripted(before: Any) -> type[Sink]:
    return type("Own", (Scripted,), {"before": staticmethod(before)})


@pytest.fixture
def told() -> list[str]:
    return []


def deliveries(told: list[str], *targets: SinkTarget) -> Deliveries:
    return Deliveries(RUN, targets, told.append, pause=0.001)


def test_a_target_that_hangs_delays_no_other(tmp_path: Path, told: list[str]) -> None:
    released, written = threading.Event(), threading.Event()
    hanging = scripted(lambda _: released.wait(60))
    noting = scripted(lambda numbers: written.set() if numbers.round == 3 else None)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    sent = deliveries(told, SinkTarget("first", hanging, str(first)), SinkTarget("second", noting, str(second)))
    for number in range(4):
        sent.add(numbers(number))
    assert written.wait(60)
    away, complete = sent.finish(END, patience=0.05)
    released.set()
    assert (complete.rounds, complete.problem) == (4, "")
    assert (away.rounds, away.problem) == (0, "it does not answer")
    assert rounds_in(second) == [0, 1, 2, 3]
    assert second.with_suffix(".end").read_text() == "COMPLETED"
    assert told == []


def test_a_target_that_is_away_is_told_of_once_and_gets_each_round_once_when_it_is_back(
    tmp_path: Path, told: list[str]
) -> None:
    attempts, back = iter(range(100)), threading.Event()

    def away(numbers: RoundNumbers) -> None:
        if numbers.round == 2 and next(attempts) < 5:
            raise OSError("nobody listens")
        if numbers.round == 3:
            back.set()

    path = tmp_path / "a.jsonl"
    sent = deliveries(told, SinkTarget("own", scripted(away), str(path)))
    for number in range(4):
        sent.add(numbers(number))
        sent.add(numbers(number))  # as a message that comes again
    assert back.wait(60)
    assert sent.finish(END) == [Delivered(f"own:{path}", 4)]
    assert rounds_in(path) == [0, 1, 2, 3]
    assert told == [
        f"own:{path} cannot be reached, it has 2 rounds; trying again, the others go on: OSError: nobody listens",
        f"own:{path} answers again",
    ]


def test_a_target_that_is_still_away_at_the_end_is_a_problem_and_the_next_process_goes_on(
    tmp_path: Path, told: list[str]
) -> None:
    def away(numbers: RoundNumbers) -> None:
        if numbers.round == 1:
            raise SystemExit("own code ends the process")

    path = tmp_path / "a.jsonl"
    target = SinkTarget("own", scripted(away), str(path))
    first = deliveries(told, target)
    for number in range(3):
        first.add(numbers(number))
    assert first.finish(END) == [Delivered(f"own:{path}", 1, "SystemExit: own code ends the process")]
    assert len(told) == 1
    second = deliveries(told, SinkTarget("own", Lines, str(path)))
    for number in range(3):
        second.add(numbers(number))
    assert second.finish(END) == [Delivered(f"own:{path}", 3)]
    assert rounds_in(path) == [0, 1, 2]


def test_a_target_that_cannot_be_used_is_told_of_and_not_tried_again(tmp_path: Path, told: list[str]) -> None:
    def refuse(numbers: RoundNumbers) -> None:
        raise SinkError("it holds\nanother run \x1b[2J")

    other = tmp_path / "b.jsonl"
    sent = deliveries(
        told,
        SinkTarget("own", scripted(refuse), str(tmp_path / "a.jsonl")),
        SinkTarget("own", Lines, str(other)),
    )
    sent.add(numbers(0))
    assert [each.problem for each in sent.finish(END)] == ["it holds another run \\x1b[2J", ""]
    assert told == [f"own:{tmp_path / 'a.jsonl'} gets nothing more: it holds another run \\x1b[2J"]
    assert rounds_in(other) == [0]


@pytest.mark.parametrize(
    "message",
    [
        f"cannot open {SECRET_ADDRESS}",
        "user reader has the wrong password pa$$word",
        "GET http://reader:pa%24%24word@127.0.0.1:9/other failed",
        "token=t0ken was refused",
    ],
)
def test_no_secret_of_an_address_is_shown_or_told(message: str, told: list[str]) -> None:
    class Away(Lines):
        def __init__(self, address: str) -> None: ...

        def open(self, run: FollowedRun) -> int:
            raise ConnectionError(message)

    sent = deliveries(told, SinkTarget("own", Away, SECRET_ADDRESS))
    said = f"{told} {sent.shown} {sent.finish(END)} {told} {SinkTarget('own', Away, SECRET_ADDRESS)!r}"
    assert "own:http://***@127.0.0.1:9/x?***" in said
    assert not [secret for secret in ("pa%24", "pa$$", "t0ken") if secret in said]


def test_numbers_that_a_run_does_not_disclose_and_numbers_of_members_stay_here() -> None:
    metrics = {"accuracy/mean": 0.5, "accuracy/worst": 0.25, "loss/train": float("nan"), "loss/test": float("inf")}
    summary = RoundSummary(
        round=3, asked=4, accepted=3, metrics=metrics, undisclosed=["accuracy/worst"], seconds=2.0, worst_client="anna"
    )
    summary.started.FromSeconds(100)
    found = numbers_of(summary)
    values = {"accuracy/mean": 0.5, "loss/test": float("inf"), "replies/accepted": 3, "replies/asked": 4, "seconds": 2}
    assert found == RoundNumbers(3, 102.0, values)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("runs", "runs: expected NAME:ADDRESS, such as tensorboard:DIR"),
        ("tensorboard:", "tensorboard: expected NAME:ADDRESS"),
        ("nowhere:DIR", "no sink 'nowhere'; there are"),
        ("own:a.txt", "a.txt is no .jsonl"),
        ("broken:x", "sink 'broken': importing broken_sink failed"),
    ],
)
def test_a_target_that_is_none_is_refused_with_its_value(text: str, problem: str, installed: Path) -> None:
    with pytest.raises(Error) as raised:
        target_of(text)
    assert problem in str(raised.value)


def test_a_sink_of_an_installed_package_is_found_by_its_entry_point(installed: Path) -> None:
    (target,) = targets_of([f"own:{installed / 'a.jsonl'}"])
    assert target.kind.__name__ == "Lines"
    with pytest.raises(SinkError, match="mlflow, needing, own, tensorboard"):
        target_of("x:y")
    with pytest.raises(SinkError, match="named twice"):
        targets_of([f"own:{installed / 'a.jsonl'}"] * 2)


def test_a_sink_whose_packages_are_missing_says_which_extra_has_them(installed: Path) -> None:
    with pytest.raises(PackagesMissing, match=r"needing needs no_such_package.*fedpareto\[tracking\]"):
        target_of("needing:a.jsonl")
