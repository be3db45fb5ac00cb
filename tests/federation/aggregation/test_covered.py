"""The coordinator moves the coefficients of every rule until all members accept them, also after losses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.aggregation.base import Rule
from federation.aggregation.interface import TooFewUpdatesError, Vector
from federation.aggregation.registry import ALGORITHMS, algorithm
from federation.aggregation.rules.fedmgda import FedMGDAAuto, FedMGDAPlus
from federation.aggregation.secure.covered import covered, refusal
from federation.aggregation.secure.settled import Cohort
from federation.secure import bounds
from federation.secure.bounds import BoundKind, Bounds
from federation.secure.cover import least_covered
from federation.secure.thresholds import Mode, Thresholds, truncated
from federation.work.secure.allowed import least_cover
from tests.federation.aggregation.scene import cohort, rows_of


def losses(names: Sequence[str], most: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    """All sets of at most so many members for few members, and some for many."""
    if len(names) <= 12:
        return [lost for count in range(most + 1) for lost in combinations(names, count)]
    return [tuple(rng.choice(names, rng.integers(0, most + 1), replace=False)) for _ in range(20)]


def accepted(rule: Bounds, least: Fraction, W: Cohort, A: Sequence[int], rng: np.random.Generator) -> bool:
    """Whether all members accept coefficients of W, and of what is left after every loss of floor(m / 10) members."""
    a = dict(zip(W.members, A, strict=True))
    samples = {reply.client_id: reply.samples for reply in W.replies}
    if bounds.problem(rule, a, samples, W.thresholds):
        return False
    largest = sorted(a, key=lambda name: -abs(a[name]))[: W.thresholds.losses]
    return all(
        least_covered({name: a[name] for name in a if name not in lost}, W.thresholds.t, least) is None
        for lost in [tuple(largest), tuple(largest[1:]), *losses(W.members, W.thresholds.losses, rng)]
    )


def coefficients(how: str, count: int, rng: np.random.Generator) -> Vector:
    """What a rule may come up with."""
    makers: dict[str, Callable[[], Vector]] = {
        "even": lambda: rng.uniform(0.5, 1.5, count),
        "heavy": lambda: rng.dirichlet([0.1] * count),
        "one": lambda: np.eye(count)[rng.integers(count)] + rng.choice([0.0, 1e-9, 0.01], count),
        "few": lambda: rng.choice([0.0, 1.0], count, p=[0.8, 0.2]),
        "signed": lambda: rng.standard_normal(count),
        "opposed": lambda: np.where(np.arange(count) % 2, 1.0, -1.0),
        "tiny": lambda: 1e-12 * rng.uniform(0.0, 1.0, count),
    }
    made = makers[how]()
    return made if np.any(made) else np.ones(count)


HOW = ["even", "heavy", "one", "few", "signed", "opposed", "tiny"]
KINDS = [kind for kind in BoundKind if kind is not BoundKind.EQUAL]


@settings(max_examples=150, derandomize=True)
@given(
    st.sampled_from([5, 7, 8, 10, 11, 12, 20, 33, 50, 100]),
    st.sampled_from(list(Mode)),
    st.sampled_from(KINDS),
    st.sampled_from(HOW),
    st.sampled_from(["uniform", "samples"]),
    st.booleans(),
    st.integers(0, 2**32),
)
@pytest.mark.full
def test_all_members_accept_the_coefficients_that_the_coordinator_makes_of_any_rules(
    m: int, mode: Mode, kind: BoundKind, how: str, prior: Literal["uniform", "samples"], signed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(Thresholds(m, mode).n_min, m + 1))
    W = cohort(m, count, mode, rng.integers(50, 150, count).tolist())
    rule = Bounds(kind=kind, prior=prior, signed=signed and kind is BoundKind.NONE, epsilon=rng.choice([0.01, 0.3]))
    least = W.thresholds.effective_members
    c = coefficients(how, count, rng)
    try:
        made = covered(rule, least, W, c)
    except TooFewUpdatesError:
        plain = truncated(W.replies.prior(prior).tolist())
        assert prior == "samples"
        assert not accepted(rule, least, W, plain, rng)
        return
    assert accepted(rule, least, W, made.coefficients, rng)
    own = truncated((c / np.abs(c).sum()).tolist())
    assert (made.share == 1) == accepted(rule, least, W, own, rng)
    assert 0 <= made.share <= 1
    if made.share == 1:
        assert list(made.coefficients) == own


def heavy(weight: float) -> Vector:
    return np.array([weight, *[1.0] * 9])


def test_the_heavier_one_member_is_the_less_of_the_rule_is_left() -> None:
    W, rule = cohort(10, 10, Mode.PRIVATE), Bounds(kind=BoundKind.NONE)
    least = W.thresholds.effective_members
    shares = [covered(rule, least, W, heavy(weight)).share for weight in (1, 2, 2.2, 2.3, 4, 10, 1e3, 1e6)]
    assert shares[:3] == [1.0, 1.0, 1.0], "up to the square root of 5"
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[3] < 1
    # The largest weight is where the cover is E*: (E* - 1) A^2 = 5 B^2 with 10 - 1 - t - 1 others left.
    A, B = (covered(rule, least, W, heavy(1e6)).coefficients[place] for place in (0, 9))
    assert 1 - 1e-6 < float(Fraction(A**2, 5 * B**2)) <= 1


def test_the_more_cover_a_run_asks_for_the_less_of_the_rule_is_left() -> None:
    W, rule = cohort(10, 10, Mode.PRIVATE), Bounds(kind=BoundKind.NONE)
    shares = [covered(rule, Fraction(least), W, heavy(100)).share for least in (1, 1.01, 1.5, 2, 3, 5, 6)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == len(shares)
    assert covered(rule, Fraction(6), W, heavy(1)).share == 1, "10 - t - 1 of equal weight"
    with pytest.raises(TooFewUpdatesError, match=r"fewer than 6\.1 effective members would be left"):
        covered(rule, Fraction(6.1), W, heavy(1))
    assert least_cover(0.0, W.thresholds) == 2
    assert least_cover(3.5, W.thresholds) == Fraction(7, 2)


def test_where_one_member_has_most_samples_not_even_plain_averaging_is_accepted() -> None:
    W = cohort(10, 10, Mode.SUM, [10_000, *[100] * 9])
    with pytest.raises(TooFewUpdatesError, match=r"silo-000 has 0\.917 of the coefficients, too large a part"):
        covered(Bounds(kind=BoundKind.FIXED, prior="samples"), Fraction(2), W, W.replies.prior("samples"))
    free = covered(Bounds(kind=BoundKind.NONE, prior="samples"), Fraction(2), W, np.ones(10))
    assert free.share == 1, "the rule's own coefficients are accepted"


def test_the_worst_loss_is_that_of_the_members_with_the_largest_coefficients() -> None:
    numbers = Thresholds(12, Mode.PRIVATE)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        W = cohort(12, 12, Mode.PRIVATE)
        A = truncated(rng.dirichlet([rng.choice([1, 5, 20])] * 12).tolist())
        least = Fraction(int(rng.integers(2, 6)))
        given = dict(zip(W.members, A, strict=True))
        expected = accepted(Bounds(kind=BoundKind.NONE), least, W, A, rng)
        assert (not refusal(Bounds(kind=BoundKind.NONE), least, numbers, given, {})) == expected


# --- the rules of the registry

VALUES: dict[str, dict[str, Any]] = {"scalarised": {}, "fsmgda": {"bound": "none"}}
RULES = sorted(name for name, kind in ALGORITHMS.items() if kind.private is not None and issubclass(kind, Rule))


@pytest.mark.parametrize("name", RULES)
def test_coefficients_are_negative_only_where_members_expect_it(name: str) -> None:
    rule, negative = algorithm(name, VALUES.get(name, {})), False
    assert isinstance(rule, Rule)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        U = rng.standard_normal((10, 12)) + rng.choice([-0.5, 0.0, 2.0])
        U /= np.linalg.norm(U, axis=1)[:, None]
        told = {"losses": rng.uniform(0.1, 3.0, 10), "accuracies": rng.uniform(0.1, 0.9, 10), "rounds": 2}
        names = tuple(f"silo-{i:02}" for i in range(10))
        rows = rows_of(U, samples=np.full(10, 100.0), clients=names, **told)
        if rule.private == "gram":
            rows = replace(rows, cap=Thresholds(10, Mode.PRIVATE).cap)
        c = rule.decide(rows).coefficients
        negative |= bool((c < 0).any())
    assert negative == (name in bounds._SIGNED)


@pytest.mark.parametrize("name", [name for name in RULES if ALGORITHMS[name].private == "gram"])
@pytest.mark.parametrize("mode", [Mode.PRIVATE, Mode.VERIFIED])
def test_a_rule_decides_under_the_cap_of_every_number_of_members(name: str, mode: Mode) -> None:
    rule = algorithm(name, VALUES.get(name, {}))
    assert isinstance(rule, Rule)
    for m in (*range(8, 31), 49, 98, 100):
        U, cap = np.random.default_rng(m).standard_normal((m, 40)) + 0.5, Thresholds(m, mode).cap
        told = {"losses": np.linspace(0.1, 3.0, m), "samples": np.full(m, 100.0), "rounds": 2}
        rows = rows_of(U, clients=[f"silo-{i:03}" for i in range(m)], **told)
        found = rule.decide(replace(rows, cap=cap))
        assert np.isfinite(found.coefficients).all(), m
        if name in ("fedmgda", "fedmgda+", "fedmgda+auto"):  # whose weights members compare with the cap
            assert found.weights.max() <= cap + 1e-9, m


def test_a_prior_above_the_cap_widens_the_smallest_box_and_is_refused_by_a_box_that_is_too_small() -> None:
    cap, prior = Thresholds(10, Mode.PRIVATE).cap, np.array([0.4, *[0.6 / 9] * 9])
    rows = replace(rows_of(np.eye(10) + 0.5, samples=np.full(10, 100.0)), cap=cap, prior=prior)
    found = FedMGDAAuto().decide(rows)
    assert found.weights.max() <= cap + 1e-9
    assert found.weights.sum() == pytest.approx(1)
    assert found.diagnostics["epsilon"] == pytest.approx((1 - cap) / 9 - 0.6 / 9, abs=1e-5)
    with pytest.raises(
        TooFewUpdatesError, match=r"of at most 0\.1429 that differ from lambda0 by at most 0\.02 add up"
    ):
        FedMGDAPlus(epsilon=0.02).decide(rows)
