"""A task and a trainer that fail where the environment says, with a text that must not leave the site."""

import builtins
import os
from typing import Any

import torch

from federation.spec.task_metrics import Metric
from federation.tasks import DataError, DataSource, Splits
from federation.training.torch_trainer import TorchTrainer
from federation.work.base import WorkError
from tests.owners_code.ending import Tiny

SECRET = "/data/scans/Erika-Mustermann-0017.dcm"


def perhaps(place: str) -> None:
    """Raises the exception of the environment, if this is its place: "losses ValueError"."""
    where, _, kind = os.environ.get("CANARY", "").partition(" ")
    if where != place:
        return
    error: Any = {"DataError": DataError, "WorkError": WorkError}.get(kind) or getattr(builtins, kind)
    if error is WorkError:
        raise WorkError(f"cannot read {SECRET}", reason=SECRET, wire=SECRET)
    raise error(f"cannot read {SECRET}")


class Canary(Tiny):
    def load(self, source: DataSource) -> Splits:
        return Splits(*map(Read, super().load(source)))

    def augment(self, x: Any) -> Any:
        perhaps("augment")
        return super().augment(x)

    def losses(self, output: Any, y: Any) -> Any:
        perhaps("losses")
        return super().losses(output, y)

    def correct(self, output: Any, y: Any) -> Any:
        perhaps("correct")
        return super().correct(output, y)

    def metrics(self) -> dict[str, Metric]:
        return {"scans": Metric(Scans())}


class Scans:
    """A metric of the task: the number of samples."""

    def reset(self) -> None:
        perhaps("reset")
        self.count = 0

    def update(self, output: Any, y: Any) -> None:
        perhaps("update")
        self.count += len(y)

    def compute(self) -> Any:
        perhaps("compute")
        return {SECRET: 1.0} if os.environ.get("CANARY") == "values" else float(self.count)


class Read(torch.utils.data.Dataset[Any]):
    """Samples that are read one by one."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        perhaps("sample")
        return self.data.x[index], self.data.y[index]


class Trains(TorchTrainer):
    def train(self, *given: Any) -> Any:
        perhaps("train")
        if os.environ.get("CANARY") == "returns":
            return {SECRET: 1.0}
        return super().train(*given)

    def evaluate(self, *given: Any) -> Any:
        perhaps("evaluate")
        return {(SECRET,): 1.0} if os.environ.get("CANARY") == "scores" else super().evaluate(*given)

    def gradients(self, *given: Any) -> Any:
        perhaps("gradients")
        return super().gradients(*given)

    @property
    def buffers(self) -> Any:
        perhaps("buffers")
        return super().buffers

    @property
    def layout(self) -> Any:
        perhaps("layout")
        return super().layout

    @property
    def samples(self) -> int:
        perhaps("samples")
        return super().samples
