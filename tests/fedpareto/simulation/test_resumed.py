"""Simulations that are interrupted after each phase and resumed: the record is as if nothing had interrupted them."""

from pathlib import Path

import pytest

from fedpareto.simulation.simulate import Simulation
from storage.models import Assignment, Base, Evaluation, Input, Phase, Reply
from tests.coordinator.rounds.runs.scene import PRIVATE
from tests.fedpareto.simulation import scene as simulations
from tests.fedpareto.simulation.scene import OBJECTIVES
from tests.few import few
from tests.interrupted import interrupted_after_each_phase

one_thread = simulations.one_thread  # a fixture

TWO_WAY = OBJECTIVES.format(algorithm='name = "fedcmoo"\nsketch = "svd-two-way"', objectives="all")
SEARCH = """\
name = "search"
task = "digits"
rounds = 2
algorithm = { name = "fedmdfg", theta = 1.0 }
train = { steps = 1, batch_size = 20 }
evaluate.splits = ["train"]
simulation.clients = 3
"""
TABLES: tuple[type[Base], ...] = (Phase, Assignment, Input, Reply, Evaluation)


def kinds(simulation: Simulation) -> list[tuple[str, bool]]:
    """The kind of each phase on record, and whether its clients needed inputs."""
    with simulation._database.read() as session:
        phases = session.query(Phase).order_by(Phase.round_id, Phase.number).all()
        return [(phase.kind, any(assignment.inputs for assignment in phase.assignments)) for phase in phases]


def counts(simulation: Simulation) -> list[int]:
    with simulation._database.read() as session:
        return [session.query(table).count() for table in TABLES]


@few("line search")
@pytest.mark.parametrize(
    ("text", "need_inputs"),
    [
        (TWO_WAY, {"residual"}),
        (SEARCH, {"search"}),
        (PRIVATE, {"secure-deal", "secure-ready", "secure-open", "secure-unmask"}),
    ],
    ids=["two-way sketches", "line search", "private"],
)
def test_a_simulation_that_is_interrupted_after_each_phase_goes_on_to_the_same_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, need_inputs: set[str]
) -> None:
    with Simulation(text.encode(), tmp_path / "whole") as simulation:
        whole = simulation.run()
        rows, phases = counts(simulation), kinds(simulation)
    history = interrupted_after_each_phase(monkeypatch, text, tmp_path / "home")
    with Simulation(text.encode(), tmp_path / "home", resume=True) as simulation:
        found = counts(simulation)
    assert {kind for kind, inputs in phases if inputs} == need_inputs
    assert (history.state, found) == ("COMPLETED", rows)
    assert history.model.tobytes() == whole.model.tobytes()
    assert history.replies.equals(whole.replies)
