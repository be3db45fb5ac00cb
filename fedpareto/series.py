"""Series of numbers over rounds or clients, in which NaN stands for an unknown number."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from federation.record.metric_definitions import OWN, SCORED
from federation.spec.task_metrics import RESERVED
from federation.v1.admin_pb2 import RoundSummary

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Equals(Generic[T, S]):
    """Neighbours in a list of rounds of which the same is said; `first` and `last` are the least and largest round."""

    items: Sequence[T]
    said: S
    first: int
    last: int

    @property
    def rounds(self) -> str:
        """The rounds in words: "round 3", "rounds 0 to 39 (40 rounds)", or with gaps "40 of the rounds 0 to 79"."""
        count, span = len(self.items), f"{self.first} to {self.last}"
        if count == 1:
            return f"round {self.first}"
        whole = count == self.last - self.first + 1
        return f"rounds {span} ({count} rounds)" if whole else f"{count} of the rounds {span}"


def equals(items: Iterable[T], number: Callable[[T], int], said: Callable[[T], S]) -> list[Equals[T, S]]:
    """Puts neighbours together for which `said` is equal, in order; `number` is the round of an item."""
    groups = [(what, list(group)) for what, group in groupby(items, key=said)]
    return [Equals(group, what, min(map(number, group)), max(map(number, group))) for what, group in groups]


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
