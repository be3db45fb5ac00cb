"""Shamir's secret sharing over F_p and F_q (sections 1 and 2).

Member j holds f(x_j), where x_j = 1, 2, ... is its position in sorted U1, f is a polynomial of the given degree and
f(0) is the secret. Many secrets are shared at once: a row for each member, a column for each secret.
The Lagrange weights are Python integers, computed from points, which are public.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from federation.secure.fields import Elements, Field
from federation.secure.streams import Stream


def share(field: Field, secrets: Elements, degree: int, points: Sequence[int], stream: Stream) -> Elements:
    """The shares of secrets, (n, r).

    Args:
        field: of secrets and shares.
        secrets: f(0) of each column, (r,).
        degree: of f; any `degree` shares are uniform, whatever the secret.
        points: x_j of the n members.
        stream: gives degree r elements: the coefficients of x for all columns, then those of x^2, ...
    """
    # Uniform elements: with biased ones, `degree` shares would tell something of the secret.
    coefficients = stream.elements(field, degree * len(secrets)).reshape(degree, len(secrets))
    return field.matmul(powers(field, points, degree), np.vstack([secrets[None, :], coefficients]))


def powers(field: Field, points: Sequence[int], degree: int) -> Elements:
    """x^0 ... x^degree of each point, (n, degree + 1)."""
    exponents = range(degree + 1)
    return np.array([[pow(x, exponent, field.modulus) for exponent in exponents] for x in _distinct(points)], np.uint64)


def weights(field: Field, points: Sequence[int], at: int = 0) -> Elements:
    """The Lagrange weights, (n,): f(at) = sum_j w_j f(x_j) for each f of degree below n."""
    values = []
    for x in _distinct(points):
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * (at - other) % field.modulus
                denominator = denominator * (x - other) % field.modulus
        values.append(numerator * field.inverse(denominator) % field.modulus)
    return np.array(values, np.uint64)


def interpolate(field: Field, points: Sequence[int], shares: Elements, degree: int, at: Sequence[int]) -> Elements:
    """The values at some points of the polynomials through the first degree + 1 shares, (len(at), r).

    Raises:
        ValueError: there are fewer shares.
    """
    # Fewer shares fit every secret: interpolation would return one of them, and no error.
    if len(points) != len(shares) or len(points) <= degree:
        raise ValueError(f"{degree + 1} shares are needed; there are {len(shares)} at {len(points)} points")
    base = points[: degree + 1]
    rows = [weights(field, base, x) for x in at]
    return field.matmul(np.array(rows, np.uint64).reshape(len(rows), degree + 1), shares[: degree + 1])


def inconsistent(field: Field, points: Sequence[int], shares: Elements, degree: int) -> NDArray[np.bool_]:
    """Marks the columns that do not lie on a polynomial of this degree, (r,)."""
    # The first shares fix the polynomial; each further one has to lie on it, or somebody has lied.
    rest = points[degree + 1 :]
    off: NDArray[np.bool_] = (interpolate(field, points, shares, degree, rest) != shares[degree + 1 :]).any(axis=0)
    return off


def _distinct(points: Sequence[int]) -> Sequence[int]:
    # At 0, a share is the secret itself. An equal point would count one member's share as two.
    if len(set(points)) < len(points) or any(x < 1 for x in points):
        raise ValueError(f"points are positive and distinct; got {list(points)}")
    return points
