"""Server optimisers: what makes the server's step from a direction, and what it remembers from round to round."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from coordinator.aggregation.rules import Vector


@dataclass(frozen=True, kw_only=True)
class Optimiser(ABC):
    """Works element by element, on float64 blocks of the direction and of its state vectors (d,), float32 on disk.

    The direction is gradient-like: the new model is w - rate * step.

    Attributes:
        slots: the names of the state vectors.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def initial(self, slot: str) -> float:
        """What every element of a state vector is before the first step."""
        return 0.0

    @abstractmethod
    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        """The step for a block of the direction.

        Args:
            direction: a block of it.
            slots: the same block of each state vector.

        Returns:
            The step, and the state vectors after it; the arguments are not changed.
        """
