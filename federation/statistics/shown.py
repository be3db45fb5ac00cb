"""Totals as they are shown: no count below 10, and no other number from which it could be computed.

The values of a column are divided into the missing ones, those outside the range, and the bins or classes. From their
number and all counts but one, a reader could compute the last count. So, besides the counts below 10, the smallest bins
are left out, until each hidden count could be any number below 10. If that cannot be reached, no count is shown.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from federation.statistics.data_columns import Column
from federation.statistics.sums import ColumnSums

FEWEST = 10
FEWER = "fewer than 10"
WITHHELD = "not shown"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS = 2  # the place of the first bin, after the missing values and those outside the range
_AROUND = 20  # samples one deviation away: what they change of the mean is the step of its rounding

Shown = int | str
"""A count, `FEWER` or `WITHHELD`."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A column as it is shown.

    Attributes:
        values: all, with those that are missing.
        missing, outside: of them.
        count: the values that are there.
        mean, deviation: of the values that are there; a value outside the range counts as the nearest end of the
            range. The deviation is that of the population. None for classes, without values, and where they would
            show a count that is hidden.
        edges: between the bins; empty for classes.
        cells: the count of each bin or class.
        quantiles: by their share, from the histogram.
    """

    column: Column
    values: int
    missing: Shown
    outside: Shown
    count: Shown
    mean: float | None = None
    deviation: float | None = None
    edges: tuple[float, ...] = ()
    cells: tuple[Shown, ...] = ()
    quantiles: Mapping[float, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def document(self) -> dict[str, Any]:
        """As JSON."""
        kind = {"classes": self.column.classes} if self.column.classes else {"bins": len(self.cells)}
        ends = {} if self.column.low is None else {"range": [self.column.low, self.column.high]}
        return {
            "name": self.column.name,
            **kind,
            **ends,
            "values": self.values,
            "missing": self.missing,
            "outside": self.outside,
            "count": self.count,
            "mean": self.mean,
            "deviation": self.deviation,
            "edges": list(self.edges),
            "counts": list(self.cells),
            "quantiles": {f"{share:g}": value for share, value in self.quantiles.items()},
        }


def described(
    sums: ColumnSums, column: Column, bins: int, *, fewest: int = FEWEST, averaged: bool = True
) -> Description:
    """A column by its total. With `fewest` = 0, everything is shown; `averaged` is False without sums of x and x^2."""
    told = _hidden([sums.missing, sums.outside, *sums.cells], sums.values, fewest * sums.unit)
    missing, outside, *cells = told
    edges = () if column.classes else column.edges(bins)
    shown = Description(
        column=column,
        values=sums.values,
        missing=missing,
        outside=outside,
        count=sums.values - missing if isinstance(missing, int) else missing if missing == WITHHELD else WITHHELD,
        edges=edges,
        cells=tuple(cells),
    )
    if column.classes or not sums.count or not any(isinstance(cell, int) for cell in cells):
        return shown
    averages: dict[str, float] = {}
    if averaged:
        exact = sums.first / sums.count
        mean, deviation = float(exact), math.sqrt(max(Fraction(0), sums.second / sums.count - exact * exact))
        if FEWER in told:
            step = _step(_AROUND * sums.unit * deviation / sums.count)
            mean, deviation = _rounded(mean, step), _rounded(deviation, step)
        averages = {"mean": mean, "deviation": deviation}
    quantiles = _quantiles(_spread(told, sums.values), column, edges)
    return Description(**{**vars(shown), **averages, "quantiles": MappingProxyType(quantiles)})


def _hidden(counts: Sequence[int], values: int, fewest: int) -> list[Shown]:
    """The counts, without those below `fewest`, and without those from which they could be computed."""
    small = {at for at, count in enumerate(counts) if count < fewest}
    left_out, most = set(small), fewest - 1
    while small:
        others = [at for at in range(len(counts)) if at not in left_out]
        rest, more = values - sum(counts[at] for at in others), len(left_out) - len(small)
        if more:  # each of them is at least `fewest`, and at most the smallest bin that is shown
            largest = min((counts[at] for at in others if at >= _BINS), default=rest)
            enough = fewest * more + most <= rest <= more * largest
        else:
            enough = most <= rest <= most * (len(small) - 1)
        if enough:
            break
        if not others:
            return [WITHHELD] * len(counts)
        left_out.add(min(others, key=lambda at: (at < _BINS, counts[at], at)))
    return [FEWER if at in small else WITHHELD if at in left_out else count for at, count in enumerate(counts)]


def _step(least: float) -> float:
    """The next number of 1, 2, 5, 10, 20, ... or 0.5, 0.2, ... from a number on; 0 for 0."""
    if least <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * times for times in (1, 2, 5, 10, 20) if power * times >= least)


def _rounded(value: float, step: float) -> float:
    return float(round(Fraction(value) / Fraction(step)) * Fraction(step)) if step else value


def _spread(told: Sequence[Shown], values: int) -> list[float]:
    """The counts of the bins by what is shown alone: the values of hidden counts are spread evenly over these."""
    known = [count for count in told if isinstance(count, int)]
    rest = (values - sum(known)) / max(1, len(told) - len(known))
    return [count if isinstance(count, int) else rest for count in told[_BINS:]]


def _quantiles(counts: Sequence[float], column: Column, edges: Sequence[float]) -> dict[float, float]:
    """Quantiles, values even in each bin; in a bin that is open at one side, its other end."""
    low, high = column.range
    ends = (low, *edges, high)
    found: dict[float, float] = {}
    everything = math.fsum(counts)
    for share in QUANTILES if everything else ():
        wanted, before = share * everything, 0.0
        occupied = [number for number, count in enumerate(counts) if count]
        at = occupied[-1]
        for number in occupied[:-1]:
            if before + counts[number] >= wanted:
                at = number
                break
            before += counts[number]
        begin, end = ends[at], ends[at + 1]
        if column.low is None and at in (0, len(counts) - 1):
            found[share] = end if at == 0 else begin
        else:
            found[share] = begin + (end - begin) * (wanted - before) / counts[at]
    return found
