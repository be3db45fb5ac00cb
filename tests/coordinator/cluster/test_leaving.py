"""Members leave, and homes are copied, where two coordinators serve one federation on PostgreSQL."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation.trust.member_files import MemberFiles, note_addresses
from tests.coordinator.cluster.scene import SETTINGS
from tests.harness import Process, wait_for
from tests.postgresql import postgresql
from tests.soak.cluster import PRIVATE, Cluster, Coordinator, cluster


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two coordinators and eight workers; the even ones attend at the first one."""
    with (
        postgresql() as server,
        cluster(tmp_path_factory.mktemp("two"), server.create("two"), ["one", "two"], **SETTINGS) as made,
    ):
        yield made


def say(made: Cluster, name: str, *options: str) -> None:
    """The owner of a member says that it leaves."""
    made.first.fedpareto("worker", "leave", "--home", str(made.directory / name), *options)


def has_left(made: Cluster, name: str) -> bool:
    return bool(made.query("select 1 from clients where client_id = :name and state = 'LEFT'", name=name))


def end(made: Cluster, name: str) -> None:
    """Waits until the worker of a member that has left has ended."""
    process = made.workers.pop(name)
    wait_for(lambda: process.popen.poll() is not None, f"the worker of {name} to end")
    assert process.popen.returncode == 0, process.text


def held(made: Cluster, holds: str, by: Coordinator) -> str:
    """A private run in which all members but one are ready."""
    made.workers[holds].send(signal.SIGSTOP)
    run = made.submit(by, PRIVATE, rounds=1)
    replied = "select 1 from replies join assignments using (assignment_id) join phases using (phase_id) join rounds "
    replied += "using (round_id) where accepted and run_id = :run"
    wait_for(lambda: len(made.query(replied, run=run)) == len(made.workers) - 1, "the others to be ready")
    return run


@pytest.mark.full
@pytest.mark.timeout(600)
def test_members_leave_by_either_coordinator_when_a_private_run_is_stopped_or_goes_on_under_another_conductor(
    two: Cluster, tmp_path: Path
) -> None:
    one, other = two.coordinators.values()
    holds, here, there, drops, *_ = two.workers
    # One that attends elsewhere leaves at once when the run is stopped, an hour before the deadline.
    run = held(two, holds, one)
    for name in (here, there):
        say(two, name)
        two.workers[name].wait_for_text("once the work that it has begun has ended")
    one.admin("stop", run, "--yes")
    for name in (here, there):
        wait_for(lambda: has_left(two, name), f"{name} to leave")  # noqa: B023
        end(two, name)
    two.workers[holds].send(signal.SIGCONT)

    # One drops out at once, then the conductor dies; the round goes on at the other one.
    run = held(two, holds, one)
    conductor = two.conducts(run)
    assert conductor is not None
    say(two, drops, "--now")
    wait_for(lambda: has_left(two, drops), "the member to leave at once")
    end(two, drops)
    conductor.die()
    left = other if conductor is one else one
    two.workers[holds].send(signal.SIGCONT)
    two.wait_completed(run)
    bundle = str(tmp_path / "left.fedpareto")
    left.admin("bundle", run, "--payloads", "--yes", "--out", bundle)
    left.fedpareto("verify", bundle)
    left.fedpareto("worker", "verify", bundle, "--home", str(two.directory / drops))
    assert left.admin("audit", "verify")["problems"] == []
    conductor.serve()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_of_two_workers_that_start_in_copied_homes_at_two_coordinators_one_is_welcomed(two: Cluster) -> None:
    name = next(reversed(two.workers))
    home, copy = two.directory / name, two.directory / f"{name}-copy"
    for _ in range(3):
        two.workers[name].kill()
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(home, copy)
        started: dict[Path, Process] = {}
        for place, coordinator in zip((home, copy), two.coordinators.values(), strict=True):
            note_addresses(place, MemberFiles.name_key, addresses=(coordinator.address,))
        for place in (home, copy):
            (two.first.directory / f"{place.name}.log").write_text("")  # an earlier start may have been welcomed
            started[place] = two.start_worker(place)
        wait_for(lambda: all(map(answered, started.values())), "both to hear from a coordinator")  # noqa: B023
        welcomed = [place for place, process in started.items() if WELCOMED in process.text]
        assert len(welcomed) == 1, {place.name: process.text for place, process in started.items()}
        (refused,) = started.keys() - set(welcomed)
        assert "home-copied" in started[refused].text
        started[refused].kill()
        two.workers[name] = started[welcomed[0]]
        home, copy = welcomed[0], refused


WELCOMED = "attending federation"


def answered(process: Process) -> bool:
    return WELCOMED in process.text or "home-copied" in process.text
