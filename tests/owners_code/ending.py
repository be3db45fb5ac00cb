"""Code that ends the process: `ending:NAME` is a task, or a trainer, whose method NAME calls sys.exit()."""

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from federation.tasks import Dataset, DataSource, Pool, Splits, Task
from federation.training.plans import TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.vectors import Vector

WHY = "no licence for the image reader"
TASKS = ("init", "pool", "load", "model", "initial", "buffers", "losses", "correct", "augment", "metrics", "sample")
TRAINERS = ("prepare", "try_out", "train", "evaluate", "close")


class Tiny(Task):
    """Forty samples of four numbers."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 2)

    def pool(self, source: DataSource) -> Pool:
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        return Pool(x, (x.sum(1) > 0).long())


class Read(torch.utils.data.Dataset[Any]):
    """Samples that are read one by one; the second one ends the process."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return exits() if index == 1 else (self.data.x[index], self.data.y[index])


class Sampled(Tiny):
    def load(self, source: DataSource) -> Splits:
        return Splits(*map(Read, super().load(source)))


class Ending(TorchTrainer):
    """Ends the process as the file says that the environment names: by an exception or without one, or not at all."""

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        word = Path(os.environ["ENDING"]).read_text()
        if word == "die":
            os._exit(0)
        return exits() if word == "exit" else super().train(model, plan)


def exits(*_: object, **__: object) -> NoReturn:
    sys.exit(WHY)


def __getattr__(name: str) -> type:
    if name == "sample":
        return Sampled
    if name not in TASKS + TRAINERS:
        raise AttributeError(name)
    base: type = Tiny if name in TASKS else TorchTrainer
    return type(name, (base,), {"__init__" if name == "init" else name: exits, "__module__": __name__})
