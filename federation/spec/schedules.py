"""Schedules of a learning rate over the rounds of a run, or over the steps of one training."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Shape = Literal["constant", "decay", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A warm-up, and then one of three shapes.

    Attributes:
        shape: "constant"; "decay", times `decay` every `decay_every` rounds or steps; or "cosine", from 1 towards 0 at
            the end.
        warm_up: rounds or steps before that in which the rate rises linearly.
        decay: above 0, at most 1.
        decay_every: at least 1.

    Raises:
        ValueError: no such shape, or a number out of range.
    """

    shape: str = "constant"
    warm_up: int = 0
    decay: float = 0.1
    decay_every: int = 1

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise ValueError(f"no schedule {self.shape!r}: there are {', '.join(get_args(Shape))}")
        if self.warm_up < 0 or self.decay_every < 1 or not 0 < self.decay <= 1:
            raise ValueError(
                f"a schedule with warm_up = {self.warm_up}, decay = {self.decay:g}, decay_every = {self.decay_every}: "
                "a number is out of range"
            )

    @property
    def flat(self) -> bool:
        """True if the rate never changes."""
        return self.shape == "constant" and self.warm_up == 0

    def factor(self, place: int, total: int) -> float:
        """The factor of the rate at a round or step, from 0, of `total`; above 0 and at most 1."""
        if place < self.warm_up:
            return (place + 1) / (self.warm_up + 1)
        after = place - self.warm_up
        match self.shape:
            case "decay":
                return self.decay ** (after // self.decay_every)
            case "cosine":
                return (1 + math.cos(math.pi * after / max(1, total - self.warm_up))) / 2
            case _:
                return 1.0
