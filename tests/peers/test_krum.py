"""Our robust rules, value by value against those of the package krum, by an author of the paper."""

from collections.abc import Callable
from typing import Any

import pytest

from fedpareto.offline_aggregation import aggregate
from tests.peers.scene import Round, Vector, rounds

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("krum", reason="the package krum needs Python 3.12 or newer")
from krum.primitives.aggregators.geometric_median import GeometricMedian  # noqa: E402 - after the check
from krum.primitives.aggregators.krum import Krum  # noqa: E402
from krum.primitives.aggregators.median import Median  # noqa: E402
from krum.primitives.aggregators.multikrum import MultiKrum  # noqa: E402
from krum.primitives.aggregators.trimmed_mean import TrimmedMean  # noqa: E402

ALL = tuple(rounds())

THEIRS: dict[str, Callable[[Round], Vector]] = {
    "krum": lambda case: Krum.aggregate(torch.from_numpy(case.updates), n=len(case.updates), f=case.f).numpy(),
    "multi-krum": lambda case: MultiKrum.aggregate(
        torch.from_numpy(case.updates), n=len(case.updates), f=case.f, m=len(case.updates) - case.f - 2
    ).numpy(),
    "median": lambda case: Median.aggregate(torch.from_numpy(case.updates)).numpy(),
    "trimmed-mean": lambda case: TrimmedMean.aggregate(torch.from_numpy(case.updates), f=case.f).numpy(),
}


@pytest.mark.parametrize("name", THEIRS)
def test_the_direction_is_theirs(name: str) -> None:
    for case in ALL:
        keys: dict[str, Any] = {} if name == "median" else {"byzantine": case.f}
        assert case.differ(aggregate(name, case.updates, **keys).direction, THEIRS[name](case)) <= 1, case


def test_no_geometric_median_of_theirs_has_a_smaller_sum_of_distances() -> None:
    for case in ALL[::4]:
        U = case.updates
        theirs = GeometricMedian.aggregate(
            torch.from_numpy(U), n=len(U), f=case.f, nu=max(1e-4 * case.scale, 1e-12), tol=0.0, max_iter=300
        ).numpy()
        assert case.no_farther(aggregate("geometric-median", U).direction, theirs), case
