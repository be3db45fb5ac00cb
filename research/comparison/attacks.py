"""The attack that the product has for classification alone, for every task of the comparison."""

import dataclasses
from dataclasses import dataclass

from federation.attacks.base import Attack
from federation.tasks import Splits, Task

_CLASSES = 10


@dataclass(frozen=True)
class FlippedTargets(Attack):
    """Trains on wrong targets: of classes C - 1 - y, as `label-flip` does; of the standardised river -y."""

    name = "flipped-targets"

    def poison(self, splits: Splits, task: Task, *, seed: int) -> Splits:
        """The same samples with wrong targets for training."""
        y = splits.train.y
        flipped = -y if y.is_floating_point() else _CLASSES - 1 - y
        return dataclasses.replace(splits, train=dataclasses.replace(splits.train, y=flipped))
