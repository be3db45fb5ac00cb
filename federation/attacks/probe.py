"""The success of a backdoor: the share of triggered samples that a model assigns to the target."""

import numpy as np
from numpy.typing import NDArray

from federation.attacks.base import Attack, AttackError
from federation.tasks import Dataset, Splits
from federation.training.trainer import Trainer


class Probe:
    """Measures the success rate of an attack that has a trigger.

    Args:
        attack: one with a trigger.
        trainer: its model is shared, so the trainer and the probe must not work at the same time.
        clean: clean test samples of all clients together.

    Raises:
        AttackError: the attack has no trigger, or every sample belongs to its target.
    """

    def __init__(self, attack: Attack, trainer: Trainer, clean: Dataset) -> None:
        triggered = attack.triggered(clean)
        if triggered is None:
            raise AttackError(f"{attack} has no trigger whose success could be measured")
        if len(triggered) == 0:
            raise AttackError(f"{attack}: none of {len(clean)} test samples is of another class than the target's")
        none = Dataset(clean.x[:0], clean.y[:0])
        self._trainer = trainer.on(Splits(none, none, triggered))

    def rate(self, base: NDArray[np.float32]) -> float:
        """The share of triggered samples of other classes that a model (d,) takes for the target's, 0 to 1."""
        return self._trainer.measure(base, ("test",))["test/accuracy"]
