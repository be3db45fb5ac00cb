"""fedpareto in a notebook: what completion offers, what a History says of itself, how far a simulation is."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import fedpareto
from federation.process.shared_state import alone
from federation.spec.run_spec import RunSpec
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.vectors import Vector
from fedpareto import missing_packages, progress_line
from fedpareto.simulation.history import History
from fedpareto.simulation.simulation_progress import SimulationProgress

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
    # The layer is a class of PyTorch.
    assert out.splitlines() == ["[]", f"{[name for name in fedpareto.__all__ if name != 'Standardise']} False"]


@pytest.mark.parametrize("absent", [["pandas"], ["torch", "pandas"]])
def test_a_simulation_without_its_packages_says_which_to_install(
    monkeypatch: pytest.MonkeyPatch, absent: list[str]
) -> None:
    monkeypatch.setattr(missing_packages, "find_spec", lambda name: None if name in absent else find_spec(name))
    words = rf"needs {' and '.join(absent)}, not installed here: install fedpareto\[torch,experiments\]"
    with pytest.raises(ModuleNotFoundError, match=words) as caught:
        fedpareto.simulate(SPEC)
    assert isinstance(caught.value, fedpareto.Error)


def test_every_public_name_is_there() -> None:
    left_out = {"Standardise"}  # a class of PyTorch: completion would import that
    assert {*fedpareto.__all__, "__version__"} - left_out <= set(dir(fedpareto))
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


class Forgetful(TorchTrainer):
    """Returns no model."""

    def train(self, model: Vector, plan: TrainingPlan) -> Any:
        return None


class Percent(TorchTrainer):
    """Returns an accuracy in per cent."""

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        scores = super().evaluate(model, plan)
        return {**scores, "accuracy": 100 * scores["accuracy"]}


def simulated(trainer: str) -> History:
    spec = SPEC.replace("rounds = 5", "rounds = 1\nsimulation.clients = 2\ntrain.steps = 1")
    name = f"tests.fedpareto.simulation.test_notebook:{trainer}"
    return fedpareto.simulate(spec, trainer=name, threads=1, progress=lambda _: None)


def test_the_first_line_of_a_run_that_failed_says_why_its_clients_declined() -> None:
    lines = repr(simulated("Forgetful")).splitlines()
    assert "FAILED, trainer:result: train() of the trainer returned None; return a vector" in lines[0]
    whole = " ".join(" ".join(lines).split())
    assert "no step was made in its only round, with trainer:result in 2 of 2 failed answers" in whole


def test_an_accuracy_that_is_no_share_is_told_in_the_log_and_in_the_summary(caplog: pytest.LogCaptureFixture) -> None:
    found = simulated("Percent")
    told = [
        warning for warning in found.warnings if "and an accuracy is a share in [0, 1], so it is left out" in warning
    ]
    assert [warning.partition(" is ")[0] for warning in told] == [
        f"client-000: {split}/accuracy" for split in ("train", "validation", "test")
    ]
    assert told == caplog.messages
    assert "  warning: client-000: train/accuracy is " in repr(found)
    assert "accuracy/mean" not in found.round_records[0]


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


# ---- what the caller does around it


class Noise(fedpareto.Task):
    """Data from seeded generators of the process, and a model that draws from them; it changes the directory."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))

    def pool(self, source: fedpareto.DataSource) -> fedpareto.Pool:
        os.chdir("/")
        torch.manual_seed(3)
        time.sleep(0)  # lets other threads go on
        x = torch.randn(60, 4)
        np.random.seed(3)
        return fedpareto.Pool(x, (x.sum(1) > np.random.rand()).long())

    def augment(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0)
        return x + torch.randn(())


def noisy(seed: int, rounds: int = 1, **options: Any) -> np.ndarray:
    """The model of a small simulation."""
    spec = (
        f'name = "noise"\ntask = "{__name__}:Noise"\nrounds = {rounds}\nseed = {seed}\ntrain.steps = 3\n'
        'simulation.clients = 2\nalgorithm.name = "torchjd:upgrad"\nevaluate.every = 0\n'
    )
    return fedpareto.simulate(spec, threads=1, backend="loop", progress=lambda progress: None, **options).model


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, to which the test comes back."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def eager() -> Iterator[None]:
    """Threads that take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.full
def test_simulations_at_once_give_the_models_of_each_alone(somewhere: Path, eager: None) -> None:
    expected = [noisy(seed, rounds=3) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        models = list(threads.map(lambda seed: noisy(seed, rounds=3), (0, 1)))
    np.testing.assert_array_equal(models, expected)


def test_the_record_is_where_the_caller_wanted_it_and_the_model_in_memory_of_its_own(somewhere: Path) -> None:
    model = noisy(0, home="record")
    assert (somewhere / "record" / "coordinator.toml").exists()
    assert type(model) is np.ndarray
    assert model.flags.owndata
    assert model.flags.writeable


def switches() -> list[Any]:
    """What a notebook sets in the process and in its thread."""
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch.get_deterministic_debug_mode(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        np.geterr(),
    ]


def test_what_the_caller_has_set_changes_no_number_and_is_the_same_afterwards(somewhere: Path) -> None:
    expected = noisy(0)
    with ExitStack() as notebook:
        settings: list[tuple[Callable[[Any], object], Any, Any]] = [
            (torch.set_default_dtype, torch.float64, torch.float32),
            (torch.set_default_device, "meta", None),
            (torch.set_deterministic_debug_mode, 1, 0),
            (torch.set_float32_matmul_precision, "medium", "highest"),
            (torch.set_num_threads, 2, torch.get_num_threads()),
        ]
        for switch, value, usual in settings:
            switch(value)
            notebook.callback(switch, usual)
        notebook.enter_context(torch.inference_mode())
        notebook.enter_context(torch.autocast("cpu", torch.bfloat16))
        notebook.enter_context(torch.autograd.set_detect_anomaly(True))
        notebook.enter_context(np.errstate(all="raise"))
        before = switches()
        model = noisy(0)
        assert switches() == before
        result = fedpareto.aggregate("torchjd:upgrad", [[1e-200, 1.0], [1.0, 1e-200]])
    np.testing.assert_array_equal(model, expected)
    np.testing.assert_allclose(result.direction, [0.5, 0.5])


def test_a_process_that_is_forked_while_another_thread_has_its_turn_does_not_wait_for_it() -> None:
    has_turn, done = threading.Event(), threading.Event()

    def take() -> None:
        with alone():
            has_turn.set()
            done.wait()

    thread = threading.Thread(target=take)
    thread.start()
    has_turn.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with alone():
            os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_gradients_as_autograd_gives_them_and_narrow_tensors_are_aggregated() -> None:
    rows = torch.arange(6.0).reshape(2, 3).requires_grad_()
    for updates in (rows, list(rows), rows.bfloat16(), rows.half(), [row.to_sparse() for row in rows], rows.tolist()):
        result = fedpareto.aggregate("afl", updates, losses=[torch.tensor(1.0, requires_grad=True), np.float32(1)])
        np.testing.assert_array_equal(result.direction, [1.5, 2.5, 3.5])
    with torch.inference_mode():
        assert fedpareto.aggregate("fedavg", torch.ones(2, 3), samples=torch.tensor([1, 3])).weights[0] == 0.25
    for updates, says in (
        ([[torch.ones(2), torch.ones(3)]], r"updates\[0\]: .*; join the parts of an update into one vector"),
        (torch.ones(2, 2, dtype=torch.complex64), "updates: got Tensor of complex values, not numbers"),
        (torch.ones(2, 2, device="meta"), "updates: got Tensor, not numbers: Cannot copy out of meta tensor"),
    ):
        with pytest.raises(ValueError, match=says):
            fedpareto.aggregate("fedavg", updates)


def test_a_loss_that_is_not_known_drops_its_row_and_a_negative_one_counts_as_none() -> None:
    U = np.arange(12.0).reshape(3, 4) + 1
    for unknown in (math.nan, None, torch.tensor(math.nan)):
        assert fedpareto.aggregate("q-fedavg", U, losses=[unknown, 1.0, 2.0]).dropped == (0,)
    negative = fedpareto.aggregate("q-fedavg", U, losses=[-1.0, 1.0, 2.0])
    assert negative.dropped == ()
    assert negative.weights[0] < 1e-9


def test_hyperparameters_may_be_numbers_of_numpy() -> None:
    first, second = (fedpareto.aggregate("fedmgda+", np.eye(3), epsilon=half) for half in (0.5, np.float32(0.5)))
    np.testing.assert_array_equal(first.direction, second.direction)
