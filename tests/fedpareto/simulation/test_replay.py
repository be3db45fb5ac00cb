"""A simulation that died in the middle of a step: it goes on to the same bytes, and its record says what was done."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.rounds import conductor
from coordinator.rounds.step import make_step
from fedpareto.simulation.simulate import Simulation
from storage.models import Assignment, Phase, Reply, Round
from tests.fedpareto.simulation import scene
from tests.few import few_of

SPEC = """
name = "small"
task = "digits"
rounds = 4
seed = 5
selection = {{ method = "fraction", fraction = 0.6 }}
train = {{ batch_size = 20 }}
{more}
"""
ATTACK = 'attackers = 3\nattack = "free-rider"'
DIES_IN = 2  # round


class Death(Exception):
    """What kill -9 is to a test."""


one_thread = scene.one_thread  # a fixture


@pytest.mark.parametrize(
    "more",
    [
        pytest.param('algorithm = { name = "fedfv", tau = 2 }\nsimulation = { clients = 5 }', marks=pytest.mark.full),
        f'algorithm.name = "afl"\n[simulation]\nclients = 5\n{ATTACK}',
    ],
)
@pytest.mark.parametrize("before", few_of([True, False], True))
@pytest.mark.full
def test_death_beside_the_making_of_a_step_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, before: bool
) -> None:
    text = SPEC.format(more=more).encode()
    with Simulation(text, tmp_path / "whole") as simulation:
        whole = simulation.run()
    make = make_step

    def die(fleet: Any, algorithm: Any, current: Round, *arguments: Any) -> object:
        if current.number == DIES_IN and before:
            raise Death
        made = make(fleet, algorithm, current, *arguments)
        if current.number == DIES_IN:
            raise Death
        return made

    with monkeypatch.context() as patched, Simulation(text, tmp_path / "home") as simulation:
        patched.setattr(conductor, "make_step", die)
        with pytest.raises(Death):
            simulation.run()
    with Simulation(text, tmp_path / "home", resume=True) as simulation:
        rest = simulation.run()
        with simulation._database.read() as session:
            recorded = session.scalars(select(Reply.envelope_digest).order_by(Reply.envelope_digest)).all()
            asked = session.scalars(select(Round.selected)).all()
            told = session.scalars(select(Assignment.client_id).join(Phase)).all()
    assert rest.model.tobytes() == whole.model.tobytes()
    assert rest.reply_records == whole.reply_records
    assert len(recorded) == len(set(recorded)) == len(told) == sum(map(len, asked))
