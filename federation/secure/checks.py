"""The coordinator's checks of the sum and the Gram matrix in every mode (section 4). A failure voids the session.

all         |R_j| <= 1 + 2^-10;  ||R|| <= 1.01 sum_V |a|
private,    |G_ii - 1| <= 2 / sqrt(k);  least eigenvalue of G >= -(2 sqrt|W| + 6) / (4 sqrt k);
verified    | ||R||^2 - a'Ga | <= (6 sqrt(2/k) + 2 |W| / k) max(a'Ga, sum a^2), if all vectors have length 1; where they
            may be shorter, ||R||^2 - s <= (6 sqrt(2/k) + 2 |W| / k) max(s, sum a^2), s = sum_ij max(0, a_i G_ij a_j)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from federation.secure.blocks import Blocks
from federation.secure.fields import Reals


class Check(StrEnum):
    """The checks by name."""

    ENTRY = "sum-entry"
    LENGTH = "sum-length"
    DIAGONAL = "gram-diagonal"
    EIGENVALUE = "gram-eigenvalue"
    IDENTITY = "sum-gram"
    DEGREE = "share-degree"
    RANGE = "share-range"
    ZERO = "share-zero"
    NORM = "share-norm"
    SUM_SHARES = "sum-shares"
    SECOND_SKETCH = "sum-sketch"


@dataclass(frozen=True)
class Failure:
    """A check that failed.

    Attributes:
        check: its name.
        member: whose value it is, or None for one of all members. This does not blame the member.
        value: the measured value, or None without one.
        limit: the bound of the value.
    """

    check: Check
    member: str | None = None
    value: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        whose = f" of {self.member}" if self.member else ""
        bound = "at least" if self.check is Check.EIGENVALUE else "at most"
        value = f" {self.value:.4g}, {bound} {self.limit:.4g}" if self.value is not None and self.limit else ""
        return f"{self.check}{whose}{value}"


def failures_of_sum(R: Blocks, coefficients: Sequence[float]) -> tuple[list[Failure], float]:
    """Checks R, in blocks, against the coefficients of V; returns the failures and ||R||^2."""
    largest = square = 0.0
    for block in R:
        largest = max(largest, float(np.abs(block).max(initial=0.0)))
        square += float(np.square(block, dtype=np.float64).sum())
    failures = []
    # Section 4: no coordinate of a mean of vectors of length 1 is above 1. A mask that did not cancel shows here.
    if largest > (limit := 1 + 2.0**-10):
        failures.append(Failure(Check.ENTRY, None, largest, limit))
    # Section 4: in mode `sum` the only check against a member that sends a vector that is too long.
    if math.sqrt(square) > (limit := 1.01 * sum(abs(a) for a in coefficients)):
        failures.append(Failure(Check.LENGTH, None, math.sqrt(square), limit))
    return failures, square


def failures_of_gram(G: Reals, W: Sequence[str], k: int) -> list[Failure]:
    """Checks the Gram matrix of sketches of k rows over W, (|W|, |W|)."""
    limit = 2 / math.sqrt(k)
    failures = [
        Failure(Check.DIAGONAL, name, float(value), limit)
        for name, value in zip(W, np.diag(G), strict=True)
        # `not <=`, and not `>`: a value that is no number has to fail.
        if not abs(value - 1) <= limit
    ]
    # Section 4: of G as it was opened. In the matrix that the rule sees, small eigenvalues are lifted, and lies with
    # them.
    least = float(np.linalg.eigvalsh(G)[0])
    if not least >= (limit := -(2 * math.sqrt(len(W)) + 6) / (4 * math.sqrt(k))):
        failures.append(Failure(Check.EIGENVALUE, None, least, limit))
    return failures


def failures_of_identity(
    square: float, G: Reals, coefficients: Reals, k: int, *, shorter: bool = False
) -> list[Failure]:
    """Checks ||R||^2 against the Gram matrix over W, which is of vectors of length 1.

    Args:
        square: ||R||^2.
        G: of W, (|W|, |W|).
        coefficients: a of W in order, 0 for members whose y is not in the sum, (|W|,).
        k: rows of the sketch.
        shorter: the vectors of the sum may be shorter than 1, so ||R||^2 has only an upper bound.
    """
    # Section 4: ties R to G. Elements of OPEN were sent before the coefficients were known, so a longer vector at MASK
    # does not fit them.
    products = np.outer(coefficients, coefficients) * G
    # With a clip, a vector may be shorter than its direction in G. Products below 0 are left out, since a short vector
    # removes less.
    expected = float(np.maximum(products, 0.0).sum() if shorter else products.sum())
    limit = (6 * math.sqrt(2 / k) + 2 * len(G) / k) * max(expected, float(coefficients @ coefficients))
    # Section 4: no lower bound with a clip, or honest short vectors would void every session.
    gap = square - expected if shorter else abs(square - expected)
    return [] if gap <= limit else [Failure(Check.IDENTITY, None, gap, limit)]
