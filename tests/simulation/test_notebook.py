"""fedpareto in a notebook: what completion offers, what a History says of itself, how far a simulation is."""

import subprocess
import sys
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import fedpareto
from federation.spec.run_spec import RunSpec
from fedpareto import progress_line
from simulation.history import History
from simulation.simulate import SimulationProgress

SPEC = 'name = "shards"\ntask = "digits"\nrounds = 5\n[algorithm]\nname = "fedmgda+"\n'


def python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_importing_fedpareto_imports_nothing_heavy_and_completion_offers_its_names_without_pytorch() -> None:
    heavy = "('numpy', 'torch', 'grpc', 'sqlalchemy', 'rich', 'typer')"
    out = python(
        f"import sys, fedpareto; print([name for name in {heavy} if name in sys.modules])\n"
        "import rlcompleter; complete = rlcompleter.Completer({'fedpareto': fedpareto}).complete\n"
        "offered = iter(lambda place=iter(range(99)): complete('fedpareto.', next(place)), None)\n"
        "print([name.removeprefix('fedpareto.').rstrip('()') for name in offered], 'torch' in sys.modules)"
    )
    assert out.splitlines() == ["[]", f"{fedpareto.__all__} False"]


def test_every_public_name_is_there() -> None:
    assert {*fedpareto.__all__, "__version__"} <= set(dir(fedpareto))
    for name in fedpareto.__all__:
        assert getattr(fedpareto, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        fedpareto.simulated  # noqa: B018


def history(**changes: Any) -> History:
    round_ = {"round": 4, "state": "COMPLETED", "evaluated": 20.0, "accuracy/mean": 0.411, "improved": 1.0}
    values: dict[str, Any] = {
        "run_id": "5db3a138ed9c",
        "spec": RunSpec.parse(SPEC.encode()),
        "state": "COMPLETED",
        "reason": "",
        "model": np.zeros(4810, dtype=np.float32),
        "attackers": (),
        "seconds": 0.4,
        "round_records": tuple({**round_, "round": number} for number in range(5)),
        "client_records": ({"round": 0},) * 200,
        "reply_records": ({"accepted": True},) * 49 + ({"accepted": False},),
    }
    return History(**{**values, **changes})


def test_a_history_says_in_a_few_lines_how_the_run_went() -> None:
    assert repr(history()).splitlines() == [
        "shards (run 5db3a138ed9c): COMPLETED",
        "  fedmgda+ on digits: 5 of 5 rounds, in 0.4 s",
        "  round 4: accuracy/mean 0.411, improved 1",
        "  replies: 49 of 50 accepted",
        "  tables: .rounds, .clients, .replies, .members; .model: float32 (4810,)",
    ]


def test_a_history_fits_a_screen_whatever_happened() -> None:
    attackers = tuple(f"client-{number:03d}" for number in range(500))
    long = history(attackers=attackers, reason="why " * 500, warnings=("x" * 500,) * 40, objective_records=({},))
    lines = repr(long).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 120
    assert "  37 more in .warnings" in lines
    assert repr(history(round_records=(), reply_records=())).splitlines()[1:3] == [
        "  fedmgda+ on digits: 0 of 5 rounds, in 0.4 s",
        "  replies: 0 of 0 accepted",
    ]


def at(done: int, **metrics: float) -> SimulationProgress:
    return SimulationProgress(
        done, 10, MappingProxyType({f"accuracy/{name}": value for name, value in metrics.items()}), 2.0
    )


def test_a_notebook_has_one_line_that_changes_a_few_times_a_second_and_at_the_end() -> None:
    shown: list[str] = []
    times = iter([0.0, 0.1, 0.3, 0.35])

    def display(text: str) -> Any:
        shown.append(f"first {text}")
        return shown.append

    tell = progress_line.NotebookLine(display, lambda: next(times))
    for done in (1, 2, 3, 10):
        tell(at(done, mean=done / 10))
    assert shown == [
        "first 1 of 10 rounds: 2.0 rounds/s, 4 s left, mean accuracy 10.0 %",
        "3 of 10 rounds: 2.0 rounds/s, 4 s left, mean accuracy 30.0 %",
        "10 of 10 rounds: 2.0 rounds/s, mean accuracy 100.0 %",
    ]


def test_outside_a_notebook_and_a_terminal_no_progress_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert progress_line.notebook_display() is None
    with progress_line.shown() as tell:
        tell(at(1))
    assert capfd.readouterr() == ("", "")
