"""A worker that knows several coordinators, and joins where one of them answers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from federation.refusals import Refusal
from federation.transport.addresses import in_own_order
from federation.trust.member_files import MemberFiles
from tests.harness import wait_for
from tests.scripted import CLIENT, ScriptedCoordinator, files_in, scripted
from tests.worker.scene import Running, Scene
from worker.connection.enroll import EnrollmentError, enroll
from worker.home import WorkerHome


@pytest.fixture
def second(scene: Scene) -> Iterator[ScriptedCoordinator]:
    """A further coordinator of the scene's federation."""
    made = scene.coordinator.further()
    made.start()
    yield made
    made.stop()


def attending(scene: Scene, *addresses: str, **options: Any) -> Running:
    """A worker attends that knows these addresses."""
    scene.joined()
    return scene.attending(member=replace(scene.member, addresses=addresses), **options)


def notes(scene: Scene, addresses: tuple[str, ...]) -> None:
    """Waits until the worker has noted these addresses: it says that it attends just before that."""
    wait_for(lambda: MemberFiles.load(scene.home.directory).addresses == addresses, f"the addresses {addresses}")


def test_a_worker_goes_to_the_next_coordinator_and_keeps_in_mind_what_it_was_told(
    scene: Scene, second: ScriptedCoordinator
) -> None:
    first = scene.coordinator
    scene.joined()
    first.addresses = [first.address, second.address]
    running = scene.attending()
    notes(scene, in_own_order(CLIENT, first.addresses))
    first.stop()
    wait_for(lambda: second.hellos, "the worker to attend at the second coordinator")
    running.wait_for("attending", 2)
    notes(scene, (second.address, first.address))  # the second tells of no address, not even of its own
    second.stop()

    def names_both() -> bool:
        return any(
            f"{second.address}: " in event["message"] and f"{first.address}: " in event["message"]
            for event in running.events("disconnected")
        )

    wait_for(names_both, "a message about both coordinators")
    first.start()
    running.wait_for("attending", 3)
    notes(scene, in_own_order(CLIENT, first.addresses))


def test_a_worker_stays_where_it_attends_and_its_next_start_begins_with_its_own_first_coordinator(
    scene: Scene, second: ScriptedCoordinator
) -> None:
    known = [scene.coordinator.address, second.address]
    by_address = dict(zip(known, (scene.coordinator, second), strict=True))
    mine, other = (by_address[address] for address in in_own_order(CLIENT, known))
    mine.addresses = other.addresses = known
    running = attending(scene, other.address, mine.address)
    notes(scene, (mine.address, other.address))
    other.end_stream(Refusal("database", "a stream that breaks"))
    running.wait_for("attending", 2)
    assert (len(mine.hellos), len(other.hellos)) == (0, 2), "a stream that broke is made again at the same coordinator"
    running.stop()
    attending(scene, mine.address, other.address)
    assert (len(mine.hellos), len(other.hellos)) == (1, 2)


def test_a_coordinator_that_stops_is_left_at_once(scene: Scene, second: ScriptedCoordinator) -> None:
    first = scene.coordinator
    first.attend_refusals = [Refusal("stopping", "the coordinator is stopping")]
    pauses = []

    def pause(_: float, ceiling: float) -> float:
        pauses.append(ceiling)
        return 0.0

    running = attending(scene, first.address, second.address, uniform=pause)
    assert len(first.hellos) == len(second.hellos) == 1
    assert pauses == []
    [event] = running.events("disconnected")
    assert event["message"] == f"not attending at {first.address}: the coordinator is stopping; trying {second.address}"


def test_a_server_that_is_no_coordinator_of_the_federation_is_passed_over(scene: Scene) -> None:
    with scripted() as impostor:
        running = attending(scene, impostor.address, scene.coordinator.address)
        assert impostor.hellos == []
    assert "did not prove that it is this federation's coordinator" in running.events("disconnected")[0]["message"]


def test_a_refusal_of_the_member_is_not_evaded_at_once(scene: Scene, second: ScriptedCoordinator) -> None:
    scene.coordinator.attend_refusals = [Refusal("limit:tasks", "too many")]
    running = attending(scene, scene.coordinator.address, second.address)
    assert "offer fewer tasks" in running.events("refused")[0]["message"]


def test_a_newcomer_joins_where_a_coordinator_of_the_federation_answers(scene: Scene, tmp_path: Path) -> None:
    with scripted() as impostor, scripted() as gone:
        gone.stop()
        join = scene.coordinator.join()
        impostor.enrollment_refusal = Refusal("join-string-invalid", "the secret was seen")
        others = (gone.join().address, impostor.join().address)
        member = enroll(WorkerHome(tmp_path / "member"), replace(join, addresses=(*others, join.address))).member
        assert member.addresses == (scene.coordinator.address,)
        with pytest.raises(EnrollmentError) as caught:
            enroll(WorkerHome(tmp_path / "other"), replace(join, addresses=others))
    assert str(caught.value).startswith(f"{others[0]}: no coordinator answers at ")
    assert f"; {others[1]}: the server at {others[1]} is not the coordinator of this federation" in str(caught.value)
    assert files_in(tmp_path) == ["member"]
