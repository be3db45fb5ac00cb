"""The numbers of a cohort (section 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from federation.secure.errors import Fault, Malformed

SMALLEST = 5
LARGEST = 100
SMALLEST_MGDA = 8
"""Members that multi-gradient descent over the Gram matrix needs."""
S_BITS = 14
"""Fractional bits of entries of the sketch S, in F_p."""
T_BITS = 16
"""Fractional bits of entries of the second sketch T, in F_q."""
T_ROWS = 256
"""k', rows of T."""
RANGE_TESTS = 32
"""Projections of a dealer's T-shares that are opened, so that elements are seen that are not small."""
RANGE_NOISE = 2**24
"""The largest noise that a dealer adds to a projection, in units of 2^-16."""
RANGE_LIMIT = RANGE_NOISE + 2**19
"""The largest projection with its noise: those of an honest dealer are below 2^19 (9 standard deviations)."""
SUM_BITS = 28
"""Fractional bits of masked updates and their sum, in Z_2^32."""
COEFFICIENT_BITS = 32
"""Fractional bits of coefficients."""
ONE = 2**COEFFICIENT_BITS
"""The coefficient 1."""
EVALUATION_NOISE = 0.1
"""sigma of private evaluations, unless chosen: the noise on a sum of values in [0, 1]."""
BLUR = 1.0
"""c of the blur of updates, unless chosen: a member's noise on a coordinate, relative to it, times sqrt(n_min - t)."""


class Mode(StrEnum):
    """The modes of private rounds, by the values that are opened and checked."""

    SUM = "sum"
    PRIVATE = "private"
    VERIFIED = "verified"


@dataclass(frozen=True)
class Thresholds:
    """The numbers of a cohort.

    Attributes:
        m: members that finished READY, 5 to 100.
        mode: of the session.

    Raises:
        Malformed: m is out of range.
    """

    m: int
    mode: Mode

    def __post_init__(self) -> None:
        if not SMALLEST <= self.m <= LARGEST:
            raise Malformed(Fault.RANGE, f"a cohort has {SMALLEST} to {LARGEST} members, not {self.m}")

    @property
    def t(self) -> int:
        """Colluders that learn nothing more; liars that are found."""
        # Section 4: `verified` corrects t wrong answers of degree 2t, for which 4t + 1 members are needed.
        return (self.m - 1) // (4 if self.mode is Mode.VERIFIED else 3)

    @property
    def t_mask(self) -> int:
        """Shares that open a mask, and confirmations: floor(2 m / 3) + 1, so that 2 (t_mask - t) > m - t."""
        # Section 1: with fewer, two lists could each be confirmed, and a mask be opened in two ways.
        return 2 * self.m // 3 + 1

    @property
    def n_min(self) -> int:
        """Members that are left at the end."""
        # Section 4: in `verified`, t liars can forge values of degree 2t among 3t answers or fewer.
        return max(self.t_mask, 3 * self.t + 1) if self.mode is Mode.VERIFIED else self.t_mask

    @property
    def cap(self) -> float:
        """The largest weight of multi-gradient descent."""
        # Section 1: with the losses: a member at the cap must be covered also after they are gone.
        return 1 / (self.t + 3 + self.losses)

    @property
    def losses(self) -> int:
        """Members that may be lost after MASK: the coordinator chooses coefficients that still cover the others."""
        return self.m // 10

    @property
    def effective_members(self) -> Fraction:
        """E*, the least cover of a member, unless its owner chooses another: max(2, (n_min - t) / 2).

        Equal coefficients of n_min members have twice that cover.
        """
        # Section 3.5: at least 2: below, more than half of what colluders cannot subtract would be one member's.
        return max(Fraction(2), Fraction(self.n_min - self.t, 2))

    @property
    def epsilon(self) -> float:
        """How far a weight may be from its share in plain averaging, by default."""
        return 0.5 / self.m

    @property
    def k(self) -> int:
        """Rows of the sketch S; 0 in mode `sum`, which has none."""
        return 0 if self.mode is Mode.SUM else max(1024, 32 * self.m)


def assumed(roster: int) -> int:
    """Colluders that a member's owner assumes of a pinned roster of N, unless configured: floor((N - 1) / 4)."""
    return (roster - 1) // 4


def smallest_cohort(mode: Mode, assumed: int) -> int:
    """The smallest m with t >= assumed."""
    # Section 1: the inverse of `t`. In a smaller cohort, t would be below what the owner assumes.
    return max(SMALLEST, (4 if mode is Mode.VERIFIED else 3) * assumed + 1)


def truncated(coefficients: Sequence[float]) -> list[int]:
    """Coefficients a as integers A = 2^32 a, truncated towards zero."""
    # Section 2a: towards zero, so the sum of absolute values never exceeds 2^32 by rounding, which members would
    # refuse.
    return [int(a * ONE) for a in coefficients]
