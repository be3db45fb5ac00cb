"""What must survive: `kill -9` of either side at any instant, and a cut connection.

Real processes throughout. In each case the run completes, no accepted update is lost or counted twice, and the digest
of the final model equals that of the undisturbed run.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.scene import CLIENTS, SPEC, Scene, attended, front_of, under_way, with_constants
from tests.federation.transport.slow_line import slow_line
from tests.harness import SECONDS, Process, wait_for
from worker.ledgers.left_ledger import LeftState
from worker.ledgers.left_reading import LeftRow, read_left


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with attended(tmp_path_factory.mktemp("survival")) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(scene: Scene) -> str:
    """The digest of the final model when nothing happens."""
    run = scene.submit()
    final = scene.fed.wait_completed(run)
    scene.check_counted_once(run)
    return str(final)


def points(*always: str, full: tuple[str, ...]) -> pytest.MarkDecorator:
    """Where to kill: in `make test` at some points, in `make test-full` at all of them."""
    return pytest.mark.parametrize("point", [*always, *(pytest.param(point, marks=pytest.mark.full) for point in full)])


POINTS = "dispatching model-written before-dispatch all-updates-in aggregating one-evaluation-in evaluated stored"


@points("one-update-in", full=(*POINTS.split(), "between-rounds"))
def test_a_killed_coordinator_goes_on_where_it_was(scene: Scene, undisturbed: str, point: str) -> None:
    # A pool of those who attend is the harder case: after the restart nobody does, at first.
    scene.completes(scene.survives(point, pool="attending"), undisturbed)


SERVER = 'server = { optimizer = "yogi", learning_rate = 0.02 }\n'
REMEMBERING = SPEC.replace('name = "fedmgda+", epsilon = 0.2', 'name = "afl"') + SERVER


@pytest.fixture(scope="module")
def remembered(scene: Scene) -> tuple[str, str]:
    """What a run that remembers comes to when nothing happens: its model, and what it remembers."""
    return scene.fed.remembered(scene.submit(spec=REMEMBERING))


@pytest.mark.full
@points("model-written", full=("between-rounds",))
def test_what_a_run_remembers_survives(scene: Scene, remembered: tuple[str, str], point: str) -> None:
    assert scene.fed.remembered(scene.survives(point, spec=REMEMBERING)) == remembered
    assert all(name in remembered[1] for name in ("first", "second", "average", "lambda"))


LOOKING_BACK = REMEMBERING.replace('name = "afl"', 'name = "fedfv", tau = 2, alpha = 0')
LOOKING_BACK = LOOKING_BACK.replace("rounds = 2", "rounds = 4").replace(
    "minimum", 'method = "count", count = 2, minimum'
)


@pytest.mark.full
def test_the_updates_of_earlier_rounds_survive(scene: Scene) -> None:
    undisturbed, _ = scene.fed.remembered(scene.submit(spec=LOOKING_BACK))
    final, state = scene.fed.remembered(scene.survives("between-rounds", spec=LOOKING_BACK))
    assert final == undisturbed
    history = json.loads(state)["rule"]["history"]
    assert {entry["round"] for entry in history.values()} == {2, 3}
    assert {entry["payload"] for entry in history.values()} <= set(json.loads(state)["blobs"])


REPLYING = "training trained spooled recording recorded before-receipt after-receipt"


@points("uploading", full=tuple(REPLYING.split()))
def test_a_killed_worker_does_its_work_once_it_is_back(scene: Scene, undisturbed: str, point: str) -> None:
    victim = CLIENTS[1]
    scene.fed.workers[victim].kill()
    crashing = scene.work(victim, crash=point)
    run = scene.submit()
    crashing.wait_killed()
    scene.work(victim)
    scene.completes(run, undisturbed)
    check_left(scene.fed.directory / victim / "left.db", run)


def check_left(ledger: Path, run: str) -> None:
    """By its own ledger, each reply of a member has left once and is accepted, however often it was sent."""

    def settled() -> list[LeftRow]:
        rows = read_left(ledger, run=run).rows
        return [*rows] if {row.telling.state for row in rows} == {LeftState.ACCEPTED} else []

    places = [(row.first.round, row.first.phase) for row in wait_for(settled, "the last receipt")]
    assert len(places) == len({*places}) > 1


def test_a_connection_cut_in_the_middle_of_an_upload_is_made_again(scene: Scene, undisturbed: str) -> None:
    victim = CLIENTS[2]
    scene.fed.workers[victim].kill()
    member = scene.fed.directory / victim / "member.toml"
    description = member.read_text()
    port = int(description.rpartition(":")[2].split('"')[0])
    try:
        # Handshake and hello take 10 kB, each of the two updates 20 kB: the first one passes, the second one does not.
        with slow_line(port, cut_after=40_000) as line:
            member.write_text(description.replace(f":{port}", f":{line.port}"))
            scene.work(victim)
            scene.completes(scene.submit(), undisturbed)
            assert line.cuts == 1
    finally:
        member.write_text(description)
        scene.fed.workers[victim].kill()
        scene.work(victim)


def next_front(coordinator: Process, ended: int) -> int:
    """The front listener that the coordinator has started instead of one that has ended."""

    def found() -> int:
        front = front_of(coordinator)
        return front if front != ended else 0

    return wait_for(found, "another front listener")


def listened(scene: Scene, **constants: float) -> tuple[Process, int, str]:
    """A coordinator with other values of its front listener's constants, that listener, and a run under way."""
    scene.fed.serving.kill()
    coordinator = scene.fed.serve(program=with_constants("coordinator.front.listener", **constants))
    scene.fed.attending(*CLIENTS)
    front, run = front_of(coordinator), scene.submit()
    under_way(scene, run)
    return coordinator, front, run


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_front_listener_that_hangs_or_dies_is_replaced(
    scene: Scene, undisturbed: str, number: signal.Signals
) -> None:
    coordinator, front, run = listened(scene, BEAT_SECONDS=0.2)
    os.kill(front, number)
    next_front(coordinator, front)
    scene.completes(run, undisturbed)
    if number is signal.SIGSTOP:
        assert "the front listener does not answer (State: T (stopped)): it is killed" in coordinator.text
    assert "the front listener was killed by SIGKILL" in coordinator.text


@pytest.mark.full
def test_a_front_listener_that_is_killed_ten_times_in_a_row_is_started_ten_times_and_those_who_watch_go_on(
    scene: Scene, undisturbed: str
) -> None:
    coordinator = scene.fed.serving
    scene.fed.workers[CLIENTS[2]].kill()  # so the run waits
    run, front = scene.submit(), front_of(coordinator)
    command = ["-m", "fedpareto", "admin", "--home", str(scene.fed.home / "admin"), "watch", run, "--json"]
    watching = scene.fed.process("watch", command)
    watching.wait_for_text(run)
    for _ in range(10):
        os.kill(front, signal.SIGKILL)
        front = next_front(coordinator, front)
    assert "started again in 10 s; it has failed 10 times in a row" in coordinator.text
    scene.work(CLIENTS[2])
    scene.completes(run, undisturbed)
    assert watching.popen.wait(SECONDS) == 0, watching.text
    assert "lost the coordinator" in watching.text
    assert "the coordinator answers again" in watching.text


@pytest.mark.full
def test_a_front_listener_that_is_stopped_ends_with_a_killed_coordinator_and_leaves_the_port(scene: Scene) -> None:
    coordinator = scene.fed.serving
    front = front_of(coordinator)
    os.kill(front, signal.SIGSTOP)
    os.kill(coordinator.popen.pid, signal.SIGKILL)
    coordinator.wait_killed()
    scene.fed.serve()  # on the same port
    wait_for(lambda: not Path(f"/proc/{front}").exists(), "the front listener to end")
    scene.fed.attending(*CLIENTS)


@pytest.mark.full
def test_a_front_listener_leaves_a_coordinator_that_hangs_and_is_there_again_when_it_goes_on(
    scene: Scene, undisturbed: str
) -> None:
    coordinator, front, run = listened(scene, UNHEARD_SECONDS=1.0)
    os.kill(coordinator.popen.pid, signal.SIGSTOP)
    wait_for(lambda: front_of(coordinator) == 0, "the front listener to end")
    os.kill(coordinator.popen.pid, signal.SIGCONT)
    assert next_front(coordinator, 0) != front
    scene.completes(run, undisturbed)
    assert "the front listener ended, because this process gave no sign of life for 1 s" in coordinator.text
    scene.restart()


@pytest.mark.full
def test_a_stopped_coordinator_ends_cleanly_and_its_workers_come_back(scene: Scene, undisturbed: str) -> None:
    assert scene.fed.serving.stop() == 0
    scene.fed.serve()
    assert scene.fed.wait_completed(scene.submit()) == undisturbed


def test_a_worker_that_is_told_to_stop_ends_with_0(scene: Scene) -> None:
    assert scene.fed.workers[CLIENTS[0]].stop() == 0
    scene.work(CLIENTS[0])
    wait_for(lambda: scene.fed.workers[CLIENTS[0]].text, "the worker's first word")
