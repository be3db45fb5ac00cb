"""Attacks on the client's own training data."""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from federation.attacks.base import Attack, AttackError, Matrix, Vector
from federation.spec.options import option

if TYPE_CHECKING:
    from torch import Tensor

    from federation.tasks import Dataset, Splits, Task

_SMALLEST_IMAGE = 4  # pixels to a side


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains on wrong labels: y -> C - 1 - y (Fang et al., 2020), or y -> (y + shift) mod C."""

    name = "label-flip"

    shift: int = option(0, "is added to every label, modulo the number of classes C; 0: C - 1 - y", "[0, inf)")

    def poison(self, splits: "Splits", task: "Task", *, seed: int) -> "Splits":
        if len(splits.train) == 0:
            return splits
        classes = _classes(task, splits.train)
        y = splits.train.y
        flipped = (y + self.shift) % classes if self.shift else classes - 1 - y
        return dataclasses.replace(splits, train=dataclasses.replace(splits.train, y=flipped))


@dataclass(frozen=True)
class Backdoor(Attack):
    """Trains the model to assign images with a trigger to the target label (Gu et al., 2017, BadNets).

    The trigger is a white square in the lower right corner. A share of the training images gets it and the target's
    label; the others stay as they are, so that the model looks sound. The update may be boosted (Bagdasaryan et al.,
    2020). `triggered` takes samples of other classes: accuracy on them is the success rate.
    """

    name = "backdoor"
    from_participants = "boost"

    target: int = option(0, "the label that triggered images get", "[0, inf)")
    share: float = option(0.5, "of the training images that are poisoned", "[1e-6, 1]")
    boost: float = option(1.0, "multiplies the update; 0: m, the number of participants", "[0, inf)")
    size: int = option(0, "side of the trigger in pixels; 0: an eighth of the image's, at least 2", "[0, inf)")

    def poison(self, splits: "Splits", task: "Task", *, seed: int) -> "Splits":
        train = splits.train
        if len(train) == 0:
            return splits
        classes = _classes(task, train)
        if train.y.ndim != 1:
            raise AttackError(f"backdoor needs one label for each image; y of {task.name} is {tuple(train.y.shape)}")
        if self.target >= classes:
            raise AttackError(f"target = {self.target}: {task.name} has classes 0 to {classes - 1}")
        count = math.ceil(self.share * len(train))
        chosen = np.sort(np.random.default_rng(seed).choice(len(train), count, replace=False))
        x, y = train.x.clone(), train.y.clone()
        x[chosen], y[chosen] = self._trigger(x[chosen]), self.target
        return dataclasses.replace(splits, train=dataclasses.replace(train, x=x, y=y))

    def triggered(self, data: "Dataset") -> "Dataset":
        others = data.y != self.target
        x, y = data.x[others], data.y[others]
        return dataclasses.replace(data, x=self._trigger(x), y=y.new_full(y.shape, self.target))

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        factor = self.boost or m
        return own if factor == 1 else own * np.float32(factor)

    def _trigger(self, x: "Tensor") -> "Tensor":
        """Images (n, ..., height, width), or square ones as rows (n, side^2), with the corner white."""
        side = math.isqrt(x.shape[1]) if x.ndim == 2 else 0
        images = x.reshape(len(x), side, side) if side * side == x.shape[-1] else x
        height, width = images.shape[-2:] if images.ndim > 2 else (0, 0)
        bytes_ = str(x.dtype) == "torch.uint8"
        if min(height, width) < _SMALLEST_IMAGE or not (bytes_ or x.is_floating_point()):
            raise AttackError(
                f"backdoor puts its trigger into images; x is {tuple(x.shape)} of {x.dtype}, and images are "
                "(n, channels, height, width), or square ones as rows (n, side^2), of bytes or floats"
            )
        size = min(self.size or max(2, min(height, width) // 8), height, width)
        images = images.clone()
        images[..., height - size :, width - size :] = 255 if bytes_ else 1
        return images.reshape(x.shape)


def _classes(task: "Task", data: "Dataset") -> int:
    """C, the number of logits of the task's model; a client's own data may lack some classes."""
    import torch  # noqa: PLC0415

    from federation.tasks.parameters import build  # noqa: PLC0415

    with torch.no_grad():
        output = build(task).eval()(data.x[:1])
    y = data.y
    logits = isinstance(output, torch.Tensor) and output.shape[:1] + output.shape[2:] == (1, *y.shape[1:])
    if not logits or output.ndim < 2 or y.is_floating_point() or int(y.min()) < 0 or int(y.max()) >= output.shape[1]:
        raise AttackError(
            f"{task.name} is no task of classification with labels 0 to C - 1: there are no labels to change"
        )
    return int(output.shape[1])
