"""A small task, a body and a head, whose parameters can be personal or frozen."""

from typing import Any

import torch

from federation.spec.computation import Descend
from federation.spec.objective_names import joint_target
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Splits, Task
from federation.training.trainer import Trainer

SGD = LocalSgd(steps=3, batch_size=4, learning_rate=0.1, momentum=0.5, weight_decay=0.1, proximal_mu=0.1)
GIVEN: dict[str, Any] = {"seed": 0, "round": 0, "client_id": "a"}


class Small(Task):
    """A body and a head, in one of which nothing may be trained."""

    def __init__(self, fixed: str = "") -> None:
        self.name, self._fixed = "small", fixed

    def model(self) -> torch.nn.Module:
        made = torch.nn.Sequential()
        made.add_module("body", torch.nn.Linear(3, 2))
        made.add_module("head", torch.nn.Linear(2, 2))
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(not (self._fixed and name.startswith(self._fixed)))
        return made

    def load(self, source: DataSource) -> Splits:
        torch.manual_seed(1)
        data = Dataset(torch.randn(12, 3), torch.arange(12) % 2)
        return Splits(data, data, data)


def descend(trained: Trainer) -> Descend:
    return Descend(sgd=SGD, targets=joint_target(trained.objectives))
