"""Tasks with several numbers to predict."""

from typing import TYPE_CHECKING, Any

from federation.tasks import Task

if TYPE_CHECKING:
    import torch


class Regression(Task):
    """One target for each objective, in the order of the columns of y."""

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Mean squared error of each objective: outputs (n, 1) by objective, targets (n, M)."""
        return {
            name: (output[name][:, 0] - y[:, column]).square().mean() for column, name in enumerate(self.objectives)
        }

    def correct(self, output: Any, y: "torch.Tensor") -> None:
        """None: no prediction of a number is right."""
