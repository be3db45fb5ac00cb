"""Our robust rules and stages, value by value against ByzFL's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from byzfl import (
    ARC,
    NNM,
    Average,
    Bucketing,
    CenteredClipping,
    Clipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrMean,
)

from federation.aggregation.interface import Rows
from federation.aggregation.pre import apply
from federation.aggregation.registry import algorithm
from fedpareto.offline_aggregation import aggregate
from tests.peers.scene import Matrix, Round, Vector, rounds

ALL = tuple(rounds())


def ours(name: str, case: Round, **hyperparameters: Any) -> Vector:
    return aggregate(name, case.updates, **hyperparameters).direction


def staged(case: Round, **hyperparameters: Any) -> Matrix:
    m = len(case.updates)
    rows = Rows(gram=case.updates @ case.updates.T, prior=np.full(m, 1 / m), samples=np.ones(m))
    mixed: Matrix = apply(algorithm("fedavg", hyperparameters).stages, rows).matrix @ case.updates
    return mixed


def radius(case: Round) -> float:
    return 0.7 * case.median_norm + 1e-9


SAME: dict[str, tuple[Callable[[Round], Vector], Callable[[Round], Vector]]] = {
    "average": (lambda case: ours("fedavg", case), lambda case: Average()(case.updates)),
    "median": (lambda case: ours("median", case), lambda case: Median()(case.updates)),
    "trimmed mean": (
        lambda case: ours("trimmed-mean", case, byzantine=case.f),
        lambda case: TrMean(f=case.f)(case.updates),
    ),
    "Krum": (
        lambda case: ours("krum", case, byzantine=case.f),
        lambda case: Krum(f=case.f + 1)(case.updates),  # see below
    ),
    "centred clipping": (
        lambda case: ours("centred-clipping", case, radius=radius(case), iterations=5),
        lambda case: CenteredClipping(L=5, tau=radius(case))(case.updates),
    ),
    "norm clipping": (
        lambda case: ours("norm-clipping", case, radius=radius(case)),
        lambda case: Average()(Clipping(c=radius(case))(case.updates.copy())),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_direction_is_theirs(name: str) -> None:
    here, there = SAME[name]
    for case in ALL:
        assert case.differ(here(case), there(case)) <= 1, case


def test_mixed_updates_are_theirs() -> None:
    for case in ALL:
        for mine, theirs in zip(staged(case, pre=("nnm",), byzantine=case.f), NNM(f=case.f)(case.updates), strict=True):
            assert case.differ(mine, theirs) <= 1, case


def test_clipped_updates_are_theirs() -> None:
    for case in ALL:
        here = staged(case, pre=("clip",), clip_norm=radius(case))
        for mine, theirs in zip(here, Clipping(c=radius(case))(case.updates.copy()), strict=True):
            assert case.differ(mine, theirs) <= 1, case


def test_adaptively_clipped_updates_are_theirs() -> None:
    for case in ALL:
        here = staged(case, pre=("arc",), byzantine=case.f)
        for mine, theirs in zip(here, ARC(f=case.f)(case.updates.copy()), strict=True):
            assert case.differ(mine, theirs) <= 1, case


def test_buckets_of_the_same_updates_have_their_means() -> None:
    for seed, case in enumerate(ALL):
        m = len(case.updates)
        np.random.seed(seed)
        drawn = np.random.permutation(m)
        order = np.random.default_rng([0, 0]).permutation(m)  # as the stage draws it in round 0
        arranged = np.empty_like(case.updates)
        arranged[drawn] = case.updates[order]
        np.random.seed(seed)
        theirs = Bucketing(s=2)(arranged)
        for mine, their in zip(staged(case, pre=("bucket",), bucket_size=2), theirs, strict=True):
            assert case.differ(mine, their) <= 1, case


# --- Krum: they take one neighbour more, so that their f + 1 is our f


def scores(U: Matrix, f: int) -> Vector:
    """Krum's scores as Blanchard et al. (2017) define them, from the updates themselves."""
    squares = ((U[:, None] - U[None]) ** 2).sum(axis=2)
    found: Vector = np.sort(squares, axis=1)[:, 1 : len(U) - f - 1].sum(axis=1)
    return found


def test_with_the_same_f_their_krum_is_that_of_the_larger_neighbourhood() -> None:
    different = 0
    for case in ALL:
        theirs = Krum(f=case.f)(case.updates)
        larger = case.updates[scores(case.updates, case.f - 1).argmin()]
        assert case.differ(larger, theirs) <= 1, case
        different += case.differ(ours("krum", case, byzantine=case.f), theirs) > 1
    assert 0 < different < 0.5 * len(ALL)


def test_their_multi_krum_is_ours_and_one_update_more() -> None:
    """With f + 1 and the same scores, they average m - f - 1 updates: the m - f - 2 of ours, and the next by score."""
    for case in ALL:
        count = len(case.updates) - case.f - 2
        following = case.updates[np.argsort(scores(case.updates, case.f), kind="stable")[count]]
        expected = (count * ours("multi-krum", case, byzantine=case.f) + following) / (count + 1)
        assert case.differ(expected, MultiKrum(f=case.f + 1)(case.updates)) <= 1, case


# --- the geometric median: they stop after T steps, ours where the pulls balance


def test_the_geometric_median_is_theirs_where_it_is_one_point_and_they_have_reached_it() -> None:
    """On a line, every point between the two middle ones of an even number is a median; ours is in their middle."""
    different = 0
    for case in ALL:
        U = case.updates
        mine = ours("geometric-median", case)
        theirs = GeometricMedian(nu=max(1e-4 * case.scale, 1e-12), T=300)(U)
        assert case.no_farther(mine, theirs), case
        different += case.differ(mine, theirs) > 1 and not (U.shape[1] == 1 and len(U) % 2 == 0)
    assert different <= 0.06 * len(ALL)
