"""The base of the tasks on published data sets."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from federation.tasks import DataError, DataSource, Task

if TYPE_CHECKING:
    import torch
    from torch import nn


class Published(Task):
    """A task on a published data set.

    Attributes:
        network: the function of `federation.tasks.networks` that makes the model; of several objectives, it takes them.
        files: the required content of the directory of `--data`.
        hint: more about them, for the message that there is no directory.
    """

    network: ClassVar[str]
    files: ClassVar[str]
    hint: ClassVar[str] = ""

    def model(self) -> "nn.Module":
        from federation.tasks import networks  # noqa: PLC0415

        network = getattr(networks, self.network)
        model: nn.Module = network() if len(self.objectives) == 1 else network(self.objectives)
        return model

    def directory(self, source: DataSource) -> Path:
        """The directory of `--data`. Raises DataError if there is none."""
        if source.directory is None:
            name = self.name or type(self).__name__
            raise DataError(f"{name} needs a directory: --data DIR, with {self.files} in it{self.hint}")
        return source.directory


class Classification(Published):
    """One class for each objective: y is (n, M), and the model returns {objective: logits (n, C)}."""

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        from torch.nn.functional import cross_entropy  # noqa: PLC0415

        return {name: cross_entropy(output[name], y[:, column].long()) for column, name in enumerate(self.objectives)}

    def correct(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        return {name: output[name].argmax(dim=1) == y[:, column] for column, name in enumerate(self.objectives)}


class Regression(Published):
    """One number for each objective: y is (n, M), and the model returns {objective: (n, 1)}."""

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        return {
            name: (output[name][:, 0] - y[:, column]).square().mean() for column, name in enumerate(self.objectives)
        }

    def correct(self, output: Any, y: "torch.Tensor") -> None:
        """None: no prediction of a number is right."""
