"""The cover of a member in a weighted sum: how far the other members' vectors hide its own.

Members and the coordinator use the functions of this file, so all arithmetic is exact. Coefficients are integers
A = 2^32 a.
"""

import math
from collections.abc import Mapping
from fractions import Fraction


def cover(coefficients: Mapping[str, int], member: str, t: int) -> Fraction | float:
    """E_i = 1 + the sum of A_j^2 / A_i^2 over the other members j, without the t with the largest |A_j|.

    For uncorrelated vectors of length 1, the part of the sum that t colluders cannot subtract has a cosine of at most
    1 / sqrt(E_i) with the member's own vector. Infinite where the member's coefficient is 0.

    Raises:
        KeyError: the member has no coefficient.
    """
    own = coefficients[member] ** 2
    # Section 3.5: infinite at 0, where nothing of the member is in the sum.
    return Fraction(own + _squares(coefficients, member, t), own) if own else math.inf


def covers(coefficients: Mapping[str, int], member: str, t: int, least: Fraction) -> bool:
    """True if the cover of a member is at least `least`: (least - 1) A_i^2 <= the sum of the others' A_j^2.

    Raises:
        KeyError: the member has no coefficient.
    """
    return _enough(coefficients[member] ** 2, _squares(coefficients, member, t), least)


def least_covered(coefficients: Mapping[str, int], t: int, least: Fraction) -> str | None:
    """The member with the largest |A_i|, the first by name among equals, if it is not covered; None if all are.

    The cover of every other member is at least as large.
    """
    # Section 3.5: by name among equals, so that members, coordinator and verifiers name the same one.
    member = min(coefficients, key=lambda name: (-abs(coefficients[name]), name))
    return None if covers(coefficients, member, t, least) else member


def _enough(own: int, others: int, least: Fraction) -> bool:
    # Section 3.5: exact integers. In floating point, two sides could disagree at the bound, and one would confirm what
    # the other refuses.
    return (least.numerator - least.denominator) * own <= least.denominator * others


def _squares(coefficients: Mapping[str, int], member: str, t: int) -> int:
    """The sum of A_j^2 over the others, without the t largest."""
    # Section 3.5: without the t largest others: these may be the colluders, who subtract what they know.
    ordered = sorted(a * a for name, a in coefficients.items() if name != member)
    return sum(ordered[: max(0, len(ordered) - t)])
