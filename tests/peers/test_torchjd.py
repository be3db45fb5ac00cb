"""Our rules, value by value against TorchJD's, and the rules that are TorchJD's own through our adapter."""

import numpy as np
import pytest
import torch
from torchjd._linalg import QuadprogProjector
from torchjd.aggregation import IMTLG, MGDA, Aggregator, AlignedMTL, DualProj, Krum, Mean, NashMTL, TrimmedMean, UPGrad

from federation.aggregation.qp import UnsolvedError
from fedpareto.offline_aggregation import aggregate
from tests.peers.scene import Matrix, Round, Vector, rounds

ALL = tuple(rounds())
# Updates that are 1e12 times longer make Gram matrices of 24 decades, more than TorchJD's solvers resolve.
RESOLVED = tuple(case for case in ALL if case.kind != "scaled by 1e12")


def theirs(aggregator: Aggregator, U: Matrix) -> Vector:
    direction: Vector = aggregator(torch.from_numpy(U)).detach().numpy()
    return direction


def test_the_mean_and_the_trimmed_mean_are_theirs() -> None:
    for case in ALL:
        assert case.differ(aggregate("fedavg", case.updates).direction, theirs(Mean(), case.updates)) <= 1, case
        mine = aggregate("trimmed-mean", case.updates, byzantine=case.f).direction
        assert case.differ(mine, theirs(TrimmedMean(case.f), case.updates)) <= 1, case


# --- Krum: they add up distances, Blanchard et al. (2017) their squares


def test_krum_differs_only_where_sums_of_distances_and_of_squares_rank_differently() -> None:
    different = 0
    for case in ALL:
        U, f = case.updates, case.f
        distances = np.linalg.norm(U[:, None] - U[None], axis=2)
        near = np.sort(distances, axis=1)[:, 1 : len(U) - f - 1]
        mine = aggregate("krum", U, byzantine=f).direction
        direction = theirs(Krum(n_byzantine=f), U)
        for found, scores in ((mine, (near**2).sum(axis=1)), (direction, near.sum(axis=1))):
            chosen = np.linalg.norm(U - found, axis=1).argmin()
            resolved = 1e-6 * float(np.sort(np.linalg.norm(U, axis=1))[: len(U) - f].max())  # of a distance from K
            assert scores[chosen] <= scores.min() * (1 + 1e-9) + resolved * max(1.0, scores.min()), case
        different += case.differ(mine, direction) > 1
    assert 0 < different < 0.3 * len(ALL)


# --- the min-norm point: they take steps of Frank and Wolfe, ours is exact


def test_mgda_of_theirs_is_no_shorter_and_as_near_to_ours_as_its_length_says() -> None:
    """The point of least norm d* of a convex set: every other point d of it has ||d - d*||^2 <= ||d||^2 - ||d*||^2."""
    same = 0
    for case in RESOLVED[::3]:
        mine = aggregate("fedmgda", case.updates).direction
        direction = theirs(MGDA(epsilon=1e-9, max_iters=500), case.updates)
        rounding = 1e-9 * case.median_norm**2
        excess = float(direction @ direction - mine @ mine)
        assert float((direction - mine) @ (direction - mine)) <= excess + rounding, case
        same += case.differ(mine, direction) <= 1
    assert same >= 0.2 * len(RESOLVED[::3])


# --- the dual cone: they regularise K, by 1e-4 of its trace unless told otherwise


def exact() -> QuadprogProjector:
    return QuadprogProjector(norm_eps=0.0, reg_eps=1e-12)


def test_the_dual_cone_is_theirs_without_regularisation() -> None:
    same = unsolved = 0
    for case in RESOLVED:
        U = case.updates
        if not U.any():
            continue
        mine = aggregate("dual-cone", U).direction
        try:
            direction = theirs(DualProj(projector=exact()), U)
        except ValueError:
            unsolved += 1  # K has fewer dimensions than rows, and quadprog needs it definite
            continue
        if case.differ(mine, direction) <= 1:
            same += 1
            continue
        # Theirs opposes an update, or is further from the average: ours is the projection.
        average, norms = U.mean(axis=0), np.linalg.norm(U, axis=1)
        opposed = float((U @ direction / np.maximum(norms, 1e-300)).min()) < -1e-7 * case.median_norm
        assert (
            opposed or np.linalg.norm(mine - average) <= np.linalg.norm(direction - average) + 1e-6 * case.median_norm
        )
    assert same >= 0.9 * len(RESOLVED)
    assert unsolved == 0


# --- Nash-MTL: they stop early; ours solves the equation alpha_i <u_i, sum alpha_j u_j> = constant


def unequal(U: Matrix, direction: Vector, coefficients: Vector) -> float:
    gains = coefficients * (U @ direction)
    return float(np.ptp(gains) / np.abs(gains).max()) if gains.any() else 0.0


def test_nash_mtl_agrees_where_theirs_solves_the_equation() -> None:
    agreed = 0
    for case in RESOLVED[::24]:
        U = case.updates
        mine = aggregate("nash-mtl", U)
        if mine.diagnostics["stationary"]:
            continue  # there is no bargain
        assert mine.diagnostics["residual"] <= 1e-6
        aggregator = NashMTL(n_tasks=len(U), max_norm=0.0, optim_niter=100)
        weights = aggregator.weighting(torch.from_numpy(U)).detach().numpy().astype(np.float64)
        direction = weights @ U
        if not np.isfinite(direction).all() or unequal(U, direction, weights) > 1e-3:
            continue
        cosine = direction @ mine.direction / np.linalg.norm(direction) / np.linalg.norm(mine.direction)
        assert cosine > 1 - 1e-4, case
        agreed += 1
    assert agreed >= 5


def test_nash_mtl_of_theirs_stops_early_where_norms_differ() -> None:
    """torchjd:nashmtl is refused because of such cases.

    When theirs solves this one, revise docs/research/algorithms.md.
    """
    rng = np.random.default_rng(7)
    U = rng.standard_normal((10, 20))
    U *= 10.0 ** rng.uniform(-1, 1, (10, 1)) / np.linalg.norm(U, axis=1, keepdims=True)
    mine = aggregate("nash-mtl", U)
    assert unequal(U, mine.direction, np.asarray(mine.coefficients)) < 1e-9
    weights = NashMTL(n_tasks=10, max_norm=0.0, optim_niter=100).weighting(torch.from_numpy(U)).detach().numpy()
    direction = weights @ U
    assert unequal(U, direction, weights) > 0.5
    assert direction @ mine.direction / np.linalg.norm(direction) / np.linalg.norm(mine.direction) < 0.9


# --- their own rules through our adapter


@pytest.mark.parametrize(
    ("name", "aggregator"),
    [
        ("upgrad", UPGrad()),
        ("dualproj", DualProj()),
        ("mgda", MGDA()),
        ("imtlg", IMTLG()),
        ("alignedmtl", AlignedMTL()),
    ],
)
def test_the_adapter_gives_what_the_library_gives(name: str, aggregator: Aggregator) -> None:
    unsolved = 0
    for case in RESOLVED[::3]:
        U = case.updates
        scale = float(np.sqrt((U**2).sum(axis=1).mean()))  # TorchJD has tolerances that are not relative
        try:
            mine = aggregate(f"torchjd:{name}", U)
        except UnsolvedError:
            unsolved += 1
            continue
        if mine.diagnostics["stationary"]:
            continue
        direction = scale * theirs(aggregator, U / scale)
        assert case.differ(mine.direction, direction) <= (10 if name == "imtlg" else 1), case  # a pseudo-inverse
    assert unsolved == 0


def test_the_rounds_are_as_many_as_they_claim() -> None:
    assert len(ALL) == 1012
    assert all(isinstance(case, Round) and len(case.updates) >= 2 * case.f + 3 for case in ALL)
