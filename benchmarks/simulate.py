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
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from operator import itemgetter
from pathlib import Path
from shutil import which

import numpy as np
import torch
from fedavg import BATCH_SIZE, Case, Result, Setting, plain
from measuring import Document, cases, in_a_process, progress

from federation.spec.run_spec import RunSpec
from federation.tasks import DataSource, initial_model, task
from federation.training.trainer import training_seed
from fedpareto.face.simulated import simulate
from fedpareto.simulation.population import populate

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
train = {{ epochs = 0, steps = {steps}, batch_size = {batch_size}, learning_rate = {rate}, measure = {measure} }}
evaluate = {{ every = 0, splits = ["train"] }}
simulation = {{ clients = {clients}, partition = "iid" }}
"""
FORMS = {
    "full": {"flower": "", "threads": 0, "repeats": 3, "rounds": "62x10", "apart": 1},
    "quick": {"repeats": 1, "rounds": "12x4"},
    "smallest": {"repeats": 1, "rounds": "4x0", "apart": 0},
}
Contender = Callable[[Path], Result]  # reads a case


def specification(setting: Setting, *, measure: bool) -> str:
    return SPEC.format(**vars(setting), batch_size=BATCH_SIZE, measure=str(measure).lower())


def case_of(setting: Setting) -> Case:
    """The same work without a run specification."""
    learned, spec = task(setting.task), RunSpec.parse(specification(setting, measure=False).encode())
    population = populate(learned, spec, DataSource())
    return Case(
        **vars(setting),
        initial=torch.from_numpy(initial_model(learned, spec.seed)[1]),
        x=[own.train.x for own in population.splits.values()],
        y=[own.train.y for own in population.splits.values()],
        seeds=[[training_seed(spec.seed, t, name) for name in population.splits] for t in range(setting.rounds)],
    )


def measure(flower: str, threads: int, repeats: int, rounds: str, apart: int) -> Document:
    ((small, large),) = cases(rounds)
    clients, steps = (20, 10) if apart else (2, 1)
    settings = [Setting("digits", clients=clients, steps=steps, rate=0.1, rounds=small, threads=1)]
    if large:
        settings.append(Setting(PHOTOGRAPHS, 10, steps=5, rate=0.005, rounds=large, threads=threads or CORES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])  # for processes of Ray and Flower
    result: Document = {}
    for setting in settings:
        result[setting.task] = compare(case_of(setting), contenders(setting.task, flower, apart=bool(apart)), repeats)
        for row in result[setting.task]:
            if (row.get("difference") or 0.0) > AGREE:
                result["problem"] = f"{setting.task}: {row['contender']} has come to another model than PyTorch"
    return result


def ours(path: Path, *, backend: str, measure: bool = False) -> Result:
    case: Case = torch.load(path, weights_only=False)
    ends: list[float] = []
    told = lambda _: ends.append(time.monotonic())  # noqa: E731
    spec = specification(case, measure=measure)
    done = simulate(spec, device="cpu", backend=backend, threads=case.threads, progress=told)
    if done.state != "COMPLETED":
        raise RuntimeError(f"the run ended as {done.state}")
    return Result(np.array(done.model), ends, f"fedpareto {version('fedpareto')}")


def flower(path: Path, *, python: str) -> Result:
    written = path.with_suffix(".flower")
    written.unlink(missing_ok=True)
    quiet = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command: list[str | Path] = [python, HERE / "flower_app.py", path, written, str(CORES)]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    if done.returncode or not written.is_file():
        raise SystemExit(f"Flower failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    result: Result = torch.load(written, weights_only=False)
    return result


def contenders(task: str, python: str, *, apart: bool) -> dict[str, Contender | None]:
    """The contenders by name; None if the software is not installed."""
    choice: dict[str, Contender | None] = {
        "PyTorch": partial(plain, measure=False),
        "fedpareto loop": partial(ours, backend="loop"),
    }
    if not apart:
        return {**choice, "Flower": None}
    choice |= {
        "PyTorch, measuring too": partial(plain, measure=True),
        "fedpareto loop, measuring too": partial(ours, backend="loop", measure=True),
        "fedpareto stacked": partial(ours, backend="stacked"),
        "fedpareto ray": partial(ours, backend="ray") if find_spec("ray") else None,
    }
    if task != PHOTOGRAPHS:  # with long steps it is not faster
        choice["fedpareto compiled"] = partial(ours, backend="compiled") if which("g++") else None
    separate = {name: work and partial(in_a_process, work) for name, work in choice.items()}
    return {**separate, "Flower": partial(flower, python=python) if python else None}


def compare(case: Case, measured: dict[str, Contender | None], repeats: int) -> list[Document]:
    """Every contender's best rate, and how far its last model is from PyTorch's, beside what that has moved."""
    best: dict[str, tuple[float, Result]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "case")
        torch.save(case, path)
        for turn, (name, contender) in product(range(repeats), measured.items()):
            if contender is not None:
                progress(f"{case.task}: {name}, run {turn + 1}")
                result = contender(path)
                first, *_, last, _ = result.ends
                run = (case.clients * (len(result.ends) - 2) / (last - first), result)
                best[name] = max(run, best.get(name, run), key=itemgetter(0))
    peer, model = best["PyTorch"][0], best["PyTorch"][1].model
    moved = np.linalg.norm(model - case.initial.numpy())
    rows: dict[str, Document] = {name: {"contender": name, "software": None} for name in measured}
    for name, (rate, result) in best.items():
        rows[name] |= {"software": result.software, "client_rounds_per_second": rate, "ratio": rate / peer}
        rows[name] |= {"difference": float(np.linalg.norm(result.model - model) / moved)}
    return list(rows.values())
