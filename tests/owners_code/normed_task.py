"""Digits with BatchNorm: a network that keeps buffers. Processes read the data where its owner asks for them."""

from typing import Any

import torch

from federation.tasks import Dataset, DataSource, Splits
from federation.tasks.digits import Digits


class Read(torch.utils.data.Dataset[Any]):
    """Samples that only a process which reads them can give, but for the first one, which is tried before."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index and torch.utils.data.get_worker_info() is None:
            raise RuntimeError("no process of its own reads this sample")
        return self.data.x[index].numpy(), int(self.data.y[index])


class Normed(Digits):
    """A layer of eight units and BatchNorm in front of the classifier."""

    def load(self, source: DataSource) -> Splits:
        found = super().load(source)
        return Splits(*map(Read, found)) if source.loading.workers else found

    def model(self) -> torch.nn.Module:
        made = torch.nn.Sequential()
        made.add_module("body", torch.nn.Linear(64, 8))
        made.add_module("norm", torch.nn.BatchNorm1d(8))
        made.add_module("rectifier", torch.nn.ReLU())
        made.add_module("out", torch.nn.Linear(8, 10))
        return made
