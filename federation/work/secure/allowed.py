"""The bounds of members on the coefficients of a run, from its specification."""

from fractions import Fraction

from federation.secure import bounds
from federation.secure.bounds import BoundKind, Bounds
from federation.secure.thresholds import Thresholds
from federation.spec.run_spec import RunSpec


def known_bounds(spec: RunSpec) -> Bounds | None:
    """The bounds of the run's algorithm; None for an unknown algorithm. It imports no code.

    Raises:
        ValueError: its epsilon is not a number.
    """
    algorithm = spec.algorithm
    values = algorithm.hyperparameters
    return bounds.bounds(algorithm.name, algorithm.prior, values.get("epsilon"), values.get("pre", ()))


def run_bounds(spec: RunSpec) -> Bounds:
    """The bounds of the run's algorithm; the cover alone for an unknown one. Errors as of `known_bounds`."""
    return known_bounds(spec) or Bounds(kind=BoundKind.NONE, prior=spec.algorithm.prior, signed=True)


def least_cover(chosen: float, cohort: Thresholds) -> Fraction:
    """E* of a run: the value of its specification, or the members' default."""
    return Fraction(chosen) if chosen else cohort.effective_members
