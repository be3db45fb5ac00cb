"""The vector that a session sums: an update, a sketch of gradients, or the metrics of an evaluation.

A vector (n,) is divided by max(||v||, clip): with clip 0 it becomes a unit vector, else one of length at most 1. It is
blurred and masked in `sum`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from federation.secure.blocks import blocks, norm
from federation.spec.task_metrics import BUILT_IN, MetricKind
from federation.vectors import Array
from federation.work.base import WorkError
from federation.work.evaluate.work import Evaluate


def joined(rows: Sequence[Array]) -> NDArray[np.float32]:
    """The rows of a result one after the other, float32."""
    return np.concatenate([np.asarray(row, dtype=np.float32) for row in rows])


def divisor(vector: NDArray[np.float32], clip: float, *, sketched: bool) -> float:
    """The divisor of the vector: max(||v||, clip).

    Raises:
        WorkError: the vector is not finite; or it is 0, and must become a unit vector or have a sketch of length 1.
    """
    length = norm(blocks(vector))
    # Section 2d: raised before the vector is kept: one NaN would destroy the sum of all. READY then takes a stand-in.
    if not math.isfinite(length):
        raise WorkError("the vector is not finite", reason="non-finite")
    # Section 2: a zero cannot become a unit vector, and its sketch cannot be divided by its norm.
    if length == 0 and (clip == 0 or sketched):
        raise WorkError("every element of the vector is zero; it has no direction", reason="zero")
    # Section 2: so no vector is longer than 1. A longer one fails the checks of section 4, and outweighs the others.
    return max(length, clip)


def entries(evaluation: Evaluate, objectives: Sequence[str]) -> list[MetricKind]:
    """The metrics of an evaluation in the order of its vector: for each split the built-in ones, then the task's own.

    A task's own metric with several values is not summed.
    """
    suffixes = ("", *(f"/{name}" for name in objectives if len(objectives) > 1))
    built_in = sorted(BUILT_IN, key=lambda kind: kind.higher)  # loss, accuracy
    kinds = [replace(kind, name=kind.name + suffix) for suffix in suffixes for kind in built_in]
    return [
        replace(kind, name=f"{split}/{kind.name}")
        for split in evaluation.splits
        for kind in (*kinds, *evaluation.metrics)
    ]


def of_metrics(
    metrics: Mapping[str, float], evaluation: Evaluate, objectives: Sequence[str]
) -> tuple[NDArray[np.float32], bytes]:
    """An entry in [0, 1] for each metric, (n,), its value over the largest value; and a byte: 1 if it was computed.

    A non-finite value counts as the worst. So the set of computed metrics depends on this member's task and data, and
    not on the model, which a coordinator may choose. `metrics` has all that this member computes, with NaN where the
    computation failed.
    """
    values, measured = [], []
    for kind in entries(evaluation, objectives):
        value = metrics.get(kind.name)
        # Section 2b: whether it was computed depends on task and data. By its value, the byte would tell of the
        # coordinator's model.
        measured.append(value is not None)
        if value is None or not math.isfinite(value):
            value = 0.0 if kind.higher or value is None else kind.largest
        # Section 2b: clipped: a loss of a million would be read off the sum in spite of the noise.
        values.append(min(max(value, 0.0), kind.largest) / kind.largest)
    return np.array(values, np.float32), bytes(measured)


def metric_means(
    total: NDArray[np.float64], members: int, summed: bytes, evaluation: Evaluate, objectives: Sequence[str]
) -> dict[str, float]:
    """The mean of each metric that all members compute, from the sum of their vectors, (n,).

    Noise can move a mean out of the range of its metric; it is then put onto the end of the range.

    Args:
        total: the sum.
        members: the number of members in it.
        summed: a byte for each metric: 1 if all members compute it.
        evaluation: the work.
        objectives: of the task.
    """
    return {
        kind.name: min(max(float(value) / members, 0.0), 1.0) * kind.largest
        for kind, value, there in zip(entries(evaluation, objectives), total, summed, strict=True)
        if there
    }
