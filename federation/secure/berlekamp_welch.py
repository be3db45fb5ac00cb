"""Correction of wrong shares (Berlekamp and Welch; section 2.6 and 4).

Of n values y_i = f(x_i), deg f = degree, at most e are wrong. The key equation Q(x_i) = y_i E(x_i) with
deg E <= e, deg Q <= degree + e has the solution Q = f E, where E vanishes at the wrong values. Euclid's algorithm on
prod (x - x_i) and the polynomial through all values finds it in O(n^2) steps (Gao, "A new algorithm for decoding
Reed-Solomon codes", 2003). Since n >= degree + 1 + 2 e, at most one polynomial agrees with all but e values: what is
returned is that polynomial, and else nothing. It is the true one if at most e values are wrong. If t values may be
wrong and e <= n - degree - 1 - t, then a false polynomial is never returned (`safe_errors`).

Python's integers are used; the values are shares that the coordinator has received, and the time depends on them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from federation.secure.fields import Elements, Field
from federation.secure.shamir import inconsistent, interpolate

Polynomial = list[int]


@dataclass(frozen=True)
class Decoded:
    """A column of shares that lies on a polynomial, up to some wrong ones.

    Attributes:
        secret: the polynomial's value at 0.
        wrong: positions of the shares that are not on it.
    """

    secret: int
    wrong: frozenset[int]


def safe_errors(n: int, degree: int, t: int) -> int:
    """How many of n answers may be corrected so that t liars never forge a value: min(t, n - degree - 1 - t).

    A forged polynomial agrees with at most `degree` honest answers, and so with at most degree + t in all.

    Raises:
        ValueError: n is so small that t liars could forge a value without any correction.
    """
    # The liars and `degree` honest answers lie on a polynomial of the liars' choice: with so few answers it would pass
    # as true.
    if n < degree + 1 + t:
        raise ValueError(f"{n} answers of degree {degree} can be forged by {t} liars")
    # Section 4: one correction more, and t liars could move a value of an honest dealer to where they want it.
    return min(t, n - degree - 1 - t)


def decode(field: Field, points: Sequence[int], values: Sequence[int], degree: int, errors: int) -> Decoded | None:
    """The polynomial that agrees with all but at most `errors` values, or None if there is none.

    Args:
        field: of the values.
        points: x_i, distinct.
        values: y_i below the modulus.
        degree: of the polynomial.
        errors: e, at most (n - degree - 1) / 2.

    Raises:
        ValueError: more errors than leave one polynomial only.
    """
    n, p = len(points), field.modulus
    # Beyond that, two polynomials can fit, and who looks like a liar would depend on which one is found.
    if errors < 0 or n < degree + 1 + 2 * errors:
        raise ValueError(f"of {n} values of degree {degree}, {errors} wrong ones cannot be corrected")
    product, through = _interpolated(field, points, values)
    before, after, last, factor = product, through, list[int](), [1]
    while 2 * (len(after) - 1) >= n + degree + 1:
        quotient, rest = _divided(before, after, field)
        before, after = after, rest
        last, factor = factor, _less(last, _times(quotient, factor, p), p)
    f, rest = _divided(after, factor, field)
    # No polynomial of this degree is near enough. A quotient that leaves a rest would blame members at random.
    if rest or len(f) > degree + 1:
        return None
    wrong = frozenset(i for i, (x, y) in enumerate(zip(points, values, strict=True)) if _value(f, x, p) != y)
    # Counted again on all values: a quotient that is off in more places than `errors` proves nothing against anybody.
    return Decoded(f[0] if f else 0, wrong) if len(wrong) <= errors else None


def decode_columns(
    field: Field, points: Sequence[int], shares: Elements, degree: int, errors: int
) -> tuple[Decoded | None, ...]:
    """`decode` of each column of shares, (n, r); the others are first tried without the liars seen so far.

    Raises:
        ValueError: more errors than leave one polynomial only.
    """
    # As in `decode`, also where no column needs a correction: else too few answers would pass as long as the lies
    # agree.
    if errors < 0 or len(points) < degree + 1 + 2 * errors:
        raise ValueError(f"of {len(points)} values of degree {degree}, {errors} wrong ones cannot be corrected")
    good = interpolate(field, points, shares, degree, [0])[0]
    columns: list[Decoded | None] = [Decoded(int(value), frozenset()) for value in good]
    left = [int(column) for column in np.flatnonzero(inconsistent(field, points, shares, degree))]
    blame = Counter[int]()
    while left:
        first = columns[left[0]] = decode(field, points, [int(y) for y in shares[:, left[0]]], degree, errors)
        left = left[1:]
        if first and left:
            blame.update(first.wrong)
            order = sorted(range(len(points)), key=lambda i: (blame[i], i))
            trusted = [points[i] for i in order[: degree + 1]]
            values = interpolate(field, trusted, shares[np.ix_(order[: degree + 1], left)], degree, [0, *points])
            off = values[1:] != shares[:, left]
            # Trusted rows are a guess. A column that does not fit it within `errors` is decoded by itself, so a wrong
            # guess blames nobody.
            found = off.sum(axis=0) <= errors
            for i in np.flatnonzero(found):
                columns[left[i]] = Decoded(int(values[0, i]), frozenset(int(row) for row in np.flatnonzero(off[:, i])))
            left = [column for column, known in zip(left, found, strict=True) if not known]
    return tuple(columns)


def _interpolated(field: Field, points: Sequence[int], values: Sequence[int]) -> tuple[Polynomial, Polynomial]:
    """The product of all x - x_i, and the polynomial through all values (Newton's form)."""
    p = field.modulus
    product, through = [1], list[int]()
    for x, y in zip(points, values, strict=True):
        step = (y - _value(through, x, p)) * field.inverse(_value(product, x, p)) % p
        through = _less(through, [-step * c % p for c in product], p)
        product = _times(product, [-x % p, 1], p)
    return product, through


def _value(f: Polynomial, x: int, p: int) -> int:
    total = 0
    for c in reversed(f):
        total = (total * x + c) % p
    return total


def _trimmed(f: Polynomial) -> Polynomial:
    while f and not f[-1]:
        f.pop()
    return f


def _less(f: Polynomial, g: Polynomial, p: int) -> Polynomial:
    size = max(len(f), len(g))
    f, g = f + [0] * (size - len(f)), g + [0] * (size - len(g))
    return _trimmed([(a - b) % p for a, b in zip(f, g, strict=True)])


def _times(f: Polynomial, g: Polynomial, p: int) -> Polynomial:
    out = [0] * (len(f) + len(g))
    for i, a in enumerate(f):
        for j, b in enumerate(g):
            out[i + j] = (out[i + j] + a * b) % p
    return _trimmed(out)


def _divided(f: Polynomial, g: Polynomial, field: Field) -> tuple[Polynomial, Polynomial]:
    p, inverse = field.modulus, field.inverse(g[-1])
    rest, quotient = f[:], [0] * max(0, len(f) - len(g) + 1)
    for i in reversed(range(len(quotient))):
        quotient[i] = c = rest[i + len(g) - 1] * inverse % p
        for j, b in enumerate(g):
            rest[i + j] = (rest[i + j] - c * b) % p
    return _trimmed(quotient), _trimmed(rest)
