"""Client-rounds per second of `fedpareto.simulate`, a plain PyTorch loop and Flower's simulation.

All train the same model by FedAvg on the same samples, in the same batches, from the same initial model, with every
client in every round. The last models must agree. Each contender runs in its own process, one after the other, and the
best of `--repeats` runs counts. The rate leaves out the first round, which includes the start, and the last round, in
which fedpareto evaluates. `--threads` of torch train the large model; 0 is one for each core. `--rounds` are those of
the small and of the large model; 0 leaves the latter out. `--flower` is the Python of an environment with Flower (see
docs/operate/benchmarks.md). `--apart 0` runs PyTorch and fedpareto's loop only, with two clients, in this process.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from shutil import which

import numpy as np
import torch
from fedavg import Case, Result, plain
from measuring import Document, cases, in_a_process, progress
from torch import Tensor

from federation.spec.run_spec import RunSpec
from federation.tasks import DataSource, initial_model, task
from federation.training.trainer import training_seed
from fedpareto.notebook import simulate
from simulation.population import populate

CORES = len(os.sched_getaffinity(0))
HERE = Path(__file__).resolve().parent
PHOTOGRAPHS = "fedavg:MadeUpPhotographs"
# The largest distance from PyTorch's model, divided by the distance of that from the initial model. In the large model,
# rounding sometimes switches a ReLU, which makes 1e-2 after ten rounds; batches in another order make 5e-2.
AGREE = 2e-2
SPEC = """
name = "benchmark"
task = "{task}"
rounds = {rounds}
algorithm = {{ name = "fedavg", prior = "samples" }}
train = {{ epochs = 0, steps = {steps}, batch_size = 10, learning_rate = {learning_rate}, measure = {measure} }}
evaluate = {{ every = 0, splits = ["train"] }}
simulation = {{ clients = {clients}, partition = "iid" }}
"""
FORMS = {
    "full": {"flower": "", "threads": 0, "repeats": 3, "rounds": "62x10", "apart": 1},
    "quick": {"repeats": 1, "rounds": "12x4"},
    "smallest": {"repeats": 1, "rounds": "4x0", "apart": 0},
}
Contender = Callable[[Path, Path], None]  # reads a case, writes a result


@dataclass(frozen=True)
class Setting:
    """A task and its training.

    Attributes:
        threads: of torch, if one process trains. Ray has a process with one thread for each core.
    """

    task: str
    clients: int
    steps: int
    learning_rate: float
    rounds: int
    threads: int

    def spec(self, *, measure: bool = False) -> str:
        return SPEC.format(**vars(self), measure=str(measure).lower())

    def case(self) -> Case:
        """The same work without a run specification."""
        learned, spec = task(self.task), RunSpec.parse(self.spec().encode())
        population = populate(learned, spec, DataSource())
        return Case(
            task=self.task,
            steps=spec.train.steps,
            batch_size=spec.train.batch_size,
            learning_rate=spec.train.learning_rate,
            threads=self.threads,
            initial=torch.from_numpy(initial_model(learned, spec.seed)[1]),
            x=[own.train.x for own in population.splits.values()],
            y=[own.train.y for own in population.splits.values()],
            seeds=[[training_seed(spec.seed, t, name) for name in population.splits] for t in range(self.rounds)],
        )


def measure(flower: str, threads: int, repeats: int, rounds: str, apart: int) -> Document:
    ((small, large),) = cases(rounds)
    clients, steps = (20, 10) if apart else (2, 1)
    settings = [Setting("digits", clients=clients, steps=steps, learning_rate=0.1, rounds=small, threads=1)]
    if large:
        settings.append(Setting(PHOTOGRAPHS, 10, steps=5, learning_rate=0.005, rounds=large, threads=threads or CORES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])  # for processes of Ray and Flower
    result: Document = {}
    for setting in settings:
        choice = contenders(setting, flower, apart=bool(apart))
        with tempfile.TemporaryDirectory() as directory:
            result[setting.task] = compare(setting, choice, repeats, Path(directory))
        for row in result[setting.task]:
            if (row.get("difference") or 0.0) > AGREE:
                result["problem"] = f"{setting.task}: {row['contender']} has come to another model than PyTorch"
    return result


def ours(case: Path, result: Path, *, backend: str, spec: str) -> None:
    threads, ends = torch.load(case, weights_only=False).threads, list[float]()
    told = lambda _: ends.append(time.monotonic())  # noqa: E731
    done = simulate(spec, device="cpu", backend=backend, threads=threads, progress=told)
    if done.state != "COMPLETED":
        raise RuntimeError(f"the run ended as {done.state}")
    torch.save(Result(torch.from_numpy(np.array(done.model)), ends, f"fedpareto {version('fedpareto')}"), result)


def flower(case: Path, result: Path, *, python: str) -> None:
    one_thread = case.with_suffix(".one")
    torch.save(replace(torch.load(case, weights_only=False), threads=1), one_thread)
    quiet = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command: list[str | Path] = [python, HERE / "flower_app.py", one_thread, result, str(CORES)]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode or not result.is_file():
        raise SystemExit(f"Flower failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def contenders(setting: Setting, python: str, *, apart: bool) -> dict[str, Contender | None]:
    """The contenders by name; None if the software is not installed."""

    def mine(backend: str, there: object = True, *, measure: bool = False) -> Contender | None:
        return partial(ours, backend=backend, spec=setting.spec(measure=measure)) if there else None

    choice: dict[str, Contender | None] = {"PyTorch": partial(plain, measure=False), "fedpareto loop": mine("loop")}
    if not apart:
        return {**choice, "Flower": None}
    choice |= {
        "PyTorch, measuring too": partial(plain, measure=True),
        "fedpareto loop, measuring too": mine("loop", measure=True),
        "fedpareto stacked": mine("stacked"),
        "fedpareto ray": mine("ray", find_spec("ray")),
    }
    if setting.task != PHOTOGRAPHS:  # with long steps it is not faster
        choice["fedpareto compiled"] = mine("compiled", which("g++"))
    separate = {name: work and partial(in_a_process, work) for name, work in choice.items()}
    return {**separate, "Flower": partial(flower, python=python) if python else None}


def compare(setting: Setting, measured: dict[str, Contender | None], repeats: int, directory: Path) -> list[Document]:
    """Every contender's best rate, and how far its last model is from PyTorch's, beside what that has moved."""
    case = setting.case()
    path, rate = directory / "case", "client_rounds_per_second"
    torch.save(case, path)
    runs: dict[str, list[tuple[Document, Tensor]]] = {name: [] for name in measured}
    for turn, (name, contender) in product(range(repeats), measured.items()):
        if contender is not None:
            progress(f"{setting.task}: {name}, run {turn + 1}")
            written = directory / f"{name} {turn}"
            contender(path, written)
            result: Result = torch.load(written, weights_only=False)
            first, *_, last, _ = result.ends
            found = {"software": result.software, rate: setting.clients * (len(result.ends) - 2) / (last - first)}
            runs[name].append((found, result.model))
    best = {name: max(some, key=lambda run: run[0][rate]) for name, some in runs.items() if some}
    peer, model = best["PyTorch"]
    moved = (model - case.initial).norm()
    rows = {
        name: {**found, "ratio": found[rate] / peer[rate], "difference": float((own - model).norm() / moved)}
        for name, (found, own) in best.items()
    }
    return [{"contender": name, **rows.get(name, {"software": None})} for name in measured]
