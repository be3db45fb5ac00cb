"""Series of numbers over rounds or clients, in which NaN stands for an unknown number."""

import math
from collections.abc import Iterable, Mapping, Sequence

from federation.record.metric_definitions import OWN, SCORED
from federation.spec.task_metrics import RESERVED
from federation.v1.admin_pb2 import RoundSummary


def metric(summary: RoundSummary, name: str) -> float:
    """A number of a round."""
    return summary.metrics.get(name, math.nan)


def own_names(metrics: Iterable[str]) -> list[str]:
    """The values of a task's metrics that a round recorded, such as "auc" or "recall/3", each once."""
    names = {name.removeprefix(OWN).rpartition("/")[0] for name in metrics if name.startswith(OWN)}
    return sorted(names, key=lambda name: [(part.isdigit(), part.zfill(9)) for part in name.split("/")])


def own_values(evaluation: Mapping[str, float]) -> dict[str, float]:
    """The values of the task's own metrics, by name, from a member's evaluation with names such as "test/auc".

    They are of the first split of `SCORED` that the member evaluated.
    """
    split = next((split for split in SCORED if any(name.startswith(f"{split}/") for name in evaluation)), "")
    values = {}
    for name, value in evaluation.items():
        part, _, own = name.partition("/")
        if part == split and own.partition("/")[0] not in RESERVED:
            values[own] = value
    return values


def known(values: Iterable[float]) -> list[float]:
    """The finite numbers."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Iterable[float]) -> float:
    """The mean of the finite numbers; NaN where there is none."""
    finite = known(values)
    return math.fsum(finite) / len(finite) if finite else math.nan


def first(values: Iterable[float]) -> float:
    """The first finite number; NaN where there is none."""
    return next(iter(known(values)), math.nan)


def last(values: Sequence[float]) -> float:
    """The last finite number; NaN where there is none."""
    return first(reversed(values))
