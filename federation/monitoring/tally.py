"""The numbers that a process counts in memory, for `/metrics`.

Counting costs about a microsecond and takes no lock but the tally's own, which nobody holds for long. So a process
always counts, whether anybody asks or not.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

MOST_SETS = 5000  # of labels, of one metric
OTHER = "other"  # the labels of all further sets

Labels = tuple[str, ...]


class MonitoredKind(StrEnum):
    """The kinds of metrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    DURATION = "duration"  # a histogram of seconds


@dataclass(frozen=True, eq=False)
class MonitoredNumber:
    """A metric: its name, its meaning in a sentence, its labels, and for durations the bounds of buckets in seconds.

    The name of a counter has no `_total`, which the page adds.
    """

    name: str
    meaning: str
    kind: MonitoredKind
    labels: Labels = ()
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Durations:
    """Durations that were counted: how many were at most each bound and beyond all, and their sum in seconds."""

    counts: tuple[int, ...]
    total: float


Values = Mapping[Labels, float] | Mapping[Labels, Durations]
Reading = tuple[MonitoredNumber, Values]
"""A metric and its values, by labels."""


class Tally:
    """Counters and durations since the start of the process, and gauges that are read when somebody asks.

    Any thread may call. Labels may come from others, so a metric has at most `MOST_SETS` sets of labels.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[MonitoredNumber, dict[Labels, float]] = {}
        self._durations: dict[MonitoredNumber, dict[Labels, tuple[list[int], list[float]]]] = {}
        self._gauges: dict[MonitoredNumber, Callable[[], Mapping[Labels, float]]] = {}

    def add(self, metric: MonitoredNumber, *labels: str, amount: float = 1) -> None:
        """Counts."""
        with self._lock:
            counts = self._counts.setdefault(metric, {})
            labels = _within(counts, labels)
            counts[labels] = counts.get(labels, 0) + amount

    def note(self, metric: MonitoredNumber, *labels: str, seconds: float) -> None:
        """Counts a duration."""
        with self._lock:
            durations = self._durations.setdefault(metric, {})
            labels = _within(durations, labels)
            counts, total = durations.setdefault(labels, ([0] * (len(metric.bounds) + 1), [0.0]))
            counts[next((n for n, bound in enumerate(metric.bounds) if seconds <= bound), len(metric.bounds))] += 1
            total[0] += seconds

    @contextmanager
    def timing(self, metric: MonitoredNumber, *labels: str) -> Iterator[None]:
        """Counts the duration of the block, also if it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.note(metric, *labels, seconds=time.perf_counter() - began)

    def watch(self, metric: MonitoredNumber, values: Callable[[], Mapping[Labels, float]]) -> None:
        """Has a gauge read by `values`, which may neither wait nor take a lock."""
        with self._lock:
            self._gauges[metric] = values

    def readings(self) -> list[Reading]:
        """All metrics with their values, in the order in which they first came."""
        with self._lock:
            found: list[Reading] = [(metric, dict(counts)) for metric, counts in self._counts.items()]
            for metric, durations in self._durations.items():
                copied = {labels: Durations(tuple(counts), total[0]) for labels, (counts, total) in durations.items()}
                found.append((metric, copied))
            gauges = dict(self._gauges)
        return found + [(metric, values()) for metric, values in gauges.items()]


def _within(known: Mapping[Labels, object], labels: Labels) -> Labels:
    return labels if labels in known or len(known) < MOST_SETS else (OTHER,) * len(labels)
