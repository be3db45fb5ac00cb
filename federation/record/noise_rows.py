"""Checks that a row of noise on record has the length and the extremes of standard normal numbers.

The check bounds the effect of noise that a coordinator chooses. It cannot show that the noise is random: every
direction has vectors of this length.
"""

from collections.abc import Collection
from math import log, sqrt

import numpy as np

from federation.vectors import RowFile

_DEVIATIONS = 6.0  # of the mean square from 1, in standard deviations
_FALSE_ALARM = 1e-9  # the probability that the largest of honest numbers is above its bound
_BLOCK = 1 << 20  # elements that are read at a time


def mean_square_tolerance(size: int) -> float:
    """The largest distance of the mean square of this many numbers from 1: six standard deviations, 6 sqrt(2 / size).

    size times the mean square has the chi-squared distribution. A row of honest noise is outside with a probability of
    2.7e-6 for 45 numbers, and of at most 1.5e-8 from 1,000 numbers on.
    """
    return _DEVIATIONS * sqrt(2.0 / size)


def largest_magnitude(size: int) -> float:
    """The bound on the magnitude of each of this many numbers, sqrt(2 ln(size / 1e-9)).

    One standard normal number is beyond t with a probability of at most exp(-t^2 / 2), so one of `size` numbers is
    beyond this bound with a probability of at most 1e-9.
    """
    return sqrt(2.0 * log(size / _FALSE_ALARM))


def noise_defect(rows: Collection[RowFile]) -> str:
    """The reason why the rows of a file cannot be the noise of a step; empty if they can.

    Args:
        rows: of the file. Noise is one row of d float32 numbers: the noise of the step by its standard deviation.
    """
    if len(rows) != 1 or any(row.dtype != "F32" for row in rows):
        return "it is not one row of float32 numbers"
    (row,) = rows
    values = row.read()
    total, largest = 0.0, 0.0
    for start in range(0, row.length, _BLOCK):
        block = values[start : start + _BLOCK].astype(np.float64)
        if not np.isfinite(block).all():
            return "it has a number that is not finite"
        total += float(block @ block)
        largest = max(largest, float(np.abs(block).max()))
    mean, tolerance = total / row.length, mean_square_tolerance(row.length)
    if abs(mean - 1.0) > tolerance:
        return f"the mean square of its {row.length:,} numbers is {mean:.6g}; noise has 1 +- {tolerance:.4g}"
    if largest > (bound := largest_magnitude(row.length)):
        return f"its largest magnitude is {largest:.6g}; noise of {row.length:,} numbers has at most {bound:.4g}"
    return ""
