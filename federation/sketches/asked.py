"""The sketch that a phase or an assignment asks for: both name it the same way."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from federation.objectives import encoder_columns, width
from federation.sketches import Sketch, SketchError, TwoWaySvd, sketch
from federation.vectors import Layout, Vector


class Asked(Protocol):
    """What says which sketch."""

    @property
    def sketch(self) -> str:
        """Its name."""

    @property
    def budget(self) -> float:
        """The floats that it may take, as a share of the columns that count."""

    @property
    def encoder_only(self) -> bool:
        """Whether only those of the encoder count."""


def columns(asked: Asked, layout: Layout) -> tuple[slice, ...]:
    """The columns that count."""
    return encoder_columns(layout) if asked.encoder_only else (slice(0, layout.size),)


def sketch_of(asked: Asked, layout: Layout, objectives: tuple[str, ...]) -> Sketch:
    """The sketch.

    Args:
        asked: which.
        layout: of the model.
        objectives: all of the task's.

    Raises:
        SketchError: there is no such sketch, or not with this budget.
    """
    return sketch(asked.sketch, d=width(columns(asked, layout)), objectives=objectives, budget=asked.budget)


def jacobian_of(rows: Mapping[str, Vector], asked: Asked, layout: Layout) -> NDArray[np.float32]:
    """The gradients (d,) of some objectives as one matrix of the columns that count, (M_i, d_e)."""
    parts = columns(asked, layout)
    return np.stack([np.concatenate([row[part] for part in parts]) for row in rows.values()])


def second_leg(made: Sketch) -> TwoWaySvd:
    """The sketch, if it is one with a second leg.

    Raises:
        SketchError: it has none.
    """
    if not isinstance(made, TwoWaySvd):
        raise SketchError(f"{made.name} has no second leg; {TwoWaySvd.name} has")
    return made
