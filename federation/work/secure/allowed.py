"""The bounds of members on the coefficients of a run, from its specification."""

from fractions import Fraction

from federation.secure import bounds
from federation.secure.bounds import BoundKind, Bounds
from federation.secure.thresholds import Thresholds
from federation.spec.run_spec import RunSpec


def known_bounds(spec: RunSpec, *, by_name: bool = False) -> Bounds | None:
    """The bounds of the run's algorithm; None for an unknown algorithm. It imports no code.

    `by_name` is True if the owner allows the algorithm by its name. If members know nothing of it, the cover alone then
    bounds its coefficients, which may be negative.

    Raises:
        ValueError: its epsilon is not a number.
    """
    algorithm = spec.algorithm
    values = algorithm.hyperparameters
    known = bounds.bounds(algorithm.name, algorithm.prior, values.get("epsilon"), values.get("pre", ()))
    # Section 3.5: only by the owner's word. From the coordinator, a name that nobody knows would free all coefficients
    # but for the cover.
    if by_name and (known is None or bounds.is_plugged_in(algorithm.name)):
        return _cover_alone(spec)
    return known


def run_bounds(spec: RunSpec) -> Bounds:
    """The bounds of members whose owners allow the run's algorithm by name. Errors as of `known_bounds`."""
    return known_bounds(spec, by_name=True) or _cover_alone(spec)


def _cover_alone(spec: RunSpec) -> Bounds:
    return Bounds(kind=BoundKind.NONE, prior=spec.algorithm.prior, signed=True)


def is_unknown(spec: RunSpec) -> bool:
    """True if members know nothing of the run's algorithm, as of a plug-in."""
    return bounds.is_plugged_in(spec.algorithm.name) or known_bounds(spec) is None


def least_cover(chosen: float, cohort: Thresholds) -> Fraction:
    """E* of a run: the value of its specification, or the members' default."""
    # Section 3.5: exact. A rounded E* would let two sides disagree about the same coefficients.
    return Fraction(chosen) if chosen else cohort.effective_members
