"""`fedpareto.simulate(..., to=...)`: the rounds of a simulation of this process go to targets."""

import threading
from pathlib import Path

import pytest

import fedpareto
from fedpareto import SinkError
from fedpareto.simulation.simulation_progress import SimulationProgress
from tests.fedpareto.sinks.scene import installed, rounds_in

__all__ = ["installed"]
SPEC = 'name = "sent"\ntask = "digits"\nrounds = 2\n[simulation]\nclients = 2\n'


def nothing(progress: SimulationProgress) -> None: ...


def sinks() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sink-")]


@pytest.mark.full
def test_each_round_goes_to_each_target_and_a_warning_says_what_one_lacks(installed: Path) -> None:
    path, away = installed / "a.jsonl", installed / "absent" / "b.jsonl"
    history = fedpareto.simulate(SPEC, to=[f"own:{path}", f"own:{away}"], threads=1, progress=nothing)
    assert rounds_in(path) == [0, 1]
    assert path.with_suffix(".end").read_text() == "COMPLETED model.safetensors card.md report.html"
    assert history.warnings[-1].startswith(f"own:{away} lacks something: FileNotFoundError")
    assert sinks() == []


def test_a_target_that_cannot_be_used_is_refused_before_the_simulation(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="expected NAME:ADDRESS"):
        fedpareto.simulate(SPEC, to="tensorboard", home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.full
def test_a_simulation_that_is_broken_off_goes_on_at_the_target_when_it_is_resumed(installed: Path) -> None:
    path, home = installed / "a.jsonl", installed / "home"

    def interrupted(progress: SimulationProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedpareto.simulate(SPEC, to=f"own:{path}", home=home, threads=1, progress=interrupted)
    assert sinks() == []
    assert rounds_in(path) == [0]
    fedpareto.simulate(SPEC, to=f"own:{path}", home=home, threads=1, progress=nothing, resume=True)
    assert rounds_in(path) == [0, 1]
