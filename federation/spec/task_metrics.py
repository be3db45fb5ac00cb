"""A task's own metrics, beside loss and accuracy: AUC, Dice, RMSE, recall of each class."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

NAME = r"[a-z][a-z0-9-]{0,31}"  # of a metric
RESERVED = frozenset({"loss", "accuracy", "samples", "objective"})
MOST_METRICS = 16  # of a task
MOST_VALUES = 64  # of one metric, such as one for each class


class Accumulator(Protocol):
    """Computes a metric from batches. The metrics of torchmetrics have this form."""

    def reset(self) -> Any:
        """Forgets all batches."""

    def update(self, output: Any, y: Any) -> Any:
        """Adds a batch: the output of the model, and the targets (n, ...), on the CPU."""

    def compute(self) -> Any:
        """The value: a number, a vector with a value for each class, or a mapping from names to numbers."""


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric of a task.

    Attributes:
        measure: computes it. Non-finite values are left out, such as that of a class without samples.
        better: "higher" if higher values are better, else "lower".
        largest: in private evaluations, where only a mean is opened, values are clipped to [0, largest].
    """

    measure: Accumulator
    better: Literal["higher", "lower"] = "higher"
    largest: float = 1.0


@dataclass(frozen=True)
class MetricKind:
    """The description of a task's metric for the coordinator; the fields are those of `Metric`."""

    name: str
    better: str = "higher"
    largest: float = 1.0

    @property
    def higher(self) -> bool:
        """True if higher values are better."""
        return self.better == "higher"

    def problem(self) -> str:
        """The reason why it cannot be used; empty if it can."""
        if re.fullmatch(NAME, self.name) is None or self.name in RESERVED:
            return (
                f"{self.name[:40]!r} cannot be the name of a metric: lower-case letters, digits and hyphens, a letter "
                f"first, at most 32, and not {', '.join(sorted(RESERVED))}"
            )
        if self.better not in ("higher", "lower"):
            return f'metric {self.name}: better is "higher" or "lower", not {self.better[:40]!r}'
        if not 0 < self.largest < float("inf"):
            return f"metric {self.name}: largest = {self.largest:g}: a positive number is needed"
        return ""


BUILT_IN = (MetricKind("accuracy"), MetricKind("loss", better="lower", largest=10.0))


def kinds(metrics: Mapping[str, Metric]) -> tuple[MetricKind, ...]:
    """The kinds of a task's metrics, in its order.

    Raises:
        ValueError: there are too many, or one cannot be used.
    """
    described = tuple(MetricKind(name, metric.better, float(metric.largest)) for name, metric in metrics.items())
    check_metrics(described)
    return described


def check_metrics(described: Iterable[MetricKind]) -> None:
    """Raises ValueError if there are too many metrics, two of one name, or one that cannot be used."""
    metrics = tuple(described)
    if len(metrics) > MOST_METRICS:
        raise ValueError(f"{len(metrics)} metrics; a task has at most {MOST_METRICS}")
    if len({kind.name for kind in metrics}) < len(metrics):
        raise ValueError("each metric needs a name of its own")
    for kind in metrics:
        if problem := kind.problem():
            raise ValueError(problem)


def values(name: str, computed: Any) -> dict[str, float]:
    """The numbers of a metric by their names: `name`, or `name/KEY` for each class or key.

    Raises:
        ValueError: a value is not a number, there are too many values, or a key cannot be used.
    """
    if isinstance(computed, Mapping):
        numbers = {f"{name}/{key}": _number(name, value) for key, value in computed.items()}
    else:
        listed = computed.tolist() if hasattr(computed, "tolist") else computed
        if isinstance(listed, list | tuple):
            numbers = {f"{name}/{key}": _number(name, value) for key, value in enumerate(listed)}
        else:
            numbers = {name: _number(name, listed)}
    if len(numbers) > MOST_VALUES:
        raise ValueError(f"metric {name} has {len(numbers)} values; at most {MOST_VALUES} are recorded")
    if wrong := next((key for key in numbers if re.fullmatch(rf"{NAME}(/[a-z0-9.-]{{1,32}})?", key) is None), None):
        raise ValueError(f"{wrong[:80]!r} cannot be the name of a value: lower-case letters, digits, hyphens and dots")
    return numbers


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {name} is {type(value).__name__}, which is not a number") from None


def kind_of(metric: str, known: Iterable[MetricKind]) -> MetricKind | None:
    """The kind of a metric, or of one of its values; None if it is neither built in nor known."""
    name = metric.partition("/")[0]
    return next((kind for kind in (*BUILT_IN, *known) if kind.name == name), None)


def best_round_of(values: Mapping[int, float], losses: Mapping[int, float], *, higher: bool) -> tuple[int, int]:
    """The round with the best value, and the number of rounds that have this value.

    Of equal values, the round with the lower loss is taken, then the later round: a metric such as AUC reaches 1.0 long
    before the model is trained.

    Args:
        values: of each round, finite; at least one.
        losses: the members' mean loss of each round on the split of the values. A round without a finite one comes
            after the others.
        higher: True if higher values are better.
    """
    best = max(values.values()) if higher else min(values.values())
    equals = [number for number, value in values.items() if value == best]

    def rank(number: int) -> tuple[float, int]:
        loss = losses.get(number, math.inf)
        return (-loss if math.isfinite(loss) else -math.inf, number)

    return max(equals, key=rank), len(equals)
