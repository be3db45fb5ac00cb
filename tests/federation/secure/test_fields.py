"""Arithmetic of the private round: fields, elements on the wire, streams, shares, correction of wrong shares."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from federation.secure.berlekamp_welch import decode, decode_columns, safe_errors
from federation.secure.errors import Fault
from federation.secure.fields import F_P, F_Q, Elements, Field, fixed
from federation.secure.shamir import inconsistent, interpolate, share, weights
from federation.secure.streams import Stream
from federation.secure.wire import pack, unpack
from tests.federation.secure.scene import refused

FIELDS = pytest.mark.parametrize("field", [F_P, F_Q], ids=["p", "q"])


def extremes(field: Field) -> list[int]:
    p = field.modulus
    near = [0, 1, 2, 2**21 - 1, 2**21, 2**30, 2**31 - 2, p // 2, p // 2 + 1, p - 2, p - 1]
    return sorted({x for x in near if x < p})


def pairs(field: Field) -> tuple[list[int], list[int]]:
    """All pairs of extreme values, and random ones."""
    drawn = [int(x) for x in Stream(b"pairs of random elements, 32 byt").elements(field, 2000)]
    values = extremes(field)
    return [x for x in values for _ in values] + drawn[:1000], values * len(values) + drawn[1000:]


# --- fields


@FIELDS
def test_sums_differences_and_products_equal_those_of_python(field: Field) -> None:
    left, right = pairs(field)
    x, y = np.array(left, np.uint64), np.array(right, np.uint64)
    for found, exact in (
        (field.add(x, y), [a + b for a, b in zip(left, right, strict=True)]),
        (field.sub(x, y), [a - b for a, b in zip(left, right, strict=True)]),
        (field.mul(x, y), [a * b for a, b in zip(left, right, strict=True)]),
    ):
        assert found.tolist() == [value % field.modulus for value in exact]


@FIELDS
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 5, 4), (7, 300, 2), (2, 2047, 1), (1, 2048, 2), (1, 2049, 1), (1, 5000, 2)]
)
def test_products_of_matrices_equal_those_of_python(field: Field, shape: tuple[int, int, int]) -> None:
    n, inner, r = shape
    stream = Stream(b"the elements of two big matrices")
    drawn = stream.elements(field, n * inner).reshape(n, inner), stream.elements(field, inner * r).reshape(inner, r)
    largest = tuple(np.full_like(factor, field.modulus - 1) for factor in drawn)
    for A, B in (drawn, largest):
        rows, columns = A.tolist(), B.T.tolist()
        exact = [[sum(a * b for a, b in zip(row, c, strict=True)) % field.modulus for c in columns] for row in rows]
        assert field.matmul(A, B).tolist() == exact


@FIELDS
def test_an_inverse_times_its_element_is_one(field: Field) -> None:
    for x in extremes(field)[1:]:
        assert field.inverse(x) * x % field.modulus == 1
    for zero in (0, field.modulus):
        with pytest.raises(ZeroDivisionError):
            field.inverse(zero)


@FIELDS
def test_integers_up_to_half_the_modulus_are_encoded_and_decoded(field: Field) -> None:
    half = field.modulus // 2
    values = np.array([-half, -half + 1, -1, 0, 1, half - 1, half])
    assert field.decode(field.encode(values)).tolist() == values.tolist()
    assert field.encode(np.array([-1]))[0] == field.modulus - 1
    for beyond in (half + 1, -half - 1):
        with refused(Fault.RANGE):
            field.encode(np.array([beyond]))


def test_fixed_point_rounds_half_to_even() -> None:
    assert fixed(np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 3.51]) / 4, 2).tolist() == [0, 2, 2, 0, -2, 0, 4]


@pytest.mark.parametrize(
    ("value", "fault"), [(np.nan, Fault.NON_FINITE), (np.inf, Fault.NON_FINITE), (2.0**48, Fault.RANGE)]
)
def test_a_value_without_fixed_point_is_refused(value: float, fault: Fault) -> None:
    with refused(fault):
        fixed(np.array([0.0, value]), 14)


# --- the wire


@FIELDS
def test_elements_on_the_wire_are_little_endian_words_below_the_modulus(field: Field) -> None:
    values = np.array(extremes(field), np.uint64)
    data = pack(field, values)
    assert data == b"".join(int(x).to_bytes(field.width, "little") for x in values)
    assert unpack(field, data, len(values)).tolist() == values.tolist()
    for length in (len(data) - 1, len(data) + 1, len(data) + field.width, 0):
        with refused(Fault.LENGTH):
            unpack(field, data[:length].ljust(length, b"\0"), len(values))
    for bad in (field.modulus, field.modulus + 1, 2 ** (8 * field.width) - 1):
        with refused(Fault.ELEMENT):
            unpack(field, data[: -field.width] + bad.to_bytes(field.width, "little"), len(values))


# --- streams


def test_a_stream_is_the_same_however_it_is_read() -> None:
    key = bytes(range(32))
    whole = Stream(key).read(4000)
    stream = Stream(key)
    assert b"".join(stream.read(count) for count in (1, 15, 16, 17, 951, 3000)) == whole
    assert Stream(key).words(1000).tobytes() == whole
    assert (
        whole[:16].hex() == "f29000b62a499fd0a9f39a6add2e7780"
    )  # AES-256 of a zero block, computed with OpenSSL's command


class Rigged(Stream):
    """A stream of given bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, count: int) -> bytes:
        taken, self.data = self.data[:count], self.data[count:]
        assert len(taken) == count
        return taken


@FIELDS
def test_words_equal_to_the_modulus_are_skipped_and_no_word_too_many_is_read(field: Field) -> None:
    p, width = field.modulus, field.width
    words = [p, 5, p + 1, p, 2 * p + 1, p - 1, 7]  # 2 p + 1 has the lowest bits of p, p + 1 those of 0
    stream = Rigged(b"".join(word.to_bytes(width, "little") for word in words))
    assert stream.elements(field, 3).tolist() == [5, 0, p - 1]
    assert stream.data == (7).to_bytes(width, "little")


def test_centred_integers_are_uniform_on_both_sides_of_zero() -> None:
    from scipy.stats import chi2

    for bound in (0, 1, 3, 4, 10):
        drawn = Stream(b"centred integers from this key..").centred(bound, 5000)
        counts = np.bincount(drawn + bound, minlength=2 * bound + 1)
        assert len(counts) == 2 * bound + 1
        expected = 5000 / len(counts)
        assert chi2.sf(((counts - expected) ** 2 / expected).sum(), max(1, 2 * bound)) > 1e-3


# --- shares

KEY = b"the coefficients of polynomials."


@FIELDS
def test_any_shares_of_one_more_than_the_degree_give_the_secrets(field: Field) -> None:
    secrets, points = np.array(extremes(field), np.uint64), [1, 2, 3, 5, 8]
    shares = share(field, secrets, 2, points, Stream(KEY))
    for chosen in combinations(range(5), 3):
        some = [points[i] for i in chosen]
        assert interpolate(field, some, shares[list(chosen)], 2, [0])[0].tolist() == secrets.tolist()
        assert interpolate(field, some, shares[list(chosen)], 2, points).tolist() == shares.tolist()
    with pytest.raises(ValueError, match="3 shares are needed"):
        interpolate(field, points[:2], shares[:2], 2, [0])


@FIELDS
def test_a_wrong_share_is_seen_when_there_is_one_more(field: Field) -> None:
    secrets, points = np.arange(4, dtype=np.uint64), [1, 2, 3, 4]
    shares = share(field, secrets, 2, points, Stream(KEY))
    shares[3, 1] = (shares[3, 1] + np.uint64(1)) % np.uint64(field.modulus)
    assert inconsistent(field, points, shares, 2).tolist() == [False, True, False, False]


def test_points_are_positive_and_distinct() -> None:
    for points in ([1, 1, 2], [0, 1, 2]):
        with pytest.raises(ValueError, match="positive and distinct"):
            weights(F_P, points)


def apart(field: Field, degree: int, points: Sequence[int], secrets: tuple[int, int]) -> float:
    """The probability of so unequal shares at two points, if the secret does not matter (chi-square, 8 by 8 bins)."""
    from scipy.stats import chi2_contingency

    tables = []
    for secret, key in zip(secrets, (b"a" * 32, b"b" * 32), strict=True):
        shares = share(field, np.full(20_000, secret, np.uint64), degree, points, Stream(key))
        bins = (shares >> np.uint64(field.bits - 3)).astype(np.int64)
        tables.append(np.bincount(8 * bins[0] + bins[1], minlength=64))
    return float(chi2_contingency(np.array(tables)[:, np.sum(tables, axis=0) > 0]).pvalue)


@FIELDS
def test_as_many_shares_as_the_degree_have_the_same_distribution_for_two_secrets(field: Field) -> None:
    half = field.modulus // 2
    for secrets in ((0, half), (1, field.modulus - 1)):
        assert apart(field, 2, [1, 2], secrets) > 1e-3
        assert apart(field, 2, [3, 7], secrets) > 1e-3
    assert apart(field, 1, [1, 2], (0, half)) < 1e-9  # one share more tells them apart


# --- correction


def codeword(field: Field, n: int, degree: int, key: bytes = KEY) -> tuple[list[int], Elements]:
    points = list(range(1, n + 1))
    return points, share(field, np.array([12345], np.uint64), degree, points, Stream(key))[:, 0]


@FIELDS
@pytest.mark.parametrize(("n", "degree"), [(4, 1), (7, 2), (9, 4), (13, 6), (20, 13), (50, 33), (100, 32)])
def test_as_many_wrong_values_as_allowed_are_corrected_and_named(field: Field, n: int, degree: int) -> None:
    rng = np.random.default_rng(n)
    points, values = codeword(field, n, degree)
    allowed = (n - degree - 1) // 2
    for errors in {0, 1, allowed // 2, allowed}:
        wrong = [int(i) for i in rng.choice(n, errors, replace=False)]
        received = values.copy()
        received[wrong] = field.add(values[wrong], Stream(KEY).elements(field, errors) | np.uint64(1))
        found = decode(field, points, received.tolist(), degree, allowed)
        assert found
        assert (found.secret, found.wrong) == (12345, frozenset(wrong))
        if errors:
            assert decode(field, points, received.tolist(), degree, errors - 1) is None


@FIELDS
def test_more_wrong_values_than_allowed_are_refused(field: Field) -> None:
    points, values = codeword(field, 13, 6)
    for seed in range(50):
        rng = np.random.default_rng(seed)
        wrong = rng.choice(13, 4 + seed % 9, replace=False)
        received = values.copy()
        received[wrong] = Stream(bytes([seed]) * 32).elements(field, len(wrong))
        assert decode(field, points, received.tolist(), 6, 3) is None
    with pytest.raises(ValueError, match="4 wrong ones cannot be corrected"):
        decode(field, points, values.tolist(), 6, 4)
    with pytest.raises(ValueError, match="4 wrong ones cannot be corrected"):
        decode_columns(field, points, values[:, None], 6, 4)


@FIELDS
@pytest.mark.parametrize("t", [1, 2, 4])
def test_t_liars_among_3t_plus_1_never_forge(field: Field, t: int) -> None:
    """They send the values of another polynomial, which meets as many honest values as it can."""
    for n in range(3 * t + 1, 4 * t + 2):
        for degree in (t, 2 * t):
            points, values = codeword(field, n, degree)
            errors = safe_errors(n, degree, t)
            assert errors == min(t, n - degree - 1 - t) >= 0
            for first in range(degree + 1):
                met = points[t + first : t + first + degree]  # honest: the liars are the first t
                vanishes = [int(np.prod([x - z for z in met], dtype=object)) % field.modulus for x in points[:t]]
                received = values.copy()
                received[:t] = field.add(values[:t], np.array(vanishes, np.uint64))
                found = decode(field, points, received.tolist(), degree, errors)
                assert found is None or found.secret == 12345
                if errors == t:
                    assert found
                    assert found.wrong == frozenset(range(t))


def test_fewer_answers_than_liars_can_forge_are_not_corrected_at_all() -> None:
    with pytest.raises(ValueError, match="can be forged by 2 liars"):
        safe_errors(6, 4, 2)


def test_columns_are_corrected_each_for_itself() -> None:
    n, degree, errors = 13, 6, 3
    points, secrets = list(range(1, n + 1)), np.arange(40, dtype=np.uint64)
    shares = share(F_Q, secrets, degree, points, Stream(KEY))
    rng = np.random.default_rng(0)
    expected: list[frozenset[int] | None] = []
    for column in range(40):
        count = (0, 3, 2, 4, 3)[column % 5]
        wrong = [1, 4, 7] if column % 5 == 1 else [int(i) for i in rng.choice(n, count, replace=False)]
        shares[wrong, column] = F_Q.add(shares[wrong, column], np.full(len(wrong), column + 1, np.uint64))
        expected.append(frozenset(wrong) if count <= errors else None)
    found = decode_columns(F_Q, points, shares, degree, errors)
    assert [column and column.wrong for column in found] == expected
    assert all(
        column is None or column.secret == secret for column, secret in zip(found, secrets.tolist(), strict=True)
    )
