"""The columns of a data set: their names, kinds and ranges. Needs no NumPy."""

import math
import re
from dataclasses import dataclass

from federation.errors import Error

MAX_COLUMNS = 10_000
MAX_CLASSES = 1000
LEAST_BINS, MAX_BINS = 2, 64
LARGEST = 2.0**500
"""The largest magnitude of a value: the sum of the squares of 10^7 of them is finite in float64."""
NARROWEST = 2.0**-30
"""The shortest half range, relative to its larger end: sums about the middle are then exact to 2^-60."""
_NAME = re.compile(r"[^\W_][\w .:/()%+-]{0,79}")


class ColumnError(Error, ValueError):
    """A column cannot be described; the message names it. `wire` is the text for others than the owner."""

    def __init__(self, message: str, *, wire: str = "the columns of the data are not those that are asked for") -> None:
        super().__init__(message)
        self.wire = wire


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of numbers, or of classes.

    Attributes:
        name: a letter or digit, then at most 79 letters, digits, blanks and `_ . : / ( ) % + -`.
        low, high: the range of numbers; None without one.
        classes: C, for a column of classes from 0 to C - 1; 0 for numbers.

    Raises:
        ColumnError: the name cannot be one, or the range or the number of classes makes no sense.
    """

    name: str
    low: float | None = None
    high: float | None = None
    classes: int = 0

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ColumnError(f"{self.name[:80]!r} cannot name a column: at most 80 letters, digits and _ . : / ( )")
        if not 0 <= self.classes <= MAX_CLASSES:
            raise ColumnError(f"column {self.name!r} has {self.classes} classes; at most {MAX_CLASSES} are counted")
        if self.low is None and self.high is None:
            return
        if self.classes:
            raise ColumnError(f"column {self.name!r} has classes, so it has no range")
        low, high = (math.nan if end is None else end for end in (self.low, self.high))
        if not -LARGEST <= low < high <= LARGEST:
            raise ColumnError(f"column {self.name!r} has no range from {self.low} to {self.high}")

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value that count as they are."""
        low, high = self.low, self.high
        return (-LARGEST, LARGEST) if low is None or high is None else (low, high)

    def cells(self, bins: int) -> int:
        """The number of counts: one for each class, or each bin of a histogram for which `bins` are asked."""
        return self.classes or len(self.edges(bins)) + 1

    def edges(self, bins: int) -> tuple[float, ...]:
        """The values between the bins of a histogram of numbers, in their order.

        With a range: `bins` equal bins. Without: half as many bins on each side of 0, between powers of two that cover
        2^-16 to 2^16; the outer ones are open.
        """
        if self.low is not None and self.high is not None:
            # The same as numpy.linspace, whose edges numpy.histogram has.
            step = (self.high - self.low) / bins
            return tuple(self.low + number * step for number in range(1, bins))
        half = bins // 2
        step = max(1, math.ceil(32 / max(1, half - 1)))
        positive = [2.0 ** (step * (number - (half - 2) // 2)) for number in range(half - 1)]
        return (*(-edge for edge in reversed(positive)), 0.0, *positive)


def check_columns(columns: tuple[Column, ...], bins: int) -> None:
    """Raises ColumnError: no columns or too many, one name twice, or a number of bins out of range."""
    if not 1 <= len(columns) <= MAX_COLUMNS:
        raise ColumnError(f"{len(columns)} columns; 1 to {MAX_COLUMNS} are described")
    if not LEAST_BINS <= bins <= MAX_BINS:
        raise ColumnError(f"{bins} bins; a histogram has {LEAST_BINS} to {MAX_BINS}")
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise ColumnError(f"column {next(name for name in names if names.count(name) > 1)!r} is there twice")


def check_summable(columns: tuple[Column, ...]) -> None:
    """Raises ColumnError: the range of a column is too narrow for sums about its middle."""
    for column in columns:
        low, high = column.range
        if column.low is not None and high - low < 2 * NARROWEST * max(abs(low), abs(high)):
            raise ColumnError(
                f"column {column.name!r}: the range from {low:g} to {high:g} is too narrow for a private sum; it is at "
                "least 2^-29 times as long as its larger end"
            )
