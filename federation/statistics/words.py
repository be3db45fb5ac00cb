"""Statistics as words of a private sum: integers modulo 2^64, of which only the sum over the members is ever known.

A word is a count, or a sum of x or x^2. Those are about the middle c of the column's range, in units of half of its
length h, over the values of a sample: the sum of (x - c) / h, divided by the values of one sample, in 32 binary places.
A member rounds each such sum once. So the total differs from the exact sum by at most 2^-33 for each member.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from federation.statistics.data_columns import Column, ColumnError
from federation.statistics.sums import ColumnSums

PLACES = 32
"""Binary places of a sum."""
MOST_SAMPLES = 10**7
"""The most samples of a member: the sums of 100 members then stay below 2^63."""
_ONE = 1 << PLACES
_COUNTS = 5  # values, values of a sample, their square, missing, outside

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Total:
    """The total of a column over the members.

    Attributes:
        sums: without sums of x and x^2 where they are not known.
        averaged: True if they are known: of columns with a range, whose samples have equally many values everywhere.
    """

    sums: ColumnSums
    averaged: bool


def word_count(columns: Sequence[Column], bins: int) -> int:
    """The number of words."""
    return 1 + sum(_width(column, bins) for column in columns)


def to_words(samples: int, of: Sequence[ColumnSums], columns: Sequence[Column]) -> Integers:
    """The number of samples, and the sums of these columns, as words, (word_count,).

    Raises:
        ColumnError: there are more samples than fit.
    """
    if samples > MOST_SAMPLES:
        raise ColumnError(f"{samples} samples; a private sum takes at most {MOST_SAMPLES} of a member")
    found = [samples]
    for sums, column in zip(of, columns, strict=True):
        found += (sums.values, sums.unit, sums.unit**2, sums.missing, sums.outside)
        if _averaged(column):
            centre, half = _middle(column)
            unit = max(1, sums.unit)
            first = (sums.first - sums.count * centre) / (half * unit)
            second = (sums.second - 2 * centre * sums.first + sums.count * centre**2) / (half**2 * unit)
            # Once for the whole member: rounded sample by sample, the errors of 10^7 samples would add up.
            found += (round(first * _ONE), round(second * _ONE))
        found += sums.cells
    return np.array(found, dtype=np.int64)


def from_words(total: Words, members: int, columns: Sequence[Column], bins: int) -> tuple[int, list[Total]]:
    """The number of samples and the totals of each column, from the sum of the words of this many members.

    Raises:
        ColumnError: no data of so many members have this sum; the message names the column.
    """
    if len(total) != word_count(columns, bins):
        raise ColumnError(f"{len(total)} words are not the numbers of these columns")
    signed = [int(word) for word in total.astype(np.uint64).view(np.int64)]
    samples, at, found = _count("the data", signed[0]), 1, []
    if samples > members * MOST_SAMPLES:
        raise ColumnError(f"{samples} samples of {members} members; each has at most {MOST_SAMPLES}")
    for column in columns:
        part = signed[at : at + _width(column, bins)]
        at += len(part)
        found.append(_total(samples, part, members, column))
    return samples, found


def _total(samples: int, part: Sequence[int], members: int, column: Column) -> Total:
    where = f"column {column.name!r}"
    begin = _COUNTS + (2 if _averaged(column) else 0)
    values, units, squares, missing, outside = (_count(where, word) for word in part[:_COUNTS])
    cells = tuple(_count(where, word) for word in part[begin:])
    # Equal at all members if and only if the members times the sum of squares are the square of the sum.
    equal = members * squares == units**2
    unit = units // members if equal else math.isqrt(squares)  # of unequal ones, the largest is at most this
    if values > samples * unit or units**2 > members * squares or missing + outside + sum(cells) > values:
        raise ColumnError(f"{where} counts {missing + outside + sum(cells)} of {values} values in {samples} samples")
    count, zero = values - missing, Fraction(0)
    sums = ColumnSums(values=values, unit=unit, missing=missing, outside=outside, first=zero, second=zero, cells=cells)
    if not (_averaged(column) and equal):
        return Total(sums, averaged=False)
    first, second, error = Fraction(part[_COUNTS], _ONE), Fraction(part[_COUNTS + 1], _ONE), Fraction(members, 2 * _ONE)
    most = Fraction(count, max(1, unit))  # the sum of (x - c)^2 / h^2 is at most this, and by Cauchy and Schwarz:
    if (
        abs(first) > most + error
        or not -error <= second <= most + error
        or (max(abs(first) - error, zero) ** 2 > most * (second + error))
    ):
        raise ColumnError(f"{where} has sums that no {count} values in its range have")
    centre, half = _middle(column)
    exact = count * centre + first * half * unit
    squared = max(second, zero) * half**2 * unit + 2 * centre * exact - count * centre**2
    return Total(ColumnSums(**{**vars(sums), "first": exact, "second": squared}), averaged=True)


def _width(column: Column, bins: int) -> int:
    return _COUNTS + (2 if _averaged(column) else 0) + column.cells(bins)


def _averaged(column: Column) -> bool:
    """True if sums of x and x^2 are among the words: without a range, there is no unit for them."""
    return not column.classes and column.low is not None


def _middle(column: Column) -> tuple[Fraction, Fraction]:
    """The middle of the range, and half of its length."""
    low, high = map(Fraction, column.range)
    return (low + high) / 2, (high - low) / 2


def _count(where: str, word: int) -> int:
    if not 0 <= word <= 2**53:
        raise ColumnError(f"{where} has a count that is no whole number from 0 to 2^53")
    return word
