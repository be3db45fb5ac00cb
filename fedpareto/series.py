"""Series of numbers over rounds or clients, in which NaN stands for a number that is not known."""

import math
from collections.abc import Iterable, Sequence

from federation.v1.admin_pb2 import RoundSummary


def metric(summary: RoundSummary, name: str) -> float:
    """A number of a round."""
    return summary.metrics.get(name, math.nan)


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
