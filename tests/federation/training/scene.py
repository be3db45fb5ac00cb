"""Small tasks for trainers: a line that is fitted, and a model with dropout; and external trainers, told what to do."""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Splits, Task
from federation.tasks.networks import cifar_cnn, mnist_cnn
from federation.training.external import ExternalTrainer
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.vectors import Array, Vector
from federation.work.base import Result
from tests.trained import train

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
    ),
]
SGD = LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)


class Line(Task):
    """Linear regression: gradients are known in closed form."""

    evaluation_batch = 7

    def __init__(self, samples: int = 23) -> None:
        random = np.random.default_rng(0)
        self.x = random.normal(size=(samples, 3)).astype(np.float32)
        self.y = random.normal(size=samples).astype(np.float32)

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def load(self, source: DataSource) -> Splits:
        whole = Dataset(torch.from_numpy(self.x), torch.from_numpy(self.y))
        return Splits(whole, Dataset(whole.x[:9], whole.y[:9]), Dataset(whole.x[:0], whole.y[:0]))

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.mse_loss(output[:, 0], y)}

    def correct(self, output: Tensor, y: Tensor) -> None:
        return None

    def gradient(self, w: NDArray[np.float64], chosen: Any = slice(None)) -> NDArray[np.float64]:
        x = np.column_stack([self.x[chosen], np.ones(len(self.x[chosen]))]).astype(np.float64)
        return np.asarray(2 * x.T @ (x @ w - self.y[chosen]) / len(x))


class Noisy(Task):
    """The papers' convolutional networks, with their dropout, on random images."""

    def __init__(self, channels: int = 1, samples: int = 24) -> None:
        self._channels, self._samples = channels, samples
        self.evaluation_batch = 10

    def model(self) -> nn.Module:
        return mnist_cnn() if self._channels == 1 else cifar_cnn()

    def load(self, source: DataSource) -> Splits:
        side = 28 if self._channels == 1 else 32
        random = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (self._samples, self._channels, side, side), generator=random, dtype=torch.uint8)
        y = torch.arange(self._samples) % 10
        return Splits(*(Dataset(x, y) for _ in range(3)))


def _trainer(made: Task, device: str = "cpu") -> Trainer:
    return TorchTrainer(made, made.load(DataSource()), device)


def _train(trainer: Trainer, base: NDArray[np.float32], work: LocalSgd = SGD, **changed: Any) -> Result:
    return train(trainer, base, work, **changed)


BASE = np.array([0.5, -1.0, 2.0, 0.25], dtype=np.float32)


class Both(Line):
    """Two objectives on one model: fit the data, stay small."""

    objectives = ("fit", "size")

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"size": output.square().mean(), "fit": functional.mse_loss(output[:, 0], y)}


# --- external trainers

# Writes READY, then what a test says for each order, of which it knows the type, `kind`, and the honest answer.
CHILD = """
import json, os, struct, sys, threading, time
sink = sys.stdout.buffer
def write(data):
    sink.write(data)
    sink.flush()
def say(data=b"", **header):
    header |= {"bytes": len(data)} if data else {}
    write(json.dumps(header).encode() + b"\\n" + data)
def order():
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit()
    header = json.loads(line)
    return header, sys.stdin.buffer.read(header.get("bytes", 0))
first, _ = order()
samples = {"train": 10, "validation": 0, "test": 3}
READY
while True:
    header, model = order()
    kind, id = header["type"], header.get("id")
    def answer():
        if kind == "evaluate":
            say(type="scores", id=id, scores={"loss": 1.0, "accuracy": 0.5})
        elif kind == "train":
            say(model, type="model", id=id)
        elif kind == "gradients":
            say(model + model, type="gradients", id=id)
    WRITES
"""
READY = "say(type='ready', id=0, samples=samples, abilities=['repeatable'])"


class Three(Task):
    """Three parameters; the data is the process's."""

    name = "three"

    def initial(self, seed: int) -> dict[str, NDArray[np.float64]]:
        return {"a": np.zeros(2), "b": np.zeros(1)}


Start = Callable[..., ExternalTrainer]


def child(directory: Path, writes: str, ready: str = READY) -> str:
    """The command of such a process; `writes` are Python statements, which are carried out for each order."""
    path = directory / f"child-{len(list(directory.glob('child-*')))}.py"
    path.write_text(CHILD.replace("READY", ready).replace("WRITES", writes.strip().replace("\n", "\n    ")))
    return shlex.join([sys.executable, "-S", str(path)])


def starting(directory: Path) -> Iterator[Start]:
    """Starts such trainers, and ends them."""
    made: list[ExternalTrainer] = []

    def started(
        writes: str = "answer()", ready: str = READY, silence: float = 60.0, learned: Task | None = None
    ) -> ExternalTrainer:
        command = child(directory, writes, ready)
        made.append(ExternalTrainer(learned or Three(), DataSource(), command=command, silence=silence))
        return made[-1]

    yield started
    for trainer in made:
        trainer.close()


class Halving(Trainer):
    """Divides each parameter by two, whatever the data is."""

    def train(self, model: Vector, plan: TrainingPlan) -> Array:
        plan.progress(0.5)
        return model / 2

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
        return {"loss": float(np.abs(model).sum()), "accuracy": 0.5, "auc": 0.75, "recall/0": math.nan, "recall/1": 1.0}
