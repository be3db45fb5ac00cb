"""Axes and scales: from values to places along an axis, with round numbers as ticks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_MINOR_DECADES = 6  # of a log axis that has small ticks between its ticks
LARGEST = 1e100  # a larger value is a client's false claim, and would flatten the other values

Format = Callable[[float], str]


def general(value: float) -> str:
    """A number in four digits."""
    return f"{value:.4g}"


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        name: of the quantity, with its unit.
        format: writes a value.
        low: the axis begins here or below; None leaves it to the values.
        high: the axis ends here or above, likewise.
        log: logarithmic; values that are not positive are left out.
        bounded: the axis is from `low` to `high` exactly.
    """

    name: str
    format: Format
    low: float | None = None
    high: float | None = None
    log: bool = False
    bounded: bool = False


ACCURACY = Axis("accuracy", lambda value: f"{100 * value:.0f} %", low=0.0, high=1.0, bounded=True)
COSINE = Axis("cosine", lambda value: f"{value:.1f}", low=-1.0, high=1.0, bounded=True)


class Scale:
    """From values to places along an axis that is drawn from `start` to `end`."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, end: float) -> None:
        self._log, self._bounded, self._start, self._end = axis.log, axis.bounded, start, end
        shown = [value for value in values if self.known(value)]
        shown += [value for value in (axis.low, axis.high) if value is not None]
        low, high = (min(shown), max(shown)) if shown else (0.1, 1.0)
        if axis.bounded and axis.low is not None and axis.high is not None:
            low, high = axis.low, axis.high
        self.ticks = decades(low, high) if axis.log else steps(low, high)
        self.small_ticks = between(self.ticks) if axis.log else []
        self._low, self._high = self._of(self.ticks[0]), self._of(self.ticks[-1])

    def _of(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def known(self, value: float) -> bool:
        """True if a value can be drawn."""
        return abs(value) <= LARGEST and (value > 0 or not self._log)

    def at(self, value: float) -> float:
        """The place of a value."""
        share = (self._of(value) - self._low) / (self._high - self._low)
        if self._bounded:
            share = min(max(share, 0.0), 1.0)
        return self._start + share * (self._end - self._start)


def steps(low: float, high: float) -> list[float]:
    """About five round numbers that enclose the values."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        low, high = (low - 0.5 * abs(low), high + 0.5 * abs(high)) if low else (0.0, 1.0)
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten that enclose the values, or a finer series where the values are close to each other."""
    even = steps(low, high)
    if high < 3 * low and even[0] > 0:
        return even
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    fine = [factor * 10.0**i for i in range(first - 1, last + 2) for factor in (1, 2, 5)]
    above = next(i for i, tick in enumerate(fine) if tick >= high * (1 - 1e-9))
    below = max(i for i, tick in enumerate(fine) if tick <= low * (1 + 1e-9))
    if above - below <= 6:
        return fine[below : max(above, below + 1) + 1]
    step = max(1, math.ceil((last - first) / 6))
    return [10.0**i for i in range(first, last + step, step)]


def between(ticks: Sequence[float]) -> list[float]:
    """The multiples 2 to 9 of powers of ten that lie between ticks which are at most a decade apart."""
    first, last = math.floor(math.log10(ticks[0])), math.ceil(math.log10(ticks[-1]))
    if any(b > 10.1 * a for a, b in pairwise(ticks)) or last - first > _MINOR_DECADES:
        return []
    multiples = [factor * 10.0**i for i in range(first, last) for factor in range(2, 10)]
    return [value for value in multiples if ticks[0] < value < ticks[-1]]


def few(count: int, most: int = 8) -> list[int]:
    """At most `most` indices of a row of `count`, evenly apart, with the last one."""
    if count <= 0:
        return []
    step = next(
        step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if count <= most * step
    )
    last = count - 1
    return [i for i in range(0, count, step) if i == 0 or last - i >= (step + 1) // 2] + ([last] if last else [])


def cut(name: str, most: int = 16) -> str:
    """A name that fits beside a chart."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
