"""A simulation of many clients: CPU time of a round, memory, and the commands that read its record.

One per cent of the clients train in each round, and all of them measure each model. The model is small, so that the
figures are those of the program and not of PyTorch. Each number of clients has a process of its own. `--clients` are
their numbers; ratios are to the first of them.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
from measuring import Document, cpu_seconds, in_a_process, peak_memory, progress
from torch import nn

from federation.tasks import DataSource, Pool, Task
from fedpareto.face.simulated import simulate
from fedpareto.processes.forked import completed

PER_CLIENT = 12  # samples
CLASSES, INPUTS = 4, 20
CLIENTS = "FEDPARETO_BENCHMARK_CLIENTS"
SPEC = """
name = "population"
task = "population:MadeUpPoints"
rounds = {rounds}
algorithm = {{ name = "fedavg" }}
train = {{ epochs = 0, steps = 2, batch_size = 4, learning_rate = 0.1 }}
selection = {{ method = "fraction", fraction = 0.01 }}
evaluate = {{ every = 1, splits = ["train", "test"] }}
simulation = {{ clients = {clients} }}
"""
FORMS = {
    "full": {"clients": "1000 3000 10000", "rounds": 6},
    "quick": {"clients": "300 1000", "rounds": 4},
    "smallest": {"clients": "20 40", "rounds": 3},
}


class MadeUpPoints(Task):
    """Points around one centre for each class."""

    def model(self) -> nn.Module:
        return nn.Linear(INPUTS, CLASSES)

    def pool(self, source: DataSource) -> Pool:
        count = PER_CLIENT * int(os.environ[CLIENTS])
        y = torch.arange(count) % CLASSES
        noise = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(0))
        return Pool(noise + 2 * torch.eye(CLASSES, INPUTS)[y], y)


def measure(clients: str, rounds: int) -> Document:
    rows: list[Document] = []
    completed(["-m", "fedpareto", "--help"])  # starts the server from which commands are forked
    for count in map(int, clients.split()):
        progress(f"{count} clients")
        with tempfile.TemporaryDirectory() as directory:
            figures = in_a_process(simulated, count, rounds, Path(directory, "home"))
            rows.append({"clients": count, **figures, **commands(Path(directory))})
    first = rows[0]
    for row in rows:
        row["round_ratio"] = row["round_cpu_seconds"] / first["round_cpu_seconds"]
        more = row["clients"] - first["clients"]
        grown = row["peak_megabytes"] - first["peak_megabytes"]
        row["megabytes_per_1000"] = 1000 * grown / more if more else None
    return {"population": rows}


def commands(directory: Path) -> dict[str, float]:
    """The seconds of the commands that read the record of a simulation."""
    admin, seconds = str(directory / "home" / "admin"), {}
    for name, arguments in {
        "rounds": ["admin", "--home", admin, "rounds", "population"],
        "round": ["admin", "--home", admin, "round", "population", "-1"],
        "report": ["report", "population", "--home", admin, "--out", str(directory / "report.html")],
    }.items():
        began = time.monotonic()
        done = completed(["-m", "fedpareto", *arguments])
        if done.returncode:
            raise SystemExit(f"fedpareto {' '.join(arguments)} failed:\n{done.stderr}")
        seconds[f"{name}_seconds"] = time.monotonic() - began
    return seconds


def simulated(count: int, rounds: int, home: Path) -> dict[str, float]:
    """Simulates in this process, whose memory counts."""
    os.environ[CLIENTS] = str(count)
    ends: list[float] = []
    spec = SPEC.format(rounds=rounds, clients=count)
    told = lambda _: ends.append(cpu_seconds(os.getpid()))  # noqa: E731
    done = simulate(spec, home=home, device="cpu", threads=1, progress=told)
    if done.state != "COMPLETED":
        raise RuntimeError(f"the run ended as {done.state}")
    per_round = (ends[-1] - ends[0]) / (len(ends) - 1)
    return {"round_cpu_seconds": per_round, "peak_megabytes": peak_memory(os.getpid()) / 1e6}
