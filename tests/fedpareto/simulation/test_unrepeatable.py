"""Simulations of a task with an operation that has no deterministic kernel."""

from pathlib import Path

import numpy as np
import pytest

from fedpareto.simulation import SimulationError
from fedpareto.simulation.compiled import check_compiler
from fedpareto.simulation.simulate import Simulation
from storage.models import Assignment, Reply
from tests.fedpareto.simulation import scene as simulations
from tests.fedpareto.simulation.scene import close, spec
from tests.few import few

one_thread = simulations.one_thread  # a fixture

UNDECIDED = "tests.owners_code.unpooled_task:Undecided"
TWO_WAY = 'name = "fedcmoo"\nsketch = "svd-two-way"'


def simulated(text: str, home: Path, backend: str) -> tuple[bytes, set[bool], set[str]]:
    """The model, whether replies are marked as unrepeatable, and the reasons of declines."""
    with Simulation(text.encode(), home, backend=backend, device="cpu") as simulation:
        history = simulation.run()
        with simulation._database.read() as session:
            marks = {reply.unrepeatable for reply in session.query(Reply)}
            reasons = {assignment.reason for assignment in session.query(Assignment) if assignment.reason}
    return history.model.tobytes(), marks, reasons


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fedpareto.training"]


@few("stacked", "loop")
@pytest.mark.parametrize("backend", ["stacked", "loop", "ray"])
@pytest.mark.full
def test_simulated_clients_begin_again_come_to_the_same_model_and_mark_their_replies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    text = spec(clients=3, rounds=2, partition="iid")
    expected, marked, _ = simulated(text, tmp_path / "digits", backend)
    assert marked == {False}
    assert not logged(caplog)
    assert simulated(text.replace('"digits"', f'"{UNDECIDED}"'), tmp_path / "home", backend) == (
        expected,
        {True},
        set(),
    )
    assert ["undetermined_backward" in line for line in logged(caplog)] == [True]


@pytest.mark.full
def test_compiled_steps_begin_again_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    try:
        check_compiler()
    except SimulationError as error:
        pytest.skip(str(error))
    text = spec(clients=3, rounds=2, partition="iid").replace('"digits"', '"tests.owners_code.unpooled_task:Unpooled"')
    one, other = (simulated(text, tmp_path / backend, backend) for backend in ("loop", "compiled"))
    close(np.frombuffer(other[0], np.float32), np.frombuffer(one[0], np.float32))
    assert one[1:] == other[1:] == ({True}, set())
    assert ["max_unpooling2d" in line for line in logged(caplog)] == [True, True]


@few("stacked")
@pytest.mark.parametrize("backend", ["stacked", "loop"])
@pytest.mark.full
def test_only_a_sketch_that_asks_twice_is_declined(tmp_path: Path, backend: str) -> None:
    text = spec(clients=2, rounds=1, partition="iid", algorithm="ALGORITHM").replace('"digits"', f'"{UNDECIDED}"')
    sketched = text.replace('name = "ALGORITHM"', 'name = "fedcmoo"')
    assert simulated(sketched, tmp_path / "once", backend)[1:] == ({True}, set())
    twice = text.replace('name = "ALGORITHM"', TWO_WAY)
    assert "ability:repeatable" in simulated(twice, tmp_path / "twice", backend)[2]
