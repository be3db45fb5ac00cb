"""Directions that are against no update, whatever the updates are: <direction, u_i> >= 0 for every i.

A search looks for updates that a rule's direction is against. Rounding is relative to sum |c_i| ||u_i||, the size of
what the direction adds up.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.federation.aggregation.adversary import coefficients, conflict, rule_over_objectives, search
from tests.federation.aggregation.scene import KINDS, Matrix, matrix
from tests.few import few

SHAPES = [(4, 2), *(pytest.param(m, d, marks=pytest.mark.full) for m, d in [(2, 2), (6, 3), (5, 8), (9, 4)])]
# A conflict that a rule may leave: of the quadratic program, of a cosine, of the dual cone's residual.
CLAIMS: list[tuple[str, dict[str, Any], float]] = [
    ("fedmgda", {}, 1e-9),
    ("fedmgda+", {"epsilon": 1.0}, 1e-9),
    ("fedmgda+auto", {}, 2e-9),
    ("dual-cone", {}, 1e-6),
    ("nash-mtl", {}, 0.0),
    ("adafed", {}, 1e-6),
    ("fedmdfg", {}, 1e-6),
]


def starts(m: int, d: int) -> Iterator[Matrix]:
    return (matrix(kind, m, d, seed=0) for kind in KINDS)


def steps(request: pytest.FixtureRequest, name: str) -> int:
    return (400 if request.node.get_closest_marker("full") else 30) // (10 if name == "fedmgda+auto" else 1)


@pytest.mark.parametrize(("m", "d"), SHAPES)
@few("fedmgda+", "nash-mtl", "adafed")
@pytest.mark.parametrize(("name", "hyperparameters", "rounding"), CLAIMS, ids=[name for name, _, _ in CLAIMS])
def test_no_updates_that_a_search_finds_are_opposed(
    request: pytest.FixtureRequest, name: str, hyperparameters: dict[str, Any], rounding: float, m: int, d: int
) -> None:
    answer = coefficients(name, **hyperparameters)

    def harm(U: Matrix) -> float:
        c = answer(U)
        return conflict(U, c @ U, float(np.abs(c) @ np.linalg.norm(U, axis=1)))

    found, U = search(starts(m, d), harm, steps=steps(request, name), seed=1)
    assert found <= rounding, U


@pytest.mark.parametrize("name", ["fedavg", "fedfv", "centred-clipping"])
def test_the_search_finds_updates_that_other_rules_oppose(name: str) -> None:
    answer = coefficients(name)
    found, _ = search(starts(4, 2), lambda U: conflict(U, answer(U) @ U, 1.0), steps=10, seed=1)
    assert found > 0.1


@pytest.mark.parametrize(("m", "d"), SHAPES)
def test_fsmgda_opposes_no_objective(request: pytest.FixtureRequest, m: int, d: int) -> None:
    direction = rule_over_objectives("fsmgda", bound="none")

    def harm(U: Matrix) -> float:
        rows = U.astype(np.float32).astype(np.float64)
        return conflict(rows, direction(rows[None]), float(np.linalg.norm(rows, axis=1).max()))

    found, U = search(starts(m, d), harm, steps=steps(request, "fsmgda") // 3, seed=1)
    assert found <= 1e-9, U


@pytest.mark.parametrize(("m", "d"), SHAPES)
@pytest.mark.parametrize("name", ["torchjd:upgrad", "torchjd:dualproj"])
def test_weightings_of_torchjd_oppose_an_update_by_no_more_than_their_regularisation(
    request: pytest.FixtureRequest, name: str, m: int, d: int
) -> None:
    """TorchJD adds 1e-4 of the trace of K to its diagonal: (K c)_i >= -1e-4 tr(K) c_i."""
    pytest.importorskip("torchjd", reason="TorchJD is not installed")
    answer = coefficients(name)

    def harm(U: Matrix) -> float:
        K, c = U @ U.T, answer(U)
        allowed = 1e-4 * np.trace(K) * c
        return float((-(K @ c) - allowed).max() / (np.trace(K) * np.abs(c).max() + 1e-300))

    found, U = search(starts(m, d), harm, steps=steps(request, name) // 3, seed=1)
    assert found <= 1e-9, U


def test_a_short_update_is_opposed_by_upgrad_of_torchjd_and_by_no_rule_of_ours() -> None:
    pytest.importorskip("torchjd", reason="TorchJD is not installed")
    U = np.array([[1.0, 0.0], [0.5, 1.0], [-0.001, 0.0002]])
    opposed = {name: (U @ (coefficients(name)(U) @ U)).min() < -1e-12 for name, _, _ in CLAIMS}
    assert not any(opposed.values()), opposed
    for name in ("torchjd:upgrad", "torchjd:dualproj"):
        assert (U @ (coefficients(name)(U) @ U))[2] < 0
        assert (U @ (coefficients(name, pre=["normalize"])(U) @ U)).min() >= -1e-3
