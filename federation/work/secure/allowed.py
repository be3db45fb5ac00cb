"""What members allow of the coefficients of a run, from its specification."""

from fractions import Fraction

from federation.secure import bounds
from federation.secure.bounds import BoundKind, Bounds
from federation.secure.thresholds import Thresholds
from federation.spec.run_spec import RunSpec


def known_bounds(spec: RunSpec) -> Bounds | None:
    """What the run's algorithm allows; None for one that is not known here. Nothing that it names is imported.

    Raises:
        ValueError: its epsilon is not a number.
    """
    algorithm = spec.algorithm
    values = algorithm.hyperparameters
    return bounds.bounds(algorithm.name, algorithm.prior, values.get("epsilon"), values.get("pre", ()))


def run_bounds(spec: RunSpec) -> Bounds:
    """What the run's algorithm allows; the cover alone for one that is not known here. Errors as of `known_bounds`."""
    return known_bounds(spec) or Bounds(kind=BoundKind.NONE, prior=spec.algorithm.prior, signed=True)


def least_cover(chosen: float, cohort: Thresholds) -> Fraction:
    """E* of a run: what its specification has chosen, or what members require by default."""
    return Fraction(chosen) if chosen else cohort.effective_members
