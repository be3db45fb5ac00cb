"""What one member tells of a column: counts and sums that add up over members without any rounding.

A sum is exact, as a fraction; on the way it is three float64 numbers, whose sum it is to 150 binary places.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from federation.statistics.data_columns import Column, ColumnError

_TERMS = 3  # numbers of a sum
_HALF = 2.0**27 + 1.0  # splits a float64 into halves of 26 binary places (Veltkamp)


@dataclass(frozen=True, kw_only=True)
class ColumnSums:
    """Counts and sums of one column.

    Attributes:
        values: all of them: one for each sample, and more for a channel of images.
        unit: the values of one sample, at most.
        missing: those that are NaN or infinite.
        outside: those outside the range, and those that are no class.
        first, second: the sums of x and of x^2; a number outside the range counts as the nearest end of it. 0 for
            classes.
        cells: the count of each bin or class; without the values outside.
    """

    values: int
    unit: int
    missing: int
    outside: int
    first: Fraction
    second: Fraction
    cells: tuple[int, ...]

    @property
    def count(self) -> int:
        """The values that are there."""
        return self.values - self.missing

    def __add__(self, other: "ColumnSums") -> "ColumnSums":
        """The sums of both data sets."""
        return ColumnSums(
            values=self.values + other.values,
            unit=max(self.unit, other.unit),
            missing=self.missing + other.missing,
            outside=self.outside + other.outside,
            first=self.first + other.first,
            second=self.second + other.second,
            cells=tuple(mine + others for mine, others in zip(self.cells, other.cells, strict=True)),
        )


def sums_of(values: NDArray[np.float64], column: Column, bins: int) -> ColumnSums:
    """The sums of a column's values, (n,) or (n, ...), with `bins` bins of its histogram if it has numbers."""
    unit = math.prod(values.shape[1:])
    flat = values.reshape(-1)
    there = flat[np.isfinite(flat)]
    zero = Fraction(0)
    if column.classes:
        inside = there[(there >= 0) & (there < column.classes) & (there == np.floor(there))]
        cells, first, second = np.bincount(inside.astype(np.int64), minlength=column.classes), zero, zero
    else:
        low, high = column.range
        inside = there[(there >= low) & (there <= high)]
        cells = _histogram(inside, column, bins)
        clipped = np.clip(there, low, high)
        first, second = exact_sums(clipped)
    return ColumnSums(
        values=flat.size,
        unit=unit,
        missing=flat.size - there.size,
        outside=there.size - inside.size,
        first=first,
        second=second,
        cells=tuple(cells.tolist()),
    )


def exact_sums(values: NDArray[np.float64]) -> tuple[Fraction, Fraction]:
    """The sums of x and of x^2 of finite numbers up to `LARGEST`."""
    return _exact(values), _exact_squares(values)


def total(of: Iterable[ColumnSums]) -> ColumnSums:
    """The sums of several data sets, of which there is at least one; the order does not matter."""
    return reduce(lambda mine, others: mine + others, of)


def width(columns: Sequence[Column], bins: int) -> int:
    """The length of `encoded`."""
    return 1 + sum(_width(column, bins) for column in columns)


def encoded(samples: int, of: Sequence[ColumnSums], columns: Sequence[Column]) -> NDArray[np.float64]:
    """The number of samples, and the sums of these columns, in their order: (width,)."""
    told: list[float] = [samples]
    for sums, column in zip(of, columns, strict=True):
        told += (sums.values, sums.unit, sums.missing, sums.outside)
        if not column.classes:
            told += (*_terms(sums.first), *_terms(sums.second))
        told += sums.cells
    return np.array(told, dtype=np.float64)


def decoded(told: NDArray[np.float64], columns: Sequence[Column], bins: int) -> tuple[int, list[ColumnSums]]:
    """The number of samples and the sums of each column, as `encoded` has them.

    Raises:
        ColumnError: no data set of such columns has these numbers; the message names the column.
    """
    samples, at, found = _count("the data set", told[:1])[0], 1, []
    for column in columns:
        part = told[at : at + _width(column, bins)]
        at += len(part)
        values, unit, missing, outside = _count(f"column {column.name!r}", part[:4])
        begin = 4 if column.classes else 4 + 2 * _TERMS
        sums = ColumnSums(
            values=values,
            unit=unit,
            missing=missing,
            outside=outside,
            first=_sum_of(column, part[4 : 4 + _TERMS] if not column.classes else ()),
            second=_sum_of(column, part[4 + _TERMS : begin] if not column.classes else ()),
            cells=tuple(_count(f"column {column.name!r}", part[begin:])),
        )
        _check_possible(samples, sums, column)
        found.append(sums)
    return samples, found


def _width(column: Column, bins: int) -> int:
    return 4 + (0 if column.classes else 2 * _TERMS) + column.cells(bins)


def _histogram(inside: NDArray[np.float64], column: Column, bins: int) -> NDArray[np.int64]:
    if column.low is not None:
        counts: NDArray[np.int64] = np.histogram(inside, bins=bins, range=column.range)[0]
        return counts
    edges = column.edges(bins)
    return np.bincount(np.searchsorted(edges, inside, side="right"), minlength=len(edges) + 1)


def _exact(values: NDArray[np.float64]) -> Fraction:
    """The sum of finite numbers, to 150 binary places: each term is the rounded sum of what the ones before leave."""
    left, found = values.tolist(), Fraction(0)
    for _ in range(_TERMS):
        term = math.fsum(left)
        if term == 0.0:
            break
        left.append(-term)
        found += Fraction(term)
    return found


def _exact_squares(values: NDArray[np.float64]) -> Fraction:
    """The sum of the squares of numbers up to `LARGEST`, as `_exact`: the products of two halves are exact."""
    scaled = values * _HALF
    upper = scaled - (scaled - values)
    lower = values - upper
    if not lower.any():  # float32, and integers
        return _exact(upper * upper)
    return _exact(np.concatenate([upper * upper, 2.0 * upper * lower, lower * lower]))


def _terms(exact: Fraction) -> tuple[float, ...]:
    terms = []
    for _ in range(_TERMS):
        term = float(exact)
        terms.append(term)
        exact -= Fraction(term)
    return tuple(terms)


def _sum_of(column: Column, terms: Iterable[float]) -> Fraction:
    found = [float(term) for term in terms]
    if not all(map(math.isfinite, found)):
        raise ColumnError(f"column {column.name!r} has a sum that is not finite")
    return sum(map(Fraction, found), Fraction(0))


def _count(where: str, told: NDArray[np.float64]) -> list[int]:
    if not ((told >= 0) & (told <= 2.0**53) & (told == np.floor(told))).all():
        raise ColumnError(f"{where} has a count that is no whole number from 0 to 2^53")
    return [int(value) for value in told]


def _check_possible(samples: int, sums: ColumnSums, column: Column) -> None:
    counted = sums.missing + sums.outside + sum(sums.cells)
    if sums.values > samples * sums.unit or counted > sums.values:
        raise ColumnError(f"column {column.name!r} counts {counted} values of {sums.values} in {samples} samples")
    low, high = map(Fraction, column.range)
    within = low * sums.count <= sums.first <= high * sums.count
    # Cauchy and Schwarz. What the three terms leave out is less than 2^-140 of the sum of squares, and the squares of
    # numbers below 2^-500 are too small for a float64.
    most = sums.count * (sums.second * (1 + Fraction(1, 2**100)) + sums.count * Fraction(1, 2**1000))
    if not within or sums.first**2 > most:
        raise ColumnError(f"column {column.name!r} has sums that no {sums.count} values in its range have")


def empty(sums: ColumnSums) -> ColumnSums:
    """The same column with all of its values missing."""
    zero = Fraction(0)
    return replace(sums, missing=sums.values, outside=0, first=zero, second=zero, cells=tuple(0 for _ in sums.cells))
