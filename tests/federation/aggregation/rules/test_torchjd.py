"""The weightings of TorchJD as rules: what is there, what is refused and why, and the same bytes again."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from federation.aggregation.hyperparameters import hyperparameters
from federation.aggregation.phases import Replies, RoundContext
from federation.aggregation.qp import UnsolvedError
from federation.aggregation.registry import algorithm
from federation.aggregation.rules import torchjd
from fedpareto.offline_aggregation import HyperparameterError, TooFewUpdatesError, aggregate
from tests.federation.aggregation.scene import Vector, coefficients_of, matrix, reply, stepped
from tests.harness import python

pytestmark = pytest.mark.skipif(find_spec("torchjd") is None, reason="TorchJD is not installed")

OFFERED = ("alignedmtl", "cagrad", "dualproj", "fairgrad", "imtlg", "krum", "mgda", "pcgrad", "upgrad")
NAMES = tuple(f"torchjd:{name}" for name in OFFERED)
U = matrix("random", 6, 30, seed=1)


def step(name: str, t: int, **keys: Any) -> Vector:
    replies = Replies([reply(f"c{i}", u) for i, u in enumerate(U)])
    return stepped(algorithm(name, keys).round(RoundContext(number=t, total=9)), replies).combination.coefficients


@pytest.mark.parametrize("name", NAMES)
def test_a_weighting_gives_coefficients_whatever_the_scale_and_the_same_ones_again(name: str) -> None:
    result = aggregate(name, U)
    assert result.weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(result.direction, coefficients_of(result) @ U, atol=1e-12)
    np.testing.assert_allclose(coefficients_of(aggregate(name, 1e-4 * U)), coefficients_of(result), atol=1e-6)
    assert step(name, 3).tobytes() == step(name, 3).tobytes()
    assert aggregate(name, np.zeros((6, 4))).diagnostics["stationary"] == 1


def test_they_do_what_they_are_known_for() -> None:
    conflicting = matrix("conflicting", 5, 9, seed=2)
    found = aggregate("torchjd:upgrad", conflicting)
    assert (conflicting @ found.direction >= -1e-3 * np.linalg.norm(conflicting)).all()
    prior = np.arange(1, 7)
    ours, theirs = (aggregate(name, U, prior=prior).direction for name in ("dual-cone", "torchjd:dualproj"))
    np.testing.assert_allclose(theirs, ours, atol=1e-2)
    shortest, found_by = (np.linalg.norm(aggregate(name, U).direction) for name in ("fedmgda", "torchjd:mgda"))
    assert found_by == pytest.approx(shortest, rel=0.05)


def test_what_is_drawn_depends_on_the_seed_and_the_round_and_on_nothing_else() -> None:
    import torch

    before = torch.random.get_rng_state()
    first = step("torchjd:pcgrad", 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)
    np.testing.assert_array_equal(step("torchjd:pcgrad", 0), first)
    assert (step("torchjd:pcgrad", 1) != first).any()
    assert (step("torchjd:pcgrad", 0, seed=1) != first).any()


@pytest.mark.full
def test_runs_beside_each_other_draw_their_own() -> None:
    U = matrix("conflicting", 6, 20, 0)
    alone = aggregate("torchjd:pcgrad", U).coefficients
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: aggregate("torchjd:pcgrad", U).coefficients, range(200)):
            assert found is not None
            np.testing.assert_array_equal(found, alone)


def test_parameters_are_those_of_torchjd() -> None:
    there = {name: {f.name: f.default for f in hyperparameters(torchjd.rule(name))} for name in NAMES}
    assert there["torchjd:upgrad"] == {"seed": 0}
    assert there["torchjd:cagrad"] == {"seed": 0, "c": 0.4, "norm_eps": 0.0001}
    assert there["torchjd:krum"] == {"seed": 0, "n_byzantine": 1, "n_selected": 1}
    one, other = (coefficients_of(aggregate("torchjd:cagrad", U, c=c)) for c in (0.1, 0.9))
    assert (one != other).any()
    assert aggregate("torchjd:krum", U, n_selected=2).weights.max() == 0.5


def test_what_torchjd_cannot_solve_is_no_step() -> None:
    with pytest.raises(UnsolvedError, match=r"torchjd:krum: .*n_selected"):
        aggregate("torchjd:krum", U, n_selected=40)


def test_krum_of_torchjd_keeps_krums_bound() -> None:
    with pytest.raises(TooFewUpdatesError, match="torchjd:krum with n_byzantine = 2 needs at least 7 updates; there"):
        aggregate("torchjd:krum", U, n_byzantine=2)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "torchjd:krum"])
def test_one_reply_is_the_direction(name: str) -> None:
    np.testing.assert_allclose(aggregate(name, U[:1]).direction, U[0], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("torchjd:foo", {}, "no algorithm 'torchjd:foo'; of TorchJD, there are torchjd:alignedmtl, torchjd:cagrad"),
        ("torchjd:nashmtl", {}, "nash-mtl solves the same equation"),
        ("torchjd:gradvac", {}, "it remembers things between steps"),
        ("torchjd:trimmedmean", {}, "it is no function of the Gram matrix"),
        ("torchjd:upgrad", {"c": 1.0}, "c: torchjd:upgrad has no such hyper-parameter; it has seed, pre"),
        ("torchjd:cagrad", {"c": -1.0}, "c must be non-negative"),
        ("torchjd:upgrad", {"seed": -1}, r"seed must lie in \[0, inf\)"),
    ],
)
def test_what_cannot_be_used_is_named(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        algorithm(name, keys)


def test_without_torchjd_the_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchjd", None)
    torchjd._catalogue.cache_clear()
    with pytest.raises(HyperparameterError, match=r'not installed here: pip install "fedpareto\[torch,torchjd\]"'):
        algorithm("torchjd:upgrad")


@pytest.mark.full
def test_nothing_of_it_is_loaded_before_it_is_named() -> None:
    code = "import sys, fedpareto, coordinator.server, federation.aggregation.registry as r; r.algorithm('fedavg')\n"
    code += "print({'torch', 'torchjd'} & sys.modules.keys())"
    assert python("-c", code).stdout.strip() == "set()"
