"""The data as a private sum has them: a value that few samples have counts as the nearest one that more have.

A count of 1 to 4 that is told as 0 is not hidden by that alone: the number of values without the other counts gives it
back, and so does the sum of a column of zeros and ones. So these samples are moved, and all numbers are those of the
moved samples: nothing else is left out, so nothing can be computed from what is missing.

- The 4 largest and the 4 smallest values count as the fifth (Winsor): one sample dominates no sum, however wide the
  range is.
- A value in a bin of fewer than 5 counts as the nearest value in a larger bin; in a class of fewer than 5, as one of
  the largest class. Fewer than 5 values outside the range count as inside, at its nearest end; fewer than 5 missing
  values count as one of the largest bin or class.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from federation.statistics.data_columns import Column
from federation.statistics.sums import ColumnSums, exact_sums

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """Where the values of a column are moved; `told` applies it.

    Attributes:
        column, bins: as asked.
        ends: the smallest and the largest value that count as they are.
        outside, missing: True if there are enough values outside the range, and missing ones, to be told.
        kept: for each bin or class, if its values stay.
        lowest, highest: of each bin, the values in it after the ends were moved.
        largest: the largest bin or class.
    """

    column: Column
    bins: int
    ends: tuple[float, float]
    outside: bool
    missing: bool
    kept: NDArray[np.bool_]
    lowest: Numbers
    highest: Numbers
    largest: int

    def told(self, values: Numbers) -> ColumnSums:
        """The sums of some of the column's values, (n,) or (n, ...), with all of them moved."""
        unit, size = math.prod(values.shape[1:]), self.column.cells(self.bins)
        flat = values.reshape(-1)
        finite = np.isfinite(flat)
        usual = float(self.largest) if self.column.classes else float(self.highest[self.largest])
        there = flat[finite] if self.missing else np.where(finite, flat, usual)
        clipped, beyond = _clipped(there, self.column)
        moved = self._moved(clipped)
        told = beyond if self.outside else np.zeros(len(beyond), np.bool_)
        places = _places(moved[~told], self.column, self.bins)
        if self.column.classes and not self.outside:
            places[beyond] = self.largest
        first, second = (Fraction(0), Fraction(0)) if self.column.classes else exact_sums(moved)
        return ColumnSums(
            values=flat.size,
            unit=unit,
            missing=flat.size - there.size,
            outside=int(told.sum()),
            first=first,
            second=second,
            cells=tuple(np.bincount(places, minlength=size).tolist()),
        )

    def _moved(self, clipped: Numbers) -> Numbers:
        if self.column.classes:
            stays = self.kept[_places(clipped, self.column, self.bins)]
            return np.where(stays, clipped, float(self.largest))
        moved = np.clip(clipped, *self.ends)
        places = _places(moved, self.column, self.bins)
        small = ~self.kept[places]
        if not small.any():
            return moved
        # Of each bin, the nearest kept values below and above it.
        below = np.maximum.accumulate(np.where(self.kept, self.highest, -np.inf))[places[small]]
        above = np.minimum.accumulate(np.where(self.kept, self.lowest, np.inf)[::-1])[::-1][places[small]]
        here = moved[small]
        moved[small] = np.where(here - below <= above - here, below, above)
        return moved


class Landmarks:
    """Finds the moves of a column from its values, which are added in parts.

    `least` is that of one value for each sample; a channel of images has as many times more as a sample has values.
    """

    def __init__(self, column: Column, bins: int, least: int) -> None:
        size = column.cells(bins)
        self._column, self._bins, self._least, self._unit = column, bins, least, 1
        self._counts, self._count, self._outside, self._missing = np.zeros(size, np.int64), 0, 0, 0
        self._lowest, self._highest = np.full(size, np.inf), np.full(size, -np.inf)
        self._small, self._large = np.empty(0), np.empty(0)  # the smallest values, and the largest ones with a minus

    def add(self, values: Numbers) -> None:
        """Adds values, (n,) or (n, ...)."""
        self._unit = max(self._unit, math.prod(values.shape[1:]))
        flat = values.reshape(-1)
        there, beyond = _clipped(flat[np.isfinite(flat)], self._column)
        self._count += len(there)
        self._missing += flat.size - len(there)
        self._outside += int(beyond.sum())
        places, size = _places(there, self._column, self._bins), len(self._counts)
        if self._column.classes:
            self._counts += np.bincount(places[~beyond], minlength=size)
            return
        self._counts += np.bincount(places, minlength=size)
        np.minimum.at(self._lowest, places, there)
        np.maximum.at(self._highest, places, there)
        least = self._least * self._unit
        self._small = _first(np.concatenate([self._small, there]), least)
        self._large = _first(np.concatenate([self._large, -there]), least)

    def moves(self) -> Moves | None:
        """The moves; None if no bin or class has enough values, or most values are outside the range."""
        column, least, counts = self._column, self._least * self._unit, self._counts
        if 2 * self._outside > self._count or self._count < least:
            return None
        ends = (0.0, 0.0)
        if not column.classes:
            # Of fewer than twice as many values, all count as the largest one that is no end.
            highest = -float(self._large.max())
            ends = (min(float(self._small.max()), highest), highest)
            first, last = (int(place) for place in _places(np.array(ends), column, self._bins))
            counts = counts.copy()
            counts[first], counts[last] = counts[: first + 1].sum(), counts[last:].sum()
            if first == last:
                counts[first] = self._count
            counts[:first], counts[last + 1 :] = 0, 0
        kept = counts >= least
        return (
            None
            if not kept.any()
            else Moves(
                column=column,
                bins=self._bins,
                ends=ends,
                outside=self._outside >= least,
                missing=self._missing >= least,
                kept=kept,
                lowest=np.clip(self._lowest, *ends),
                highest=np.clip(self._highest, *ends),
                largest=int(counts.argmax()),
            )
        )


def _clipped(there: Numbers, column: Column) -> tuple[Numbers, NDArray[np.bool_]]:
    """Finite values within the range, and which of them are outside; those that are no class become class 0."""
    if column.classes:
        beyond = (there < 0) | (there >= column.classes) | (there != np.floor(there))
        return np.where(beyond, 0.0, there), beyond
    low, high = column.range
    return np.clip(there, low, high), (there < low) | (there > high)


def _places(values: Numbers, column: Column, bins: int) -> Places:
    """The bin or class of values in the range."""
    if column.classes:
        return values.astype(np.int64)
    return np.searchsorted(column.edges(bins), values, side="right").astype(np.int64)


def _first(values: Numbers, count: int) -> Numbers:
    """The smallest values, at most `count`."""
    return values if len(values) <= count else np.partition(values, count - 1)[:count]
