"""The numbers of a cohort, and who is left after opening 0."""

from collections.abc import Collection, Mapping

import numpy as np
import pytest

from federation.secure.accusations import Left, shrink
from federation.secure.errors import Fault
from federation.secure.thresholds import ONE, Mode, Thresholds, assumed, smallest_cohort, truncated
from tests.federation.secure.scene import refused

SIZES = range(5, 101)


# --- section 1


def test_the_numbers_are_those_of_the_table() -> None:
    cohorts = (5, 10, 20, 50)
    private = [Thresholds(m, Mode.PRIVATE) for m in cohorts]
    verified = [Thresholds(m, Mode.VERIFIED) for m in cohorts]
    assert [n.t for n in private] == [1, 3, 6, 16]
    assert [n.t for n in verified] == [1, 2, 4, 12]
    assert [n.t_mask for n in private] == [n.t_mask for n in verified] == [4, 7, 14, 34]
    assert [n.n_min for n in private] == [4, 7, 14, 34]
    assert [n.n_min for n in verified] == [4, 7, 14, 37]
    assert [round(n.cap, 3) for n in private] == [0.25, 0.143, 0.091, 0.042]
    assert [n.epsilon for n in private] == [0.1, 0.05, 0.025, 0.01]
    assert [n.k for n in private] == [n.k for n in verified] == [1024, 1024, 1024, 1600]
    assert Thresholds(20, Mode.SUM).k == 0
    assert Thresholds(20, Mode.SUM).t == 6


@pytest.mark.parametrize("mode", Mode)
def test_every_cohort_keeps_the_inequalities_that_the_protocol_needs(mode: Mode) -> None:
    for m in SIZES:
        n = Thresholds(m, mode)
        assert 2 * (n.t_mask - n.t) > m - n.t, "two lists of survivors never both find t_mask honest supporters"
        assert 2 * n.t + 1 <= n.n_min <= m, "products of shares can be opened, and nobody has to drop out"
        assert n.t < n.t_mask
        if mode is Mode.VERIFIED:
            assert 3 * n.t + 1 <= n.n_min <= m
            assert 4 * n.t + 1 <= m


@pytest.mark.parametrize("m", [0, 4, 101])
def test_a_cohort_has_5_to_100_members(m: int) -> None:
    with refused(Fault.RANGE):
        Thresholds(m, Mode.PRIVATE)


def test_a_cohort_bears_as_many_colluders_as_owners_assume() -> None:
    assert [assumed(N) for N in (5, 10, 20, 100)] == [1, 2, 4, 24]
    found = [(smallest_cohort(Mode.PRIVATE, assumed(N)), smallest_cohort(Mode.VERIFIED, assumed(N))) for N in (20, 100)]
    assert found == [(13, 17), (73, 97)]
    for mode in Mode:
        for colluders in range(25):
            m = smallest_cohort(mode, colluders)
            assert Thresholds(m, mode).t >= colluders
            assert m == 5 or Thresholds(m - 1, mode).t < colluders


def test_coefficients_are_truncated_towards_zero() -> None:
    assert truncated([0.0, 1.0, -1.0, 1.5 / ONE, -1.5 / ONE, 0.1]) == [0, ONE, -ONE, 1, -1, 429496729]


# --- section 2.4: who is left


def reading(dealt: Collection[str], answers: Mapping[str, Collection[str]], t: int) -> set[str]:
    """The text, sentence by sentence."""
    W = {name for name in dealt if name in answers}  # who did not answer
    W -= {name for name in W if sum(name in accused for accused in answers.values()) > t}  # accused by more than t
    W -= {name for name in W if len(answers[name]) > t}  # accuses more than t
    for accuser in sorted(dealt):  # through the remaining pairs in sorted order
        for accused in sorted(dealt):
            if accuser in W and accused in W and accused in answers[accuser]:
                W -= {accuser, accused}  # both, if both are still in
    return W


MEMBERS = "abcdefghij"


def some(rng: np.random.Generator, names: Collection[str], share: float) -> set[str]:
    return {name for name in sorted(names) if rng.random() < share}


def test_who_is_left_is_what_the_text_says() -> None:
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        dealt, t = MEMBERS[: rng.integers(2, 11)], int(rng.integers(0, 4))
        shares = {name: rng.choice([0, 0, 0, 0.1, 0.2, 0.5]) for name in dealt}
        answers = {name: some(rng, set(dealt) - {name}, shares[name]) for name in dealt if rng.random() < 0.9}
        left = shrink(dealt, answers, t)
        assert set(left.W) == reading(dealt, answers, t)
        gone = [*left.silent, *left.accused, *left.accusers, *(name for pair in left.pairs for name in pair)]
        assert sorted([*left.W, *gone]) == list(dealt), "everybody stays, or leaves for one reason"
        assert not any(other in left.W for name in left.W for other in answers[name]), "nobody keeps a bad share"


def test_each_of_at_most_t_liars_takes_at_most_one_honest_member_with_it() -> None:
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        t = int(rng.integers(1, 4))
        liars = {str(name) for name in rng.choice(list(MEMBERS), rng.integers(0, t + 1), replace=False)}
        answers = {name: some(rng, set(MEMBERS if name in liars else liars) - {name}, rng.random()) for name in MEMBERS}
        left = shrink(MEMBERS, answers, t)
        assert len(set(MEMBERS) - liars - set(left.W)) <= len(liars - set(left.W))
        assert not set(left.accused + left.accusers) - liars


def test_one_that_accuses_five_of_ten_leaves_alone_and_one_that_accuses_two_takes_one_along() -> None:
    quiet: dict[str, Collection[str]] = dict.fromkeys(MEMBERS, ())
    assert shrink(MEMBERS, quiet, 3) == Left(tuple(MEMBERS), (), (), (), ())
    assert shrink(MEMBERS, quiet | {"j": "abcde"}, 3) == Left(tuple("abcdefghi"), (), (), ("j",), ())
    assert shrink(MEMBERS, quiet | {"j": "ab"}, 3) == Left(tuple("bcdefghi"), (), (), (), (("j", "a"),))
    assert shrink(MEMBERS, quiet | dict.fromkeys("abcd", "j"), 3) == Left(tuple("abcdefghi"), (), ("j",), (), ())
    without = {name: () for name in MEMBERS if name != "c"}
    assert shrink(MEMBERS, without | {"a": "c"}, 3) == Left(tuple("abdefghij"), ("c",), (), (), ())


@pytest.mark.parametrize("answers", [{"a": ["a"]}, {"a": ["x"]}, {"a": ["b", "b"]}, {"x": []}])
def test_malformed_accusations_are_refused(answers: dict[str, list[str]]) -> None:
    with refused(Fault.ACCUSATION):
        shrink("abc", answers, 1)
