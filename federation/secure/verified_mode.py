"""Mode `verified`: shares of a second sketch, and what they prove (sections 2.7, 2.8 and 4).

CONFIRM: member h shares over the points of V in F_q: T u_h (degree t), a zero z (2t), a random b (t), another zero b'
(2t) and 32 integers y (t), uniform from -2^24 to 2^24. A ciphertext holds a member's 256 shares of T u_h, then those of
z, b, b' and y. UNMASK: member i answers, for each dealer h of V, with the challenge rho, s, E from tau2,

    ||x_h(i)||^2 + z_h(i)        a codeword of degree 2t, ||T u_h||^2 at 0
    <rho, x_h(i)> + b_h(i)       a codeword of degree t
    s z_h(i) + b'_h(i)           a codeword of degree 2t, 0 at 0
    E x_h(i) + y_h(i)            32 codewords of degree t, at 0 between -(2^24 + 2^19) and 2^24 + 2^19

and once sum_h A_h x_h(i), which is sum_h A_h T u_h at 0. Of n answers min(t, n - degree - 1 - t) wrong ones are
corrected; t liars among 3t+1 never forge a value. A dealer is named for its degree value and its projections if
n >= 3t+1, for its zero and norm if n >= 4t+1: then t errors could be corrected. With fewer answers one liar would make
every honest dealer look bad. A member is named that is corrected for more than t dealers, in values that could name a
dealer. A failing sum names nobody.

The projections bound each element of x_h. Without them the norm proves nothing: mod q, x = A^-1 (A s t + e) with a
tiny e gives the right share of the sum for an update of length s, and a suitable e makes ||x||^2 small although x is
not. E is 32 x 256 with entries -1, 0, 1 (probabilities 1/4, 1/2, 1/4), unknown when x_h and y_h are shared. If an
element of x_h is above 2 (2^24 + 2^19) in absolute value, then each projection passes with probability at most 1/2
for every y_h, and all with at most 2^-32. If none is, then ||x_h||^2 < 2^59 and sum_h A_h x_h < 2^58 are true of
integers, not only mod q. y hides the projections of an honest dealer: they are of size 2^16, so 32 of them show
anything with probability 0.04.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from federation.secure.berlekamp_welch import Decoded, decode_columns, safe_errors
from federation.secure.checks import Check, Failure
from federation.secure.derivation import Purpose, challenge_key, own
from federation.secure.encryption import TAG
from federation.secure.fields import F_Q, Elements, Reals
from federation.secure.payloads import CheckAnswers
from federation.secure.shamir import share
from federation.secure.streams import Stream
from federation.secure.thresholds import (
    COEFFICIENT_BITS,
    RANGE_LIMIT,
    RANGE_NOISE,
    RANGE_TESTS,
    SUM_BITS,
    T_BITS,
    T_ROWS,
)
from federation.secure.wire import pack, unpack

NORM_LIMIT = 1.55
"""The largest ||T u||^2: a false alarm has probability 3e-8 (chi-square of 256 degrees of freedom)."""


@dataclass(frozen=True, eq=False)
class CheckShares:
    """The shares of one member from a dealer after CONFIRM, in mode `verified`.

    Attributes:
        values: T u, z, b, b', y in this order, (291,) in F_q.
    """

    values: Elements

    @property
    def sketch(self) -> Elements:
        """T u, (256,)."""
        return self.values[:T_ROWS]

    @property
    def z(self) -> Elements:
        """A zero, which hides the other coefficients of the norm, (1,)."""
        return self.values[T_ROWS : T_ROWS + 1]

    @property
    def b(self) -> Elements:
        """A random element, which blinds the test of the degree, (1,)."""
        return self.values[T_ROWS + 1 : T_ROWS + 2]

    @property
    def b_zero(self) -> Elements:
        """b': another zero, which blinds the test of z, (1,)."""
        return self.values[T_ROWS + 2 : T_ROWS + 3]

    @property
    def y(self) -> Elements:
        """Integers that hide projections of T u, (32,)."""
        return self.values[T_ROWS + 3 :]

    def to_bytes(self) -> bytes:
        """The plaintext."""
        return pack(F_Q, self.values)

    @classmethod
    def from_bytes(cls, plaintext: bytes) -> "CheckShares":
        """Reads a plaintext.

        Raises:
            Malformed: a wrong length, or an element at or above the modulus.
        """
        return cls(unpack(F_Q, plaintext, T_ROWS + 3 + RANGE_TESTS))


def confirm_bytes() -> int:
    """The length of a ciphertext of CONFIRM."""
    return (T_ROWS + 3 + RANGE_TESTS) * F_Q.width + TAG


@dataclass(frozen=True, eq=False)
class Challenge:
    """The challenge that follows from tau2.

    Attributes:
        rho: (256,) in F_q.
        s: (1,) in F_q.
        E: -1, 0 and 1 in F_q, (32, 256).
    """

    rho: Elements
    s: Elements
    E: Elements


@dataclass(frozen=True, eq=False)
class ShareFindings:
    """The findings from the answers about the shares of CONFIRM.

    Attributes:
        norms: ||T u_h||^2 by dealer; None without a codeword.
        sums: sum_V a_h T u_h, (256,), or None without codewords.
        failures: those that void the session.
        corrected: dealers for which a member's answers were wrong, by member; those without are left out.
        named: members, each with the reason.
    """

    norms: Mapping[str, float | None]
    sums: Reals | None
    failures: tuple[Failure, ...]
    corrected: Mapping[str, frozenset[str]]
    named: Mapping[str, str]


def check_shares(
    sketch: Elements, points: Sequence[int], t: int, secret: bytes, final: bytes
) -> tuple[CheckShares, ...]:
    """The shares that a member deals at CONFIRM, one for each point.

    Args:
        sketch: T u with 16 fractional bits, (256,) in F_q.
        points: x_j of the members of V.
        t: of the cohort.
        secret: the member's own secret of the session, from which all coefficients follow.
        final: the last view.
    """
    # Section 2a: all coefficients from one stream, in the order below, so a repeated question deals the same shares.
    stream, zero = Stream(own(secret, Purpose.CHECK_SHARES, final)), np.zeros(1, np.uint64)
    rows = np.hstack(
        [
            share(F_Q, sketch, t, points, stream),
            share(F_Q, zero, 2 * t, points, stream),  # z: without it, the norms show more of the sketch than its length
            share(F_Q, stream.elements(F_Q, 1), t, points, stream),  # b: without it, rho x shows the sketch
            share(F_Q, zero, 2 * t, points, stream),  # b': without it, the zero value shows z, which then hides nothing
            share(F_Q, F_Q.encode(stream.centred(RANGE_NOISE, RANGE_TESTS)), t, points, stream),
        ]
    )
    return tuple(CheckShares(row) for row in rows)


def challenge(tau2: bytes) -> Challenge:
    """All from one stream: rho, s, then two bits for each entry of E by rows, highest bit of a byte first.

    An entry is the first bit less the second one.
    """
    # Section 2.8: from tau2, which is shown after the shares were dealt. A dealer that knew rho, s and E could deal
    # shares that pass.
    stream = Stream(challenge_key(tau2))
    rho, s = stream.elements(F_Q, T_ROWS), stream.elements(F_Q, 1)
    bits = np.unpackbits(np.frombuffer(stream.read(RANGE_TESTS * T_ROWS // 4), np.uint8)).astype(np.int64)
    return Challenge(rho, s, F_Q.encode(bits[::2] - bits[1::2]).reshape(RANGE_TESTS, T_ROWS))


def check_answers(shares: Sequence[CheckShares], coefficients: Sequence[int], challenge: Challenge) -> CheckAnswers:
    """A member's answers at UNMASK.

    Args:
        shares: those that it holds from each dealer of V, in order.
        coefficients: A = 2^32 a of V, in order.
        challenge: rho, s and E.
    """
    X = np.stack([held.sketch for held in shares])
    z, b, b_zero = (np.concatenate(column) for column in zip(*((h.z, h.b, h.b_zero) for h in shares), strict=True))
    A = F_Q.encode(np.array(coefficients, np.int64))
    return CheckAnswers(
        norms=F_Q.add(np.diag(F_Q.matmul(X, X.T)), z),
        degrees=F_Q.add(F_Q.matmul(X, challenge.rho[:, None])[:, 0], b),
        zeros=F_Q.add(F_Q.mul(z, challenge.s), b_zero),
        projections=F_Q.add(F_Q.matmul(X, challenge.E.T), np.stack([held.y for held in shares])),
        # Section 2.8: one sum over all dealers. A value for each dealer would show each sketch.
        sums=F_Q.matmul(A[None, :], X)[0],
    )


def examine(points: Mapping[str, int], answers: Mapping[str, CheckAnswers], V: Sequence[str], t: int) -> ShareFindings:
    """Derives the findings from the answers.

    Args:
        points: x_j of those that answered, by id.
        answers: their answers, by id.
        V: the dealers, sorted.
        t: of the cohort.

    Raises:
        ValueError: fewer than 3t+1 answers.
    """
    ids = sorted(answers)
    xs, n = [points[name] for name in ids], len(ids)

    def decoded(columns: Sequence[Elements], degree: int) -> tuple[Decoded | None, ...]:
        # Section 4: no more corrections than are safe: with more, t liars could forge the value of a dealer.
        return decode_columns(F_Q, xs, np.stack(columns), degree, safe_errors(n, degree, t))

    given = [answers[name] for name in ids]
    degrees = decoded([answer.degrees for answer in given], t)
    zeros = decoded([answer.zeros for answer in given], 2 * t)
    norms = decoded([answer.norms for answer in given], 2 * t)
    projections = decoded([answer.projections.reshape(-1) for answer in given], t)
    sums = [column.secret for column in decoded([answer.sums for answer in given], t) if column]

    squares = {
        name: _real(column.secret, 2 * T_BITS) if column else None for name, column in zip(V, norms, strict=True)
    }
    # Section 4: shares on no polynomial of degree t give each group of members another sketch, so the values below
    # would mean nothing.
    failures = [Failure(Check.DEGREE, name) for name, column in zip(V, degrees, strict=True) if not column]
    for h, name in enumerate(V):
        columns = projections[RANGE_TESTS * h : RANGE_TESTS * (h + 1)]
        # Section 4: without the range, an element mod q can have a small square and still stand for a long vector.
        if not all(column and abs(_signed(column.secret)) <= RANGE_LIMIT for column in columns):
            failures.append(Failure(Check.RANGE, name))
    # Section 4: of all dealers together, so it names nobody.
    if len(sums) < T_ROWS:
        failures.append(Failure(Check.SUM_SHARES))
    blame = {failure.member: str(failure.check) for failure in reversed(failures) if failure.member}
    # Section 4: a z that is not 0 at 0 would lower the dealer's norm by as much.
    weighty = [Failure(Check.ZERO, name) for name, column in zip(V, zeros, strict=True) if not column or column.secret]
    for name, square in squares.items():
        # Section 4: below 0, too: read as a signed number, a forged square can be negative.
        if square is None or not 0 <= square <= NORM_LIMIT:
            weighty.append(Failure(Check.NORM, name, square, NORM_LIMIT))
    counted = [degrees, *(projections[row::RANGE_TESTS] for row in range(RANGE_TESTS))]
    # Section 4: values of degree 2t name somebody only if t errors could have been corrected. Else one liar makes every
    # honest dealer look bad.
    if n >= 4 * t + 1:
        blame = {failure.member: str(failure.check) for failure in weighty if failure.member} | blame
        counted += [zeros, norms]
    corrected = {
        name: frozenset(
            V[h] for columns in counted for h, column in enumerate(columns) if column and place in column.wrong
        )
        for place, name in enumerate(ids)
    }
    # Section 4: more than t: up to t dealers may have handed the member wrong shares, about which its honest answers
    # are wrong.
    blame |= {name: "wrong-answers" for name, dealers in corrected.items() if len(dealers) > t and name not in blame}
    return ShareFindings(
        norms=squares,
        sums=np.array([_real(value, T_BITS + COEFFICIENT_BITS) for value in sums]) if len(sums) == T_ROWS else None,
        failures=(*failures, *weighty),
        corrected={name: dealers for name, dealers in corrected.items() if dealers},
        named=blame,
    )


def failures_of_second_sketch(TR: Reals, sums: Reals, d: int, m: int) -> list[Failure]:
    """Checks ||T R - sum_V a_h T u_h|| <= 8 (2^-28 sqrt(d m / 12) + 2^-16 sqrt(k' / 12)), both (256,)."""
    limit = 8 * (2.0**-SUM_BITS * math.sqrt(d * m / 12) + 2.0**-T_BITS * math.sqrt(T_ROWS / 12))
    gap = float(np.linalg.norm(TR - sums))
    # Section 4: ties the masked vectors to the sketches that were checked. Without it, a member could share one vector
    # and mask another.
    return [] if gap <= limit else [Failure(Check.SECOND_SKETCH, None, gap, limit)]


def _signed(element: int) -> int:
    return element - F_Q.modulus if element > F_Q.modulus // 2 else element


def _real(element: int, bits: int) -> float:
    return math.ldexp(_signed(element), -bits)
