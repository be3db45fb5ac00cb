"""Tasks of Flower apps in `flower_clients.py`, which the worker knows without Flower."""

import torch
from torch import nn

from fedpareto import DataSource
from fedpareto.adapters.flower import FlowerTask


class Twins(nn.Module):
    """Two layers of one shape, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)


class Client(FlowerTask):
    """A NumPyClient, whose function is named."""

    app = "tests.owners_code.flower_clients:client_fn"
    scores = {"loss": "loss", "accuracy": "accuracy"}  # noqa: RUF012
    run_config = {"batch-size": 7, "greeting": "hello"}  # noqa: RUF012

    def model(self) -> torch.nn.Module:
        return Twins()

    def samples(self, source: DataSource) -> dict[str, int]:
        return {"train": 12, "validation": 5}


class Disordered(Client):
    app = "tests.owners_code.flower_clients:disordered"


class Short(Client):
    app = "tests.owners_code.flower_clients:short"


class Unknown(Client):
    app = "tests.owners_code.flower_clients:nothing"


class Miscounted(Client):
    def samples(self, source: DataSource) -> dict[str, int]:
        return {"train": 12, "val": 5}
