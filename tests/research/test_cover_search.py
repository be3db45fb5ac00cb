"""No coefficients that members accept show t colluders more of a member than a cosine of 1 / sqrt(E*).

Updates are uncorrelated and of length 1, so the update of member i is the i-th unit vector, and the sum over V is the
vector of the coefficients of V.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from cover_search.members import SearchMembers
from cover_search.optimizer import PlanSearch
from cover_search.plan import Plan, extremal, within
from cover_search.target import CosineTarget, individual_parts
from federation.aggregation.secure import session
from federation.aggregation.secure.covered import Covered
from federation.secure.bounds import EVALUATION, BoundKind, Bounds, uncovered
from federation.secure.thresholds import Mode, Thresholds, truncated
from fedpareto.simulation.simulated_members import SimulatedMembers
from tests.federation.work.scene import ORIGIN, cast, names, play

FREE = Bounds(kind=BoundKind.NONE, signed=True)
COHORTS = [
    *((m, Mode.PRIVATE) for m in (5, 20)),
    *(pytest.param(m, Mode.PRIVATE, marks=pytest.mark.full) for m in (10, 50, 100)),
    (10, Mode.VERIFIED),
    pytest.param(50, Mode.VERIFIED, marks=pytest.mark.full),
]
Reals = NDArray[np.float64]


def corners(members: SearchMembers, random: np.random.Generator) -> Iterator[Reals]:
    """Weights of W at the corners of what members accept, and random ones; all moved there if need be."""
    m, t = members.cohort.m, members.cohort.t
    heavy = sqrt(float(members.least) - 1)
    for others in {2, m // 3, m - t - 1}:
        for level in (0.0, 1e-9, 0.5):
            for colluders in (0.0, 1.0, heavy * sqrt(others), 10.0 * heavy):  # one heavy member, ties, colluders above
                weights = np.full(m, level)
                weights[0], weights[1 : t + 1], weights[t + 1 : t + 1 + others] = heavy * sqrt(others), colluders, 1.0
                yield weights
                yield weights * random.choice([-1.0, 1.0], m)
    for scale in (0.1, 1.0, 3.0):
        yield np.exp(random.normal(0, scale, m)) * random.choice([0.0, 1.0], m, p=[0.2, 0.8])
    for plan in extremal(members, 1, random):
        yield plan.weights[0]


def survivors(members: SearchMembers, weights: Reals, random: np.random.Generator) -> Iterator[NDArray[np.bool_]]:
    """Every V of a small cohort; of a large one those with the lightest, the heaviest and random members."""
    m, n_min = members.cohort.m, members.cohort.n_min
    if m <= 10:
        chosen = [list(V) for n in range(n_min, m + 1) for V in combinations(range(m), n)]
    else:
        order = np.argsort(-np.abs(weights))
        chosen = [list(order[:n_min]), [order[0], *order[m - n_min + 1 :]], list(range(m))]
        chosen += [list(random.choice(m, random.integers(n_min, m + 1), replace=False)) for _ in range(10)]
    for V in chosen:
        kept = np.zeros(m, bool)
        kept[V] = True
        yield kept


def worst_cosine(coefficients: Reals, t: int) -> float:
    """The largest cosine of a member of V with the sum over V, of which t others have been subtracted."""
    squares, largest = np.square(coefficients), 0.0
    order = np.argsort(-squares, kind="stable")
    for place, i in enumerate(order[: 2 * t + 2]):  # the others are smaller, and the same t are subtracted
        subtracted = order[: t + 1] if place <= t else order[:t]
        left = squares.sum() - squares[subtracted].sum() + (squares[i] if place <= t else 0.0)
        largest = max(largest, sqrt(squares[i] / left) if squares[i] else 0.0)
    return largest


@pytest.mark.parametrize(("m", "mode"), COHORTS)
def test_coefficients_that_members_accept_never_show_more_than_the_bound_whoever_is_lost(m: int, mode: Mode) -> None:
    members, random = SearchMembers(FREE, Thresholds(m, mode)), np.random.default_rng(m)
    sums, largest = 0, 0.0
    for corner in corners(members, random):
        plan = within(Plan(np.arange(m), corner[None], np.ones((1, m), bool)), members)
        assert plan is not None, "members accept equal weights"
        a = np.array(truncated(members.normed(plan.weights[0]).tolist()))
        for kept in survivors(members, a, random):
            given = {str(slot): int(a[slot]) for slot in np.flatnonzero(kept)}
            if not uncovered(given, members.cohort.t, members.least):
                sums += 1
                largest = max(largest, worst_cosine(np.where(kept, a, 0).astype(float), members.cohort.t))
    assert sums > 50
    assert largest <= members.bound * (1 + 1e-12)
    assert largest > 0.99 * members.bound  # the corners are there


@pytest.mark.parametrize(("m", "mode"), [*COHORTS[:3], *COHORTS[5:6]])
def test_an_optimiser_reaches_the_bound_and_does_not_exceed_it(m: int, mode: Mode) -> None:
    members = SearchMembers(FREE, Thresholds(m, mode))
    target = CosineTarget(members, np.eye(m))
    cosine = target.cosine(PlanSearch(target, 1, 200, np.random.default_rng(m)).best())
    assert 0.999 * members.bound < cosine <= members.bound * (1 + 1e-12)


@pytest.mark.parametrize(
    "rule", [EVALUATION, Bounds(kind=BoundKind.FIXED), Bounds(kind=BoundKind.BOX), Bounds(kind=BoundKind.CAP)]
)
def test_tighter_bounds_of_an_algorithm_never_show_more_than_its_cover(rule: Bounds) -> None:
    members = SearchMembers(rule, Thresholds(20, Mode.PRIVATE))
    target = CosineTarget(members, np.eye(20))
    cosine = target.cosine(PlanSearch(target, 1, 200, np.random.default_rng(0)).best())
    assert cosine <= members.bound
    if rule.kind in (BoundKind.EQUAL, BoundKind.FIXED):
        n = members.cohort.n_min - members.cohort.t
        assert cosine == pytest.approx(n**-0.5, abs=1e-6)


def test_real_members_answer_what_the_search_finds_and_the_sum_shows_what_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = SearchMembers(FREE, Thresholds(5, Mode.SUM))
    target = CosineTarget(members, np.eye(5))
    plan = PlanSearch(target, 1, 200, np.random.default_rng(0)).best()
    a = np.zeros(5)
    a[plan.places] = members.normed(plan.weights[0])
    monkeypatch.setattr(session, "covered", lambda *_: Covered(tuple(truncated(a.tolist())), 1.0))
    scene = cast(5, lost={("secure-mask", 0): names(plan.places[~plan.survivors[0]])})
    lax = SimulatedMembers(0, scene.members, ORIGIN.task, effective_members=1.0)
    for place, (name, member) in enumerate(scene.members.items()):
        colludes = place in plan.places[1 : 1 + members.cohort.t]
        vector = np.eye(5, 40, dtype=np.float32)[place]
        scene.members[name] = replace(member, vector=vector, members=lax if colludes else member.members)
    left = play(scene, Mode.SUM).words.view(np.int32).astype(float)
    left[plan.places[1 : 1 + members.cohort.t]] = 0.0
    assert not scene.declined
    shown = abs(left[plan.places[0]]) / np.linalg.norm(left)
    assert shown == pytest.approx(target.cosine(plan), abs=1e-6)
    assert shown == pytest.approx(members.bound, rel=1e-3)


def test_individual_parts_have_nothing_of_the_mean_of_the_others() -> None:
    updates = np.random.default_rng(0).normal(1, 1, (6, 30))
    parts = individual_parts(updates)
    for i, part in enumerate(parts):
        others = np.delete(updates, i, 0).mean(0)
        assert part @ others == pytest.approx(0, abs=1e-9)
        assert np.linalg.matrix_rank(np.stack([updates[i] - part, others])) == 1
