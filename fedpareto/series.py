"""Series of numbers over rounds or clients, in which NaN stands for a number that is not known."""

import math
from collections.abc import Iterable, Mapping, Sequence

from coordinator.rounds.runs.metric_definitions import OWN, SCORED
from federation.spec.task_metrics import RESERVED
from federation.v1.admin_pb2 import RoundSummary


def metric(summary: RoundSummary, name: str) -> float:
    """A number of a round."""
    return summary.metrics.get(name, math.nan)


def own_names(metrics: Mapping[str, float]) -> list[str]:
    """The values of a task's metrics that a round recorded, such as "auc" or "recall/3", each once."""
    found = {name.removeprefix(OWN).rpartition("/")[0] for name in metrics if name.startswith(OWN)}
    return sorted(found, key=lambda name: [(part.isdigit(), part.zfill(9)) for part in name.split("/")])


def own_values(evaluation: Mapping[str, float]) -> dict[str, float]:
    """What a member measured in the task's own metrics, by name, of an evaluation with names such as "test/auc".

    It is on the first of `SCORED` that the member evaluated.
    """
    split = next((one for one in SCORED if any(name.startswith(f"{one}/") for name in evaluation)), "")
    found = {}
    for name, value in evaluation.items():
        at, _, own = name.partition("/")
        if at == split and own.partition("/")[0] not in RESERVED:
            found[own] = value
    return found


def known(values: Iterable[float]) -> list[float]:
    """The finite numbers."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Iterable[float]) -> float:
    """The mean of the finite numbers; NaN where there is none."""
    found = known(values)
    return math.fsum(found) / len(found) if found else math.nan


def first(values: Iterable[float]) -> float:
    """The first finite number; NaN where there is none."""
    return next(iter(known(values)), math.nan)


def last(values: Sequence[float]) -> float:
    """The last finite number; NaN where there is none."""
    return first(reversed(values))
