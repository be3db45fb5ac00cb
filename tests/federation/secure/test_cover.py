"""The cover of a member's vector by the others', and the coefficients that a run's algorithm allows."""

from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.aggregation.registry import ALGORITHMS
from federation.secure import bounds
from federation.secure.bounds import EVALUATION, SOLVER_TOLERANCE, BoundKind, Bounds, problem
from federation.secure.cover import cover, covers, least_covered
from federation.secure.thresholds import ONE, Mode, Thresholds, truncated
from tests.federation.secure.scene import by_definition

NAMES = "abcdefg"


# --- the cover


NEAR = st.sampled_from([0, 1, -1, 2**11, 2**12, 2**30, 2**32])
COEFFICIENT = st.one_of(st.integers(-ONE, ONE), st.integers(-20, 20), st.builds(int.__add__, NEAR, NEAR))
LEAST = st.fractions(1, 20, max_denominator=8)


@settings(max_examples=150, derandomize=True)
@given(st.lists(COEFFICIENT, min_size=1, max_size=7), st.integers(0, 4), LEAST)
def test_the_cover_is_its_definition(values: list[int], t: int, least: Fraction) -> None:
    a = dict(zip(NAMES, values, strict=False))
    expected = {me: by_definition(a, me, t) for me in a}
    assert {me: cover(a, me, t) for me in a} == expected
    assert {me: covers(a, me, t, least) for me in a} == {me: value >= least for me, value in expected.items()}
    first = least_covered(a, t, least)
    assert (first is None) == all(value >= least for value in expected.values())
    assert first is None or expected[first] == min(expected.values())


@settings(max_examples=60, derandomize=True)
@given(st.integers(3, 7), st.integers(0, 2), st.integers(1, 2**14), st.integers(0, 2**14), st.integers(-2, 2))
def test_the_cover_turns_at_its_limit(m: int, t: int, own: int, rest: int, by: int) -> None:
    """All others hold the same, so a limit that is reached exactly is known."""
    a = dict.fromkeys(NAMES[:m], rest) | {"a": own}
    limit = 1 + Fraction(max(0, m - 1 - t) * rest**2, own**2)
    assert cover(a, "a", t) == limit
    assert covers(a, "a", t, limit)
    if limit > 1:
        assert covers(a | {"a": own + by}, "a", t, limit) == (abs(own + by) <= own)


def test_no_sum_of_one_member_of_a_few_or_of_colluders_covers_it() -> None:
    names, least = [f"silo-{i:02}" for i in range(10)], Fraction(2)
    equal = dict.fromkeys(names, ONE // 10)
    alone = dict.fromkeys(names, 0)
    assert covers(equal, names[0], 3, least)
    assert covers({name: -a for name, a in equal.items()}, names[0], 3, least), "the sign does not matter"
    assert covers(equal | {names[0]: 0}, names[0], 3, least), "a member whose vector is not in the sum"
    assert not any(covers(alone | {names[0]: a}, names[0], 3, least) for a in (1, 2**11, 4096, ONE)), "at any scale"
    four = alone | dict.fromkeys(names[:4], ONE // 4)  # three colluders know all the others
    assert [covers(four, name, 3, least) for name in (names[0], names[9])] == [False, True]
    five = alone | dict.fromkeys(names[:5], ONE // 5)  # one other is left, and its vector is as heavy
    assert [covers(five, names[0], 3, bound) for bound in (least, least + Fraction(1, 1000))] == [True, False]
    assert not covers({"a": 4096, "b": 2**20, "c": 2**20}, "a", 3, least), "there are fewer others than colluders"
    heavy = {"a": 1, "b": ONE, "c": ONE, "d": ONE, "e": 1}
    assert [covers(heavy, "a", t, least) for t in (3, 4)] == [True, False], "colluders hold the heavy coefficients"
    with pytest.raises(KeyError):
        covers(equal, "nobody", 3, least)


def test_the_default_cover_is_half_of_what_equal_coefficients_of_the_fewest_members_have() -> None:
    assert [Thresholds(m, Mode.SUM).effective_members for m in (5, 10, 20, 50, 100)] == [2, 2, 4, 9, 17]
    for mode in Mode:
        for m in range(5, 101):
            n = Thresholds(m, mode)
            assert n.effective_members == max(2, Fraction(n.n_min - n.t, 2))
            for count in range(n.n_min, m + 1):
                equal = {str(i): ONE // count for i in range(count)}
                assert cover(equal, "0", n.t) == count - n.t >= n.effective_members
            fewest = {str(i): ONE // n.n_min for i in range(n.n_min)}
            assert covers(fewest, "0", n.t + n.losses, n.effective_members), "plain averaging needs no shift, ever"


# --- what an algorithm allows


TEN = tuple(f"silo-{i:02}" for i in range(10))
SAMPLES = {name: 100 + 10 * place for place, name in enumerate(TEN)}
COHORT = Thresholds(10, Mode.PRIVATE)
EQUAL = dict.fromkeys(TEN, ONE // 10)


def moved(a: Mapping[str, int], by: int, first: int = 0, second: int = 1) -> dict[str, int]:
    """Coefficients with the same sum, of which one is larger and another is smaller."""
    return {**a, TEN[first]: a[TEN[first]] + by, TEN[second]: a[TEN[second]] - by}


def asked(name: str, a: Mapping[str, int], epsilon: object = None, prior: str = "uniform", **more: object) -> str:
    """What is wrong with coefficients of an algorithm."""
    rule = bounds.bounds(name, prior, epsilon, more.get("stages", ()))  # type: ignore[arg-type]
    assert rule is not None
    return problem(rule, a, SAMPLES, COHORT)


@pytest.mark.parametrize("rule", [EVALUATION, Bounds(kind=BoundKind.NONE), Bounds(kind=BoundKind.NONE, signed=True)])
def test_coefficients_add_up_to_one_but_for_truncation(rule: Bounds) -> None:
    assert sum(EQUAL.values()) == ONE - 6
    assert not problem(rule, EQUAL, {}, COHORT)
    for factor in (2, 0.5, 2**-20):
        scaled = {name: int(factor * a) for name, a in EQUAL.items()}
        assert "the coefficients add up to" in problem(rule, scaled, {}, COHORT)
    if rule.kind is BoundKind.NONE:
        edges = {ONE + 1: False, ONE: True, ONE - 10: True, ONE - 11: False}
        for total, accepted in edges.items():
            a = EQUAL | {TEN[0]: total - 9 * EQUAL[TEN[1]]}
            assert (not problem(rule, a, {}, COHORT)) == accepted


UNSIGNED = [name for name, kind in bounds._KINDS.items() if kind is BoundKind.NONE and name not in bounds._SIGNED]


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        *((name, False) for name in (*UNSIGNED, "a:Rule")),
        *((name, True) for name in ("adafed", "torchjd:upgrad")),
    ],
)
def test_only_algorithms_with_signed_coefficients_may_have_negative_ones(name: str, accepted: bool) -> None:
    negative = EQUAL | {TEN[3]: -EQUAL[TEN[3]]}
    assert not asked(name, EQUAL)
    assert asked(name, negative) == (
        "" if accepted else f"the coefficient of {TEN[3]} is negative; this algorithm has none that are"
    )


def test_all_coefficients_of_an_evaluation_are_the_same() -> None:
    assert not problem(EVALUATION, EQUAL, {}, COHORT)
    for by in (1, -1):
        assert "the coefficient of silo-0" in problem(EVALUATION, moved(EQUAL, by), {}, COHORT)
        assert "the coefficient of silo-00" in problem(EVALUATION, EQUAL | {TEN[0]: ONE // 10 + by}, {}, COHORT)


@pytest.mark.parametrize("name", [name for name, kind in bounds._KINDS.items() if kind is BoundKind.FIXED])
@pytest.mark.parametrize("prior", ["uniform", "samples"])
def test_fixed_weights_are_those_of_plain_averaging_within_one_unit(name: str, prior: str) -> None:
    total = sum(SAMPLES.values())
    own = EQUAL if prior == "uniform" else {name: ONE * count // total for name, count in SAMPLES.items()}
    for by, accepted in ((0, True), (1, True), (-1, True), (2, False), (-2, False)):
        assert (not asked(name, moved(own, by), prior=prior)) == accepted
    assert asked(name, own, prior="uniform" if prior == "samples" else "samples")


@pytest.mark.parametrize(("epsilon", "width"), [(None, 0.05), ("auto", 0.05), (0.02, 0.02), (0, 0.0), (1, 1.0)])
def test_weights_of_fedmgda_plus_are_in_its_box_and_below_the_cap(epsilon: object, width: float) -> None:
    high, low = min(ONE // 10 + int(width * ONE), int(COHORT.cap * ONE)), max(0, ONE // 10 - int(width * ONE))
    for beyond, accepted in ((0, True), (SOLVER_TOLERANCE - 1, True), (SOLVER_TOLERANCE + 2, False)):
        for edge in (high + beyond, low - beyond):
            a = dict.fromkeys(TEN, (ONE - edge) // 9) | {TEN[0]: edge}
            assert (not asked("fedmgda+", a, epsilon)) == (accepted and edge >= 0)
    assert "this algorithm's are between" in asked("fedmgda+", moved(EQUAL, int(0.06 * ONE)), epsilon)


def test_the_box_of_fedmgda_plus_is_around_the_samples_where_these_are_its_prior() -> None:
    own = dict(zip(SAMPLES, truncated([count / sum(SAMPLES.values()) for count in SAMPLES.values()]), strict=True))
    assert not asked("fedmgda+", own, 0.001, "samples")
    assert asked("fedmgda+", EQUAL, 0.001, "samples")
    assert asked("fedmgda+", own, 0.001)


@pytest.mark.parametrize("name", ["fedmgda", "fedmgda+auto"])
def test_weights_of_multi_gradient_descent_are_below_the_cap(name: str) -> None:
    cap = int(COHORT.cap * ONE)
    for above, accepted in ((0, True), (SOLVER_TOLERANCE, True), (SOLVER_TOLERANCE + 1, False)):
        a = dict.fromkeys(TEN, (ONE - cap - above) // 9) | {TEN[0]: cap + above}
        assert (not asked(name, a)) == accepted
    assert not asked(name, dict.fromkeys(TEN, ONE // 9) | {TEN[0]: 0})


def test_with_stages_before_the_rule_only_the_cover_bounds_a_weight() -> None:
    skewed = moved(EQUAL, ONE // 11)
    for name in ("fedmgda+", "fedmgda", "fedavg-n"):
        assert asked(name, skewed)
        assert not asked(name, skewed, stages=("nnm",))


def test_an_algorithm_that_is_not_known_has_no_bounds() -> None:
    assert bounds.bounds("another", "uniform", None, ()) is None
    assert bounds.bounds("fedmgda", "uniform", None, ()) is not None
    with pytest.raises(ValueError, match="could not convert"):
        bounds.bounds("fedmgda+", "uniform", "wide", ())


def test_for_each_rule_with_private_rounds_it_is_decided_what_its_coefficients_may_be() -> None:
    private = {name for name, kind in ALGORITHMS.items() if kind.private is not None}
    assert set(bounds._KINDS) == private
    assert private >= bounds._SIGNED
