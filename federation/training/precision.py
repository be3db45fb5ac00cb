"""Mixed precision of one training: torch.autocast, and for fp16 a scaled loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from federation.work.base import WorkError

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_suits(name: str, device: torch.device) -> None:
    """Raises WorkError if this device cannot train in this precision."""
    if name == "fp16" and device.type != "cuda":
        raise WorkError(
            f'train.precision = "fp16" needs a CUDA device, and this trainer uses {device.type}: use "bf16" or '
            '"float32"',
            reason="precision",
        )


class _Step(torch.optim.Optimizer):
    """The part of an optimiser that a GradScaler needs: the gradients and the step."""

    def __init__(self, gradient: Tensor, step: Callable[[], None]) -> None:
        holder = gradient.detach()
        holder.grad = gradient
        super().__init__([holder], {})
        self._make = step

    def step(self, closure: Any = None) -> Any:
        self._make()


class Precision:
    """The precision of one training. Parameters, gradients and steps are float32 in every case.

    Args:
        name: "float32", "bf16" or "fp16".
        device: of the model.
        gradient: where the backward passes add up the gradient.
        step: makes a step along it. With "fp16" it is left out where the scaled gradient is not finite.

    Raises:
        WorkError: the device cannot train in it.
    """

    def __init__(self, name: str, device: torch.device, gradient: Tensor, step: Callable[[], None]) -> None:
        check_suits(name, device)
        self._kind, self._type = device.type, _TYPES.get(name)
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._optimizer = _Step(gradient, step) if name == "fp16" else None
        self._step = step

    def forward(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        return nullcontext() if self._type is None else torch.autocast(self._kind, self._type)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """The step along the gradients that were added up."""
        if self._scaler is None or self._optimizer is None:
            self._step()
            return
        self._scaler.unscale_(self._optimizer)
        self._scaler.step(self._optimizer)
        self._scaler.update()
