"""Three coordinators and eight workers: what must survive a crash, a freeze, a cut line, and the end of PostgreSQL.

Real processes throughout. In each case the run completes, its model is that of a calm run, no reply is lost or counted
twice, the bundle and the audit log verify, and the questions on record stay as they were.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.home import read_settings
from coordinator.settings import SETTINGS_FILE
from tests.coordinator.cluster.scene import LEASE_SECONDS, REFUSED, SETTINGS, Scene
from tests.harness import Federation, wait_for
from tests.postgresql import Postgresql, postgresql
from tests.soak.cluster import NAMES, OPEN, PRIVATE, Coordinator, cluster

pytestmark = pytest.mark.full
# Points of programs/crashing.py to which a conductor of fedmgda+ comes; of later replies others may take the most.
POINTS = "before-dispatch dispatching one-update-in aggregating model-written stored evaluated between-rounds"
PRIVATE_PHASES = 12  # of the two rounds


@pytest.fixture(scope="module")
def server() -> Iterator[Postgresql]:
    with postgresql() as made:
        yield made


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, server: Postgresql) -> Iterator[Scene]:
    with cluster(tmp_path_factory.mktemp("cluster"), server.create("cluster"), **SETTINGS) as made:
        yield Scene(made)


@pytest.fixture
def conductor(scene: Scene) -> Iterator[Coordinator]:
    """A coordinator that is to conduct the next run; every coordinator serves again after the test."""
    yield scene.cluster.coordinators["two"]
    for coordinator in scene.cluster.coordinators.values():
        coordinator.line.release()
        if not coordinator.alive:
            coordinator.serve()
    scene.cluster.attending(*scene.cluster.workers)


def killed(scene: Scene, conductor: Coordinator, point: str, spec: str) -> None:
    """Kills the conductor of a run at a point; the others end the run, and it starts again."""
    scene.calm(spec)
    scene.restart(conductor, crash=point)
    run = scene.submit(conductor, spec, crash=True)
    conductor.serving.wait_killed()
    asked = scene.asked(run)
    print(f"{point}: taken after {scene.wait_taken(run):.2f} s, with a lease of {LEASE_SECONDS} s")
    assert scene.problems(run, spec, scene.cluster.coordinators["three"], asked) == []


@pytest.mark.parametrize("point", POINTS.split())
def test_a_run_goes_on_when_its_conductor_is_killed(scene: Scene, conductor: Coordinator, point: str) -> None:
    killed(scene, conductor, point, OPEN)


@pytest.mark.parametrize("phase", range(1, PRIVATE_PHASES + 1))
def test_a_private_session_asks_the_questions_on_record_and_no_others_when_its_conductor_is_killed(
    scene: Scene, conductor: Coordinator, phase: int
) -> None:
    killed(scene, conductor, f"phase-{phase}", PRIVATE)


@pytest.mark.parametrize("spec", [OPEN, PRIVATE], ids=["open", "private"])
def test_a_conductor_that_sleeps_past_its_lease_changes_nothing_when_it_wakes_up(
    scene: Scene, conductor: Coordinator, spec: str
) -> None:
    log, problems = scene.oversleep(conductor, spec)
    assert problems == []
    assert REFUSED in log
    assert conductor.admin("runs")


def test_a_run_goes_on_while_its_conductor_stays_frozen_and_the_members_there_go_to_the_others(
    scene: Scene, conductor: Coordinator
) -> None:
    calm = scene.calm(OPEN)
    run = scene.submit(conductor, OPEN)
    scene.wait_round(run, 0)
    conductor.freeze()
    began = time.monotonic()
    assert scene.cluster.wait_completed(run) == calm.model
    print(f"completed {time.monotonic() - began:.1f} s after its conductor was frozen")
    conductor.thaw()
    assert scene.problems(run, OPEN, conductor) == []


def test_a_conductor_that_does_not_compare_epochs_is_found_when_it_wakes_up(
    scene: Scene, conductor: Coordinator
) -> None:
    try:
        log, problems = scene.oversleep(conductor, OPEN, "unfenced")
    finally:
        conductor.die()  # it must not conduct the runs of the following tests
    assert problems
    assert REFUSED not in log


def test_a_run_goes_on_when_the_line_of_its_conductor_to_the_database_is_cut(
    scene: Scene, conductor: Coordinator
) -> None:
    scene.calm(OPEN, 3)
    run = scene.submit(conductor, OPEN, rounds=3)
    scene.wait_round(run, 0)
    assert conductor.line.cut()
    assert scene.problems(run, OPEN, conductor, rounds=3) == []


def test_a_run_goes_on_when_nothing_arrives_any_more_on_the_line_of_its_conductor(
    scene: Scene, conductor: Coordinator
) -> None:
    scene.calm(OPEN, 3)
    run = scene.submit(conductor, OPEN, rounds=3)
    scene.wait_round(run, 0)
    conductor.line.hold()
    asked = scene.asked(run)
    scene.wait_taken(run)
    conductor.line.release()
    assert scene.problems(run, OPEN, conductor, asked, rounds=3) == []


def test_a_run_goes_on_when_postgresql_is_killed_and_started(scene: Scene, server: Postgresql) -> None:
    scene.calm(OPEN, 3)
    run = scene.cluster.submit(scene.cluster.first, OPEN, rounds=3)
    scene.wait_round(run, 0)
    server.kill()
    server.start()
    assert scene.problems(run, OPEN, scene.cluster.first, rounds=3) == []


def test_coordinators_that_start_while_postgresql_restarts_wait_for_it_and_go_on_with_the_run(
    scene: Scene, server: Postgresql
) -> None:
    scene.calm(OPEN, 3)
    coordinators = list(scene.cluster.coordinators.values())
    run = scene.cluster.submit(scene.cluster.first, OPEN, rounds=3)
    scene.wait_round(run, 0)
    server.kill()
    before = []
    for coordinator in coordinators:
        coordinator.die()
        before.append(len(coordinator.serving.text))
        coordinator.begin()
    try:
        for coordinator, length in zip(coordinators, before, strict=True):
            wait_for(lambda: "waits for its database" in coordinator.serving.text[length:], "it to wait")  # noqa: B023
            assert coordinator.alive
            assert not coordinator.has_served
    finally:
        server.start()
    for coordinator in coordinators:
        wait_for(lambda: coordinator.healthy, "it to serve")  # noqa: B023
    scene.cluster.attending(*scene.cluster.workers)
    assert scene.problems(run, OPEN, scene.cluster.first, rounds=3) == []


def test_any_coordinator_answers_administrators_and_serves_members(scene: Scene) -> None:
    cluster = scene.cluster
    cluster.wait_serving()
    for coordinator in cluster.coordinators.values():
        run = cluster.submit(coordinator, OPEN)
        assert scene.problems(run, OPEN, coordinator) == []
        assert coordinator.front()
        shown = [one.admin("run", run)["run"]["model"] for one in cluster.coordinators.values()]
        assert len(set(shown)) == 1
    assert len({coordinator.front() for coordinator in cluster.coordinators.values()}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_backup_that_any_coordinator_has_made_restores(scene: Scene, name: str, tmp_path: Path) -> None:
    maker = scene.cluster.coordinators[name]
    scene.cluster.wait_serving()
    maker.fedpareto("coordinator", "backup", str(tmp_path / "backup"), "--home", str(maker.home))
    fed = Federation(tmp_path)
    shutil.copytree(maker.home, fed.home, ignore=shutil.ignore_patterns("*ports.json"))
    own = {"database": "sqlite:///coordinator.db", "blobs": "blobs"}
    (fed.home / SETTINGS_FILE).write_text(read_settings(fed.home).model_copy(update=own).render())
    fed.fedpareto("coordinator", "restore", str(tmp_path / "backup"), "--home", str(fed.home))
    try:
        fed.serve()
        fed.admin("audit", "verify")
        restored = {run["run_id"]: run["model"] for run in fed.admin("runs")["runs"]}
    finally:
        fed.close()
    assert restored == dict(map(tuple, scene.cluster.query("select run_id, model from runs")))
