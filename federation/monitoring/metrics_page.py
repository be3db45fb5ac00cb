"""The page of `/metrics`: readings in the text format of Prometheus."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from federation.monitoring.tally import Durations, MonitoredKind, Reading


def page(readings: Iterable[Reading], *, process: bool = False) -> bytes:
    """The page with these readings; with `process` also processor time, memory and descriptors of this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest  # noqa: PLC0415 - an extra

    registry = CollectorRegistry()
    registry.register(_Collector(list(readings)))
    if process:
        ProcessCollector(registry=registry)
    return bytes(generate_latest(registry))


def content_type() -> str:
    """The type of the page."""
    from prometheus_client import CONTENT_TYPE_LATEST  # noqa: PLC0415 - an extra

    return str(CONTENT_TYPE_LATEST)


class _Collector:
    """Gives the library readings in its own form."""

    def __init__(self, readings: list[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Any]:
        """The families of metrics."""
        from prometheus_client import core  # noqa: PLC0415 - an extra

        families = {MonitoredKind.GAUGE: core.GaugeMetricFamily, MonitoredKind.COUNTER: core.CounterMetricFamily}
        for metric, values in self._readings:
            if metric.kind is MonitoredKind.DURATION:
                family = core.HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
                for labels, durations in values.items():
                    if isinstance(durations, Durations):
                        family.add_metric(labels, _buckets(metric.bounds, durations), durations.total)
            else:
                family = families[metric.kind](metric.name, metric.meaning, labels=metric.labels)
                for labels, value in values.items():
                    family.add_metric(labels, value)
            yield family


def _buckets(bounds: tuple[float, ...], durations: Durations) -> list[tuple[str, int]]:
    """The number of durations that were at most each bound, as text, and of all."""
    return list(zip([*map(str, bounds), "+Inf"], accumulate(durations.counts), strict=True))


def series(readings: Iterable[Reading]) -> Mapping[str, int]:
    """The number of series of each metric, by its name."""
    return {
        metric.name: len(values) * (len(metric.bounds) + 3 if metric.kind is MonitoredKind.DURATION else 1)
        for metric, values in readings
    }
