"""The coefficients that a member accepts of a run, as far as it can know them before the sum (section 3.5).

Members, the coordinator and the verifier use the functions of this file. Coefficients are integers A = 2^32 a.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Literal

from federation.secure.cover import least_covered
from federation.secure.thresholds import ONE, Thresholds

SOLVER_TOLERANCE = 2**6
"""Units by which a weight of multi-gradient descent may leave its bounds: 2^-26, what its solver promises."""
_TORCHJD = "torchjd:"  # begins the names of a library's rules, some of which have negative weights


class BoundKind(StrEnum):
    """The bound on a single coefficient, besides the cover of every member."""

    ONE = "one"  # all are 1, not 2^-32: the sum is one of integers
    EQUAL = "equal"  # all are floor(2^32 / |W|)
    FIXED = "fixed"  # lambda0, plus or minus one unit
    BOX = "box"  # within epsilon of lambda0, and at most the cap
    CAP = "cap"  # at most the cap
    NONE = "none"  # nothing


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of a run's algorithm on coefficients.

    Attributes:
        kind: of the bounds.
        prior: of lambda0: 1 / |W|, or in proportion to the training samples.
        epsilon: of BOX; None for 0.5 / |W|.
        signed: True if coefficients may be negative.
    """

    kind: BoundKind
    prior: Literal["uniform", "samples"] = "uniform"
    epsilon: float | None = None
    signed: bool = False


EVALUATION = Bounds(kind=BoundKind.EQUAL)
"""The coefficients of a private evaluation."""
INTEGERS = Bounds(kind=BoundKind.ONE)
"""The coefficients of private statistics: the sum itself. No other session can have these coefficients."""

_KINDS = {
    **dict.fromkeys(("fedavg", "fedavg-n", "scalarised", "fsmgda", "fedcmoo", "fedcmoo-pref"), BoundKind.FIXED),
    **dict.fromkeys(("fedmgda", "fedmgda+auto"), BoundKind.CAP),
    "fedmgda+": BoundKind.BOX,
    **dict.fromkeys(
        ("afl", "fedfa", "q-fedavg", "adafed", "fedfv", "dual-cone", "nash-mtl", "multi-krum"), BoundKind.NONE
    ),
    **dict.fromkeys(("geometric-median", "centred-clipping"), BoundKind.NONE),
}
# Section 3.5, rule 3: any other name here lets a coordinator ask for differences of members' vectors.
_SIGNED = frozenset({"adafed"})


def bounds(
    algorithm: str, prior: Literal["uniform", "samples"], epsilon: object, stages: Sequence[object]
) -> Bounds | None:
    """The bounds of an algorithm on coefficients; None for an unknown algorithm.

    Args:
        algorithm: its name in the run's specification. No code is imported.
        prior: of the specification.
        epsilon: of the specification; None or "auto" for the default.
        stages: before the rule. With stages, weights of the rule are not those of the members.
    """
    # Section 3.5: by the name alone. To look into the rule, its code would have to be imported, and the coordinator
    # chose the name.
    if is_plugged_in(algorithm) or algorithm.startswith(_TORCHJD):
        return Bounds(kind=BoundKind.NONE, prior=prior, signed=algorithm.startswith(_TORCHJD))
    kind = _KINDS.get(algorithm)
    # Section 3.5: an unknown name has no bounds, so it must be declined: any coefficients could be said to suit it.
    if kind is None:
        return None
    width = None if epsilon in (None, "auto") else float(epsilon)  # type: ignore[arg-type] # a number of a specification
    # Section 3.5: stages mix the rows before the rule, so the bounds of the rule's weights do not bound those of
    # members.
    if stages:
        kind = BoundKind.NONE
    return Bounds(kind=kind, prior=prior, epsilon=width if kind is BoundKind.BOX else None, signed=algorithm in _SIGNED)


def is_plugged_in(algorithm: str) -> bool:
    """True for an algorithm outside this project by its name, "module:Class"."""
    return ":" in algorithm and not algorithm.startswith(_TORCHJD)


def problem(rule: Bounds, coefficients: Mapping[str, int], samples: Mapping[str, int], cohort: Thresholds) -> str:
    """The problem of the coefficients of W at MASK, besides the cover of members; empty without one.

    Args:
        rule: the bounds of the run's algorithm.
        coefficients: of all members of W.
        samples: training samples that the members have claimed at READY; read where the prior needs them.
        cohort: the numbers of U1.
    """
    total, members = sum(map(abs, coefficients.values())), len(coefficients)
    if rule.kind is BoundKind.ONE:
        # Section 2e: exactly 1: any other integer would mark one member's numbers in the sum.
        return next((f"the coefficient of {name} is {a}, not 1" for name, a in coefficients.items() if a != 1), "")
    # Section 3.5, rule 2: no slack on either side. With small coefficients, the rounding to 28 bits would hide or show
    # parts of a vector.
    if not ONE - members <= total <= ONE:
        return f"the coefficients add up to {total / ONE:.9f}, not to 1"
    # Section 3.5, rule 3: two sums that differ in the sign of one coefficient show the vector of its member (section
    # 5).
    if not rule.signed and (below := [name for name, a in coefficients.items() if a < 0]):
        return f"the coefficient of {below[0]} is negative; this algorithm has none that are"
    # After rules 2 and 3, which hold for every algorithm; the caller checks rule 1, the cover.
    if rule.kind is BoundKind.NONE:
        return ""
    prior = _prior(rule, coefficients, samples)
    for name, a in coefficients.items():
        # Section 3.5, rule 4: integers and fractions. Rounded, a coordinator could find coefficients at the bound that
        # some members accept.
        low, high = _interval(rule, prior[name], members, cohort)
        if not low <= a <= high:
            between = f"{float(low) / ONE:.9f} and {float(high) / ONE:.9f}"
            return f"the coefficient of {name} is {a / ONE:.9f}; this algorithm's are between {between}"
    return ""


def uncovered(coefficients: Mapping[str, int], t: int, least: Fraction) -> str:
    """The text about a member whose vector the others' do not hide; empty if all are hidden."""
    name = least_covered(coefficients, t, least)
    if name is None:
        return ""
    share = abs(coefficients[name]) / max(1, sum(map(abs, coefficients.values())))
    return (
        f"{name} has {share:.3f} of the coefficients, too large a part: {t} colluding members could subtract what they "
        f"know from the sum, and fewer than {float(least):g} effective members would be left"
    )


def _prior(rule: Bounds, coefficients: Mapping[str, int], samples: Mapping[str, int]) -> dict[str, Fraction]:
    """lambda0 of each member, in units of 2^-32."""
    # Section 2b: an evaluation weighs all alike, also in a run with prior "samples": a member with more weight would
    # stand out.
    if rule.kind is BoundKind.EQUAL or rule.prior == "uniform":
        return dict.fromkeys(coefficients, Fraction(ONE, len(coefficients)))
    # Section 3.5: the part of the samples of W. Over all of U1, the coefficients that are allowed would not add up to
    # 1.
    total = sum(samples[name] for name in coefficients)
    return {name: Fraction(ONE * samples[name], total) for name in coefficients}


def _interval(rule: Bounds, prior: Fraction, members: int, cohort: Thresholds) -> tuple[Fraction, Fraction]:
    """The smallest and the largest coefficient of a member with this lambda0."""
    # Section 3.5, rule 4: exactly. No rule gives other weights here, so a difference would only single a member out.
    if rule.kind is BoundKind.EQUAL:
        return Fraction(prior // 1), Fraction(prior // 1)
    if rule.kind is BoundKind.FIXED:
        return Fraction(prior // 1 - 1), Fraction(prior // 1 + 1)
    # Section 1: so at least t + 3 + floor(m/10) members share the sum, and three are left beside colluders and losses.
    cap = Fraction(cohort.cap) * ONE
    if rule.kind is BoundKind.CAP:
        return Fraction(0), cap + SOLVER_TOLERANCE
    epsilon = (Fraction(1, 2 * members) if rule.epsilon is None else Fraction(rule.epsilon)) * ONE
    return min(prior - epsilon, cap) - SOLVER_TOLERANCE, min(prior + epsilon, cap) + SOLVER_TOLERANCE
