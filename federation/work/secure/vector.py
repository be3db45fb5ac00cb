"""The vector that a session sums: an update, a sketch of gradients, or the metrics of an evaluation.

A vector (n,) is divided by max(||v||, clip): with clip 0 it becomes a unit vector, else one of length at most 1.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from federation.secure.blocks import blocks, norm
from federation.vectors import Array
from federation.work.base import WorkError
from federation.work.evaluate.work import Evaluate

LARGEST_LOSS = 10.0
"""Losses of an evaluation are clipped to [0, LARGEST_LOSS]."""
_KINDS = (("loss", LARGEST_LOSS), ("accuracy", 1.0))


def joined(rows: Sequence[Array]) -> NDArray[np.float32]:
    """The rows of a result one after the other, float32."""
    return np.concatenate([np.asarray(row, dtype=np.float32) for row in rows])


def divisor(vector: NDArray[np.float32], clip: float) -> float:
    """What the vector is divided by.

    Raises:
        WorkError: the vector is not finite, or it is 0 and must become a unit vector.
    """
    length = norm(blocks(vector))
    if not math.isfinite(length):
        raise WorkError("the vector is not finite", reason="non-finite")
    if length == 0 and clip == 0:
        raise WorkError("every element of the vector is zero; it has no direction", reason="zero")
    return max(length, clip)


def metric_names(evaluation: Evaluate, objectives: Sequence[str]) -> list[tuple[str, float]]:
    """The metrics of an evaluation in the order of its vector, each with its largest value.

    Of a task's own metric with several values none is summed.
    """
    suffixes = ("", *(f"/{name}" for name in objectives if len(objectives) > 1))
    names = [(kind + suffix, largest) for suffix in suffixes for kind, largest in _KINDS]
    names += [(own.name, own.largest) for own in evaluation.metrics]
    return [(f"{split}/{name}", largest) for split in evaluation.splits for name, largest in names]


def of_metrics(metrics: Mapping[str, float], evaluation: Evaluate, objectives: Sequence[str]) -> NDArray[np.float32]:
    """Two entries in [0, 1] for each metric, (2 n,): 1 where it is reported, and its value over the largest value."""
    entries = []
    for name, largest in metric_names(evaluation, objectives):
        value = metrics.get(name, math.nan)
        there = math.isfinite(value)
        entries += [float(there), min(max(value, 0.0), largest) / largest if there else 0.0]
    return np.array(entries, np.float32)


def metric_means(
    total: NDArray[np.float64], evaluation: Evaluate, objectives: Sequence[str], fewest: int
) -> dict[str, float]:
    """The mean of each metric over the clients that report it, from the sum of vectors, (2 n,).

    A metric that fewer than `fewest` clients report is left out.
    """
    pairs = total.reshape(-1, 2)
    return {
        name: float(value / there) * largest
        for (name, largest), (there, value) in zip(metric_names(evaluation, objectives), pairs, strict=True)
        if there > fewest - 0.5
    }
