"""The numbers that a process counts in memory, for `/metrics`.

Counting costs about a microsecond and takes no lock but the tally's own, which nobody holds for long. So a process
always counts, whether anybody asks or not.
"""

import threading
import time
from collections.abc import Iterator, Mapping
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

    The name of a counter has no `_total`, which the page adds. Labels may come from others: there are at most `most`
    sets of them, and `OTHER` counts what comes with further ones.
    """

    name: str
    meaning: str
    kind: MonitoredKind
    labels: Labels = ()
    bounds: tuple[float, ...] = ()
    most: int = MOST_SETS


@dataclass(frozen=True)
class Durations:
    """Durations that were counted: how many were at most each bound and beyond all, and their sum in seconds."""

    counts: tuple[int, ...]
    total: float


Values = Mapping[Labels, float] | Mapping[Labels, Durations]
Reading = tuple[MonitoredNumber, Values]
"""A metric and its values, by labels."""


def single(metric: MonitoredNumber, value: float) -> Reading:
    """The reading of a metric without labels."""
    values: dict[Labels, float] = {(): value}
    return metric, values


def by_label(metric: MonitoredNumber, values: Mapping[str, float]) -> Reading:
    """The reading of a metric with one label."""
    by_labels: dict[Labels, float] = {(label,): value for label, value in values.items()}
    return metric, by_labels


class Tally:
    """Counters and durations since the start of the process, and how many blocks of each kind run now.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[MonitoredNumber, dict[Labels, float]] = {}
        self._durations: dict[MonitoredNumber, dict[Labels, tuple[list[int], list[float]]]] = {}

    def add(self, metric: MonitoredNumber, *labels: str, amount: float = 1) -> None:
        """Counts."""
        with self._lock:
            counts = self._counts.setdefault(metric, {})
            labels = _within(metric, counts, labels)
            counts[labels] = counts.get(labels, 0) + amount

    def begin(self, metric: MonitoredNumber, *sets: Labels) -> None:
        """Shows these sets of labels from now on, a count as 0 until something is counted.

        A rate of Prometheus leaves out what a series has when it is first seen.
        """
        with self._lock:
            counts = self._counts.setdefault(metric, {})
            for labels in sets:
                counts.setdefault(labels, 0)

    def put(self, metric: MonitoredNumber, value: float, *labels: str) -> None:
        """Sets a gauge."""
        with self._lock:
            self._counts.setdefault(metric, {})[labels] = value

    def note(self, metric: MonitoredNumber, *labels: str, seconds: float) -> None:
        """Counts a duration."""
        with self._lock:
            durations = self._durations.setdefault(metric, {})
            labels = _within(metric, durations, labels)
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

    @contextmanager
    def during(self, metric: MonitoredNumber, *labels: str) -> Iterator[None]:
        """Counts the block, in a gauge, while it runs."""
        self.add(metric, *labels)
        try:
            yield
        finally:
            self.add(metric, *labels, amount=-1)

    def readings(self) -> list[Reading]:
        """All metrics with their values, in the order in which they first came."""
        with self._lock:
            found: list[Reading] = [(metric, dict(counts)) for metric, counts in self._counts.items()]
            for metric, durations in self._durations.items():
                copied = {labels: Durations(tuple(counts), total[0]) for labels, (counts, total) in durations.items()}
                found.append((metric, copied))
        return found


def _within(metric: MonitoredNumber, known: Mapping[Labels, object], labels: Labels) -> Labels:
    return labels if labels in known or len(known) < metric.most else (OTHER,) * len(labels)
