"""The data as a private sum has them: a value that few samples have counts as the nearest one that more have.

A count of 1 to 4 that is told as 0 is not hidden by that alone: the number of values without the other counts gives it
back, and so does the sum of a column of zeros and ones. So these samples are moved, and all numbers are those of the
moved samples: nothing else is left out, so nothing can be computed from what is missing.

- Fewer than 5 values below the range, or above it, count as inside, at that end. 5 or more are told as outside. They
  are in the sums, at that end, and in nothing else: neither bins nor the moves of the values inside depend on them.
- Of the values inside, the 4 largest and the 4 smallest count as the fifth (Winsor).
- Bins are cut at the powers of two, of both signs. A value in a cut bin of fewer than 5 counts as the nearest value in
  a larger one. So a sample that is far from all others dominates no sum, however wide the range is, and also if 5
  coded values, such as 999, are farther away.
- A value in a class of fewer than 5 counts as one of the largest class, and so do fewer than 5 values that are no
  class. Fewer than 5 missing values count as one of the largest cut bin or class.
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
Flags = NDArray[np.bool_]
_POWERS = 64  # the largest power of two that cuts bins, and the smallest, negated


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """Where the values of a column are moved; `told` applies it.

    Attributes:
        column, bins: as asked.
        ends: the smallest and the largest value that count as they are.
        below, above: True if there are enough values below the range, and above it, to be told; of classes, the first
            is that of values that are no class.
        missing: True if there are enough missing values to be told.
        edges: those of the cut bins.
        kept: for each cut bin or class, if its values stay.
        lowest, highest: of each cut bin, the values inside the range that are in it after the ends were moved.
        largest: the largest cut bin or class.
    """

    column: Column
    bins: int
    ends: tuple[float, float]
    below: bool
    above: bool
    missing: bool
    edges: Numbers
    kept: Flags
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
        clipped, below, above = _clipped(there, self.column)
        told = (below & self.below) | (above & self.above)
        inside = clipped[~told]
        if self.column.classes:
            inside[below[~told]] = self.largest
        moved = self._moved(inside)
        places = _places(moved, self.column, np.array(self.column.edges(self.bins)))
        first, second = (
            (Fraction(0), Fraction(0)) if self.column.classes else exact_sums(np.append(moved, clipped[told]))
        )
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
            stays = self.kept[_places(clipped, self.column, self.edges)]
            return np.where(stays, clipped, float(self.largest))
        moved = np.clip(clipped, *self.ends)
        places = _places(moved, self.column, self.edges)
        small = ~self.kept[places]
        if not small.any():
            return moved
        # Of each cut bin, the nearest kept values below and above it.
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
        self._column, self._bins, self._least, self._unit = column, bins, least, 1
        self._edges = _cut(column, bins)
        size = column.classes or len(self._edges) + 1
        # All but these three numbers are those of the values inside the range.
        self._below, self._above, self._missing = 0, 0, 0
        self._counts = np.zeros(size, np.int64)
        self._lowest, self._highest = np.full(size, np.inf), np.full(size, -np.inf)
        self._small, self._large = np.empty(0), np.empty(0)  # the smallest values, and the largest ones with a minus

    def add(self, values: Numbers) -> None:
        """Adds values, (n,) or (n, ...)."""
        self._unit = max(self._unit, math.prod(values.shape[1:]))
        flat = values.reshape(-1)
        there, below, above = _clipped(flat[np.isfinite(flat)], self._column)
        self._missing += flat.size - len(there)
        self._below += int(below.sum())
        self._above += int(above.sum())
        self._add_inside(there[~(below | above)])

    def moves(self) -> Moves | None:
        """The moves; None if no cut bin or class has enough values, or most values are outside the range."""
        column, least = self._column, self._least * self._unit
        outside, count = self._below + self._above, int(self._counts.sum())
        if 2 * outside > outside + count:
            return None
        below, above = self._below >= least, self._above >= least
        if not column.classes:
            low, high = column.range
            self._add_inside(np.array([low] * (0 if below else self._below) + [high] * (0 if above else self._above)))
            self._below, self._above = self._below if below else 0, self._above if above else 0
        counts, count = self._counts, int(self._counts.sum())
        if count < least:
            return None
        ends = (0.0, 0.0)
        if not column.classes:
            # Of fewer than twice as many values, all count as the largest one that is no end.
            highest = -float(self._large.max())
            ends = (min(float(self._small.max()), highest), highest)
            first, last = (int(place) for place in _places(np.array(ends), column, self._edges))
            counts = counts.copy()
            counts[first], counts[last] = counts[: first + 1].sum(), counts[last:].sum()
            if first == last:
                counts[first] = count
            counts[:first], counts[last + 1 :] = 0, 0
        kept = counts >= least
        return (
            None
            if not kept.any()
            else Moves(
                column=column,
                bins=self._bins,
                ends=ends,
                below=below,
                above=above,
                missing=self._missing >= least,
                edges=self._edges,
                kept=kept,
                lowest=np.clip(self._lowest, *ends),
                highest=np.clip(self._highest, *ends),
                largest=int(counts.argmax()),
            )
        )

    def _add_inside(self, inside: Numbers) -> None:
        """Adds values inside the range."""
        places = _places(inside, self._column, self._edges)
        self._counts += np.bincount(places, minlength=len(self._counts))
        if self._column.classes:
            return
        np.minimum.at(self._lowest, places, inside)
        np.maximum.at(self._highest, places, inside)
        least = self._least * self._unit
        self._small = _first(np.concatenate([self._small, inside]), least)
        self._large = _first(np.concatenate([self._large, -inside]), least)


def _clipped(there: Numbers, column: Column) -> tuple[Numbers, Flags, Flags]:
    """Finite values, at the nearest end of the range, and which of them were below it and above it.

    Those that are no class are class 0, and below.
    """
    if column.classes:
        none = (there < 0) | (there >= column.classes) | (there != np.floor(there))
        return np.where(none, 0.0, there), none, np.zeros(len(there), np.bool_)
    low, high = column.range
    return np.clip(there, low, high), there < low, there > high


def _cut(column: Column, bins: int) -> Numbers:
    """The edges of the bins, cut at the powers of two that are in the range; none for classes."""
    if column.classes:
        return np.empty(0)
    low, high = column.range
    powers = np.exp2(np.arange(-_POWERS, _POWERS + 1))
    cuts = np.concatenate([-powers, [0.0], powers])
    return np.unique(np.concatenate([column.edges(bins), cuts[(low < cuts) & (cuts < high)]]))


def _places(values: Numbers, column: Column, edges: Numbers) -> Places:
    """The place of values in the range between these edges, or their class."""
    if column.classes:
        return values.astype(np.int64)
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def _first(values: Numbers, count: int) -> Numbers:
    """The smallest values, at most `count`."""
    return values if len(values) <= count else np.partition(values, count - 1)[:count]
