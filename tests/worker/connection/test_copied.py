"""A worker that a coordinator refuses as a copy does nothing until its owner decides, and then goes on at once."""

import pytest

from tests.worker.scene import Scene, command
from worker.home import WorkerHomeError


def test_a_worker_that_was_refused_as_a_copy_says_so_and_goes_on_within_seconds_of_its_owners_decision(
    scene: Scene,
) -> None:
    other = b"other" + bytes(11)
    scene.coordinator.started = other
    running = scene.start(uniform=lambda *_: 600.0)
    (refused,) = running.wait_for("refused")[:1]
    assert refused["reason"] == "home-copied"
    assert "run `fedpareto worker copied`" in refused["message"]
    assert "refuses this one since" in command("copied", "--home", scene.joined())
    assert "This directory goes on." in command("copied", "--home", scene.joined(), "--this-one")
    running.wait_for("attending")  # the pause after a refusal is not waited for: it grows to ten minutes
    first, *_, last = scene.coordinator.hellos
    assert first.start == last.start
    assert (list(first.earlier_starts), list(last.earlier_starts)) == ([], [other])
    assert "No coordinator has refused" in command("copied", "--home", scene.joined())
    scene.receipts(1, 1)
    assert {start.hex() for start in scene.coordinator.submitted_starts} == {last.start.hex()}


def test_a_worker_whose_home_is_set_aside_ends_and_does_not_start_again(scene: Scene) -> None:
    running = scene.attending()
    command("copied", "--home", scene.joined(), "--other-one")
    running.thread.join(60)
    assert isinstance(running.failure, WorkerHomeError)
    with pytest.raises(WorkerHomeError, match="was set aside"):
        scene.start()
    assert "This directory goes on." in command("copied", "--home", scene.joined(), "--this-one")
    scene.attending()


def test_each_start_names_those_before_it(scene: Scene) -> None:
    for _ in range(2):
        scene.attending().stop()
    first, second = scene.coordinator.hellos
    assert (len(first.start), list(first.earlier_starts)) == (16, [])
    assert first.start != second.start
    assert list(second.earlier_starts) == [first.start]
    assert (scene.home.starts.stat().st_mode & 0o777) == 0o600
