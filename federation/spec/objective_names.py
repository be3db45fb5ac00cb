"""Objectives by name: the targets of the rows of an update, and the parameters of each objective.

A parameter called `heads.NAME....` belongs to the objective NAME alone; all others are the encoder, which all
objectives share. So the layout of a model shows the encoder, without its task.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.vectors import Layout

OBJECTIVE = r"[a-z0-9][a-z0-9-]{0,62}"  # the form of a name
JOINT = "loss"  # the row of an update that descends several objectives together
HEADS = "heads."

Targets = Mapping[str, Mapping[str, float]]
"""The targets of the rows of an update: row -> objective -> weight. A row descends the weighted sum of losses."""


def joint_target(objectives: Sequence[str], weights: Mapping[str, float] | None = None) -> Targets:
    """One row, for all of these objectives together: their weighted sum, or their mean without weights."""
    given = {name: 1.0 / len(objectives) for name in objectives} if weights is None else weights
    return {JOINT: {name: given[name] for name in objectives if name in given}}


def separate_targets(objectives: Sequence[str]) -> Targets:
    """A row for each of these objectives."""
    return {name: {name: 1.0} for name in objectives}


def encoder_columns(layout: "Layout") -> tuple[slice, ...]:
    """The columns of the encoder in the flat vector (d,), as few slices as possible, in order.

    A model that has only heads is its own encoder.
    """
    columns: list[slice] = []
    offset = 0
    for tensor in layout.tensors:
        end = offset + tensor.size
        if not tensor.name.startswith(HEADS):
            if columns and columns[-1].stop == offset:
                columns[-1] = slice(columns[-1].start, end)
            else:
                columns.append(slice(offset, end))
        offset = end
    return tuple(columns) or (slice(0, offset),)


def width(columns: Sequence[slice]) -> int:
    """The number of columns of these slices."""
    return sum(part.stop - part.start for part in columns)
