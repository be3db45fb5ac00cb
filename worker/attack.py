"""Rehearsing an attack in one's own federation: what the defence does is seen before somebody else tries it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class AttackError(ValueError):
    """A description of an attack that says nothing."""


@dataclass(frozen=True)
class Attack:
    """A dishonest member: the scaling attack on updates and the bias attack on reported losses.

    Attributes:
        scale: multiplies the update.
        bias: is added to every reported loss of the base model.
    """

    scale: float = 1.0
    bias: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Attack":
        """Reads "scale=100,bias=1000"; either may be left out.

        Raises:
            AttackError: not of that form.
        """
        values: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(scale|bias)\s*=\s*(\S+)\s*", part)
            try:
                value = float(match[2]) if match else math.nan
            except ValueError:
                value = math.nan
            if match is None or not math.isfinite(value) or match[1] in values:
                raise AttackError(f"{part.strip()!r} describes no attack: write scale=100,bias=1000, or one of the two")
            values[match[1]] = value
        return cls(**values)

    def on_update(self, update: NDArray[np.float32]) -> NDArray[np.float32]:
        """The update that is sent in place of `update` (d,)."""
        return update if self.scale == 1.0 else update * np.float32(self.scale)

    def on_losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        """The losses that are reported in place of `losses`."""
        return {objective: loss + self.bias for objective, loss in losses.items()}
