"""Mode `verified`: what honest members prove, and what liars are caught at. Nobody honest is ever named."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from federation.secure import verified_mode
from federation.secure.blocks import blocks
from federation.secure.checks import Check, failures_of_gram, failures_of_identity, failures_of_sum
from federation.secure.fields import F_Q, Elements
from federation.secure.payloads import CheckAnswers
from federation.secure.sketch import second_elements, second_sketch
from federation.secure.streams import Stream

M, T = 13, 3
NAMES = [f"silo-{i:02}" for i in range(M)]
POINTS = {name: i + 1 for i, name in enumerate(NAMES)}
TAU1, FINAL, CHALLENGE = b"1" * 32, b"f" * 32, verified_mode.challenge(b"2" * 32)
A = [2**32 // M] * M
ENOUGH, FEW = 4 * T + 1, 3 * T + 1


_rng = np.random.default_rng(0)
U = _rng.standard_normal((M, 300)) + _rng.standard_normal(300)
U /= np.linalg.norm(U, axis=1, keepdims=True)
R = U.mean(axis=0)
SKETCHES = [second_elements(TAU1, blocks(u)) for u in U]


def dealt(sketch: Elements, dealer: int) -> tuple[verified_mode.CheckShares, ...]:
    return verified_mode.check_shares(sketch, list(POINTS.values()), T, bytes([dealer]) * 32, FINAL)


DEALT = {name: dealt(SKETCHES[i], i) for i, name in enumerate(NAMES)}


def answers(shares: Mapping[str, Sequence[verified_mode.CheckShares]], who: Sequence[str]) -> dict[str, CheckAnswers]:
    return {
        name: verified_mode.check_answers([shares[h][POINTS[name] - 1] for h in NAMES], A, CHALLENGE) for name in who
    }


def examined(given: Mapping[str, CheckAnswers]) -> verified_mode.ShareFindings:
    return verified_mode.examine({name: POINTS[name] for name in given}, given, NAMES, T)


def changed(answer: CheckAnswers, by: int, *, sums: bool = False) -> CheckAnswers:
    """All values of an answer, or the sums alone, are wrong."""

    def off(x: Elements) -> Elements:
        return F_Q.add(x, Stream(bytes([by]) * 32).elements(F_Q, len(x)))

    if sums:
        return replace(answer, sums=off(answer.sums))
    projections = off(answer.projections.reshape(-1)).reshape(answer.projections.shape)
    return CheckAnswers(off(answer.norms), off(answer.degrees), off(answer.zeros), projections, off(answer.sums))


def exact_norms() -> list[float]:
    return [sum(int(x) ** 2 for x in F_Q.decode(sketch)) / 2**32 for sketch in SKETCHES]


def exact_sum() -> list[float]:
    columns = zip(*(F_Q.decode(sketch).tolist() for sketch in SKETCHES), strict=True)
    return [sum(a * x for a, x in zip(A, column, strict=True)) / 2**48 for column in columns]


@pytest.mark.parametrize("n", range(FEW, M + 1))
def test_honest_members_prove_their_norms_and_their_sum(n: int) -> None:
    found = examined(answers(DEALT, NAMES[M - n :]))
    assert (found.failures, found.named, found.corrected) == ((), {}, {})
    assert list(found.norms.values()) == exact_norms()
    assert found.sums is not None
    assert found.sums.tolist() == exact_sum()
    assert not verified_mode.failures_of_second_sketch(second_sketch(TAU1, blocks(R)), found.sums, 300, M)


def test_shares_survive_the_wire() -> None:
    held = DEALT[NAMES[0]][0]
    plaintext = held.to_bytes()
    assert len(plaintext) + 16 == verified_mode.confirm_bytes() == 8 * 291 + 16
    assert verified_mode.CheckShares.from_bytes(plaintext).to_bytes() == plaintext


@pytest.mark.parametrize("n", [FEW, ENOUGH - 1, ENOUGH])
@pytest.mark.parametrize(("cheat", "check"), [("norm", Check.NORM), ("zero", Check.ZERO), ("degree", Check.DEGREE)])
def test_a_dealer_is_named_only_when_as_many_errors_as_liars_could_be_corrected(
    n: int, cheat: str, check: Check
) -> None:
    bad = NAMES[4]
    shares = dict(DEALT)
    if cheat == "norm":
        shares[bad] = dealt(F_Q.mul(SKETCHES[4], np.full(256, 3, np.uint64)), 4)
    for i, held in enumerate(DEALT[bad]):
        values = held.values.copy()
        if cheat == "zero":  # hides 0.2 of the norm
            values[256] = F_Q.sub(values[256:257], F_Q.encode(np.array([2**32 // 5])))[0]
        elif cheat == "degree" and i < T + 2:
            values[:256] = F_Q.mul(values[:256], np.full(256, 5, np.uint64))
        if cheat != "norm":
            shares[bad] = (*shares[bad][:i], verified_mode.CheckShares(values), *shares[bad][i + 1 :])
    found = examined(answers(shares, NAMES[:n]))
    assert check in {failure.check for failure in found.failures if failure.member == bad}
    assert {failure.member for failure in found.failures} <= {bad, None}
    named = n >= (3 * T + 1 if cheat == "degree" else 4 * T + 1)
    assert set(found.named) == ({bad} if named else set())


def wrapped(sketch: Elements, scale: int) -> Elements:
    """Elements x with A x = A scale T u + e mod q, e within the tolerance of the sum, and ||x||^2 mod q below 1.3.

    The squares of many choices of two elements are sorted, so that a pair with the right sum is found at once.
    """
    q, count, step = F_Q.modulus, 1 << 16, 2**14
    x = F_Q.mul(F_Q.encode(F_Q.decode(sketch) * scale), np.ones(256, np.uint64))
    inverse = np.full(count, F_Q.inverse(A[0]), np.uint64)
    e = np.arange(count, dtype=np.uint64) * np.uint64(step)
    choices = [F_Q.add(np.full(count, x[i]), F_Q.mul(inverse, e)) for i in (0, 1)]
    squares = [F_Q.mul(choice, choice) for choice in choices]
    order = np.argsort(squares[1])
    rest = sum(int(value) ** 2 for value in x[2:]) % q
    wanted = F_Q.sub(np.full(count, (2**32 - rest) % q, np.uint64), squares[0])
    nearest = np.minimum(np.searchsorted(squares[1][order], wanted), count - 1)
    gaps = np.abs(F_Q.decode(F_Q.sub(squares[1][order][nearest], wanted)))
    first = int(np.argmin(gaps))
    x[0], x[1] = choices[0][first], choices[1][order[nearest[first]]]
    return x


@pytest.mark.parametrize("n", [FEW, ENOUGH])
def test_a_norm_that_is_small_only_modulo_q_is_seen_by_the_projections(n: int) -> None:
    x = wrapped(SKETCHES[4], 10)
    shares = DEALT | {NAMES[4]: dealt(x, 4)}
    found = examined(answers(shares, NAMES[:n]))
    norm = found.norms[NAMES[4]]
    assert norm is not None
    assert 0.5 < norm < 1.5, "the norm passes"
    assert found.sums is not None
    total = second_sketch(TAU1, blocks(R + 9 * U[4] / M))
    assert not verified_mode.failures_of_second_sketch(total, found.sums, 300, M), "the sum passes"
    assert [(failure.check, failure.member) for failure in found.failures] == [(Check.RANGE, NAMES[4])]
    assert set(found.named) == {NAMES[4]}


def test_a_negative_norm_fails() -> None:
    shares = dict(DEALT)
    low = F_Q.encode(np.array([-(2**33)]))[0]
    values = [held.values.copy() for held in DEALT[NAMES[4]]]
    for row in values:
        row[256] = F_Q.add(row[256:257], np.array([low]))[0]
    shares[NAMES[4]] = tuple(verified_mode.CheckShares(row) for row in values)
    found = examined(answers(shares, NAMES))
    assert {failure.check for failure in found.failures} == {Check.ZERO, Check.NORM}


def test_a_dealer_cannot_hide_one_large_element() -> None:
    """Whatever the noise is, half of the projections show it."""
    x = SKETCHES[4].copy()
    x[17] = F_Q.encode(np.array([2**26 + 2**21]))[0]
    shares = DEALT | {NAMES[4]: dealt(x, 4)}
    found = examined(answers(shares, NAMES))
    assert Check.RANGE in {failure.check for failure in found.failures if failure.member == NAMES[4]}
    x[17] = F_Q.encode(np.array([2**19]))[0]
    found = examined(answers(DEALT | {NAMES[4]: dealt(x, 4)}, NAMES))
    assert {failure.check for failure in found.failures} == {Check.NORM}


@pytest.mark.parametrize("n", [FEW, ENOUGH - 1, ENOUGH])
@pytest.mark.parametrize("liars", [1, T])
def test_liars_that_answer_wrongly_about_all_dealers_are_named_and_nobody_honest_is(n: int, liars: int) -> None:
    given = answers(DEALT, NAMES[:n])
    given |= {name: changed(given[name], 10 + i) for i, name in enumerate(NAMES[:liars])}
    found = examined(given)
    assert set(found.named) == set(NAMES[:liars]), "the degree values name them"
    if n == ENOUGH:
        assert not found.failures
        assert list(found.norms.values()) == exact_norms()
    else:
        corrected = min(T, n - 2 * T - 1 - T)
        assert bool(found.failures) == (liars > corrected)
        assert {failure.check for failure in found.failures} <= {Check.NORM, Check.ZERO}
    assert found.sums is not None
    assert found.sums.tolist() == exact_sum()


def test_a_liar_about_norms_alone_is_named_with_enough_answers_and_voids_with_few() -> None:
    for n in (FEW, ENOUGH):
        given = answers(DEALT, NAMES[:n])
        honest = given[NAMES[2]]
        one = np.ones(M, np.uint64)
        given[NAMES[2]] = replace(honest, norms=F_Q.sub(honest.norms, one))
        found = examined(given)
        if n == ENOUGH:
            assert (found.failures, set(found.named)) == ((), {NAMES[2]})
        else:
            assert {failure.check for failure in found.failures} == {Check.NORM}
            assert not found.named


@pytest.mark.parametrize("n", [FEW, ENOUGH])
def test_liars_that_send_the_values_of_another_polynomial_forge_no_norm(n: int) -> None:
    """They raise the norm of every honest dealer by as much as they like, at as many honest points as they can."""
    given = answers(DEALT, NAMES[:n])
    met = [POINTS[name] for name in NAMES[T : 3 * T]]
    for name in NAMES[:T]:
        answer = given[name]
        bend = math.prod(POINTS[name] - z for z in met) % F_Q.modulus
        norms = F_Q.add(answer.norms, np.full(M, bend, np.uint64))
        given[name] = replace(answer, norms=norms)
    found = examined(given)
    assert all(norm in (None, exact) for norm, exact in zip(found.norms.values(), exact_norms(), strict=True))
    assert set(found.named) == (set(NAMES[:T]) if n == ENOUGH else set())


def test_bad_dealers_cannot_frame_an_honest_member() -> None:
    """t dealers give one member wrong shares: it is corrected for t dealers, and not named."""
    shares = dict(DEALT)
    for bad in NAMES[:T]:
        values = F_Q.add(DEALT[bad][7].values, np.ones(291, np.uint64))
        shares[bad] = (*DEALT[bad][:7], verified_mode.CheckShares(values), *DEALT[bad][8:])
    found = examined(answers(shares, NAMES))
    assert found.corrected == {NAMES[7]: frozenset(NAMES[:T])}
    assert (found.failures, found.named) == ((), {})


def test_wrong_sums_are_corrected_and_name_nobody() -> None:
    given = answers(DEALT, NAMES)
    given |= {name: changed(given[name], 20 + i, sums=True) for i, name in enumerate(NAMES[:T])}
    found = examined(given)
    assert (found.failures, found.named) == ((), {})
    assert found.sums is not None
    assert found.sums.tolist() == exact_sum()
    given |= {name: changed(given[name], 30 + i, sums=True) for i, name in enumerate(NAMES[:6])}
    found = examined(given)
    assert [failure.check for failure in found.failures] == [Check.SUM_SHARES]
    assert (found.sums, found.named) == (None, {})


def test_too_few_answers_are_not_examined() -> None:
    with pytest.raises(ValueError, match="can be forged by 3 liars"):
        examined(answers(DEALT, NAMES[: FEW - 1]))


def test_a_sum_of_other_inputs_than_those_shared_is_seen() -> None:
    found = examined(answers(DEALT, NAMES))
    assert found.sums is not None
    for scale in (2.0, 3.0, -1.0):
        other = R + (scale - 1) * U[5] / M
        failures = verified_mode.failures_of_second_sketch(second_sketch(TAU1, blocks(other)), found.sums, 300, M)
        assert [failure.check for failure in failures] == [Check.SECOND_SKETCH]


def test_the_challenge_is_that_of_tau2() -> None:
    other = verified_mode.challenge(b"3" * 32)
    assert isinstance(other, verified_mode.Challenge)
    assert other.s[0] != CHALLENGE.s[0]
    assert len(set(CHALLENGE.rho.tolist())) == 256


# --- the checks of all modes


def test_the_checks_of_the_sum_pass_what_unit_updates_allow_and_nothing_longer() -> None:
    assert failures_of_sum(blocks(R), [1 / M] * M)[0] == []
    failures, square = failures_of_sum(blocks(R), [0.1 / M] * M)
    assert [failure.check for failure in failures] == [Check.LENGTH]
    assert square == pytest.approx(R @ R)
    spike = np.array([1 + 2.0**-9, 0.0])
    assert [failure.check for failure in failures_of_sum(blocks(spike), [1.0])[0]] == [Check.ENTRY]
    assert failures_of_sum(blocks(np.array([1.0, 0.0])), [-0.5, 0.495])[0] == []
    assert [failure.check for failure in failures_of_sum(blocks(np.array([1.0, 0.0])), [0.98])[0]] == [Check.LENGTH]


def test_the_checks_of_the_gram_matrix_pass_unit_rows_and_nothing_else() -> None:
    G, k = U @ U.T, 1024
    a = np.full(M, 1 / M)
    square = float(a @ G @ a)
    assert failures_of_gram(G, NAMES, k) == []
    assert failures_of_identity(square, G, a, k) == []
    long = G.copy()
    long[3, 3] += 3 / math.sqrt(k)
    assert [(f.check, f.member) for f in failures_of_gram(long, NAMES, k)] == [(Check.DIAGONAL, NAMES[3])]
    indefinite = G.copy()
    indefinite[0, 1] = indefinite[1, 0] = -2.0
    assert [f.check for f in failures_of_gram(indefinite, NAMES, k)] == [Check.EIGENVALUE]
    limit = (6 * math.sqrt(2 / k) + 2 * M / k) * square
    assert failures_of_identity(square + 0.99 * limit, G, a, k) == []
    assert [f.check for f in failures_of_identity(square + 1.01 * limit, G, a, k)] == [Check.IDENTITY]
    broken = np.full_like(G, np.nan)
    for shorter in (False, True):
        assert failures_of_identity(square, broken, a, k, shorter=shorter)


def test_a_sum_of_shortened_vectors_is_no_longer_than_their_products_allow() -> None:
    G, k, a = np.array([[1.0, 0.5, -1.0], [0.5, 1.0, 0.0], [-1.0, 0.0, 1.0]]), 1024, np.array([0.5, 0.25, 0.25])
    largest = 0.25 + 0.0625 + 0.0625 + 2 * 0.5 * 0.125  # without the pair that points apart: one of them may be 0
    limit = (6 * math.sqrt(2 / k) + 2 * 3 / k) * max(largest, a @ a)
    assert failures_of_identity(0.0, G, a, k, shorter=True) == []
    assert failures_of_identity(largest + 0.99 * limit, G, a, k, shorter=True) == []
    failed = failures_of_identity(largest + 1.01 * limit, G, a, k, shorter=True)
    assert [failure.check for failure in failed] == [Check.IDENTITY]
