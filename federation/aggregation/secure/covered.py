"""The coefficients of a private sum: those of the rule, moved towards plain averaging until every member accepts them.

Every member requires that the others cover it, and that the coefficients suit the algorithm (section 3.5). The
coordinator reserves floor(m / 10) further members, whose masked vectors may be lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from federation.aggregation.interface import TooFewUpdatesError, Vector
from federation.aggregation.secure.settled import Cohort
from federation.secure import bounds
from federation.secure.bounds import Bounds
from federation.secure.thresholds import Thresholds, truncated

_GRID = 64  # the first acceptable s is searched among multiples of 1 / 64, from 1 downwards
_HALVINGS = 26  # then it is found to 2^-32


@dataclass(frozen=True)
class Covered:
    """Coefficients that all members accept.

    Attributes:
        coefficients: of W, in units of 2^-32.
        share: s in c(s) = lambda0 + s (c - lambda0), from 0 to 1: the rule's part in them.
    """

    coefficients: tuple[int, ...]
    share: float


def covered(rule: Bounds, least: Fraction, cohort: Cohort, coefficients: Vector) -> Covered:
    """The coefficients with the largest s for which all members' rules hold.

    They hold for W and for every loss of floor(m / 10) of its members. s need not be unique: the set of acceptable s
    can have gaps. It is the largest multiple of 1/64 that is acceptable, and then the end of the gap-free interval
    above it, to 2^-32.

    Args:
        rule: the bounds of the run's algorithm.
        least: E*.
        cohort: W.
        coefficients: those of the rule, (|W|,), not all 0. They are scaled so that sum |c| = 1.

    Raises:
        TooFewUpdatesError: not even plain averaging is accepted.
    """
    prior = cohort.replies.prior(rule.prior)
    scaled = coefficients / np.abs(coefficients).sum()

    def moved(share: float) -> tuple[int, ...]:
        # Section 3.5: for s = 1 exactly the rule's coefficients, which a mixture would round.
        mixed = scaled if share == 1 else prior + share * (scaled - prior)
        size = float(np.abs(mixed).sum())
        # Section 2a: scaled to a sum of 1, then truncated as members and verifiers expect it: rounded up, the sum could
        # exceed 2^32.
        return tuple(truncated((mixed / size).tolist())) if size else (0,) * len(mixed)

    samples = {reply.client_id: reply.samples for reply in cohort.replies}

    def refused(share: float) -> str:
        coefficients_by_member = dict(zip(cohort.members, moved(share), strict=True))
        return refusal(rule, least, cohort.thresholds, coefficients_by_member, samples)

    # Section 3.5: from 1 downwards on a fixed grid: the set of s has gaps, and a verifier has to find the same one.
    index = next((index for index in range(_GRID, -1, -1) if not refused(index / _GRID)), None)
    # Section 3.5: not even plain averaging suits the members. Asked anyway, each of them would decline.
    if index is None:
        raise TooFewUpdatesError(refused(0.0))
    low, high = index / _GRID, min(1.0, (index + 1) / _GRID)
    # Section 3.5: a fixed number of halvings: every processor ends at the same s.
    for _ in range(_HALVINGS if low < high else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if refused(middle) else (middle, high)
    return Covered(moved(low), low)


def refusal(
    rule: Bounds, least: Fraction, numbers: Thresholds, coefficients: Mapping[str, int], samples: Mapping[str, int]
) -> str:
    """A member's reason to refuse these coefficients, also if floor(m / 10) others are lost; empty if there is none.

    Args:
        rule: the bounds of the run's algorithm.
        least: E*.
        numbers: of the members that are ready.
        coefficients: those of W, by member.
        samples: training samples of the members.
    """
    # Among all losses, that of the members with the largest coefficients leaves the least.
    return bounds.problem(rule, coefficients, samples, numbers) or bounds.uncovered(
        coefficients, numbers.t + numbers.losses, least
    )
