"""Digits with operations that have no deterministic kernel: PyTorch's max unpooling, and one of the owner's own.

They stand in for what lacks one on GPUs, such as the cross-entropy of a segmentation.
"""

from typing import Any

import torch
from torch import nn
from torch._prims_common import alert_not_deterministic

from federation.tasks.digits import Digits


class Unpooled(Digits):
    """The network has max unpooling, which every forward pass meets."""

    def model(self) -> nn.Module:
        return Unpooling()


class Unpooling(nn.Module):
    """Pools an image of 8 x 8 pixels, and puts the pixels back to their places."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.back = nn.MaxUnpool2d(2)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        pixels, places = self.pool(x.view(-1, 1, 8, 8))
        return self.out(self.back(pixels, places).flatten(1))


class Undetermined(torch.autograd.Function):
    """The identity, whose backward pass is an operation that is registered as not deterministic."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept for the backward pass."""

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        alert_not_deterministic("undetermined_backward")
        return gradient


class Undecided(Digits):
    """Digits: every backward pass meets such an operation, which changes no number."""

    def losses(self, output: Any, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().losses(Undetermined.apply(output), y)


class Rounded(Digits):
    """Digits that meet such an operation in mixed precision alone, which no start check tries."""

    def losses(self, output: Any, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().losses(Undetermined.apply(output) if torch.is_autocast_enabled("cpu") else output, y)
