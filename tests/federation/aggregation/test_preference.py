"""Weights that follow a preference: the references, the promises of the programme, and what happens without one."""

import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from federation.aggregation.interface import HyperparameterError
from federation.aggregation.qp import min_norm
from federation.aggregation.rules import preference as preferences
from federation.aggregation.rules.preference import NoSolutionError, divergence, preferred, programme, solve
from federation.sketches.base import clip_to_psd
from fedpareto.processes.forked import completed
from tests.federation.aggregation.scene import KINDS, Matrix, matrix, reference


def test_the_programmes_and_their_solutions_are_those_of_the_reference() -> None:
    for case in reference("preference_lp"):
        G, F, r = np.array(case["gram"]), np.array(case["losses"]), np.array(case["preference"])
        slack = 0.1 if case["jstar_rule"] == "within_10pct" else 0.0
        expected = case["expected"]
        assert abs(divergence(F, r) - expected["mu"]) <= 1e-12, case["id"]
        wanted = programme(G, F, r, threshold=case["eps"], slack=slack)
        assert wanted.mode == expected["mode"], case["id"]
        if wanted.mode == "balance":
            assert np.allclose(wanted.objective, expected["Ca"], rtol=1e-9, atol=1e-12), case["id"]
        try:
            weights = solve(G, wanted)
        except NoSolutionError:
            assert not expected["feasible"] or np.ptp(wanted.objective) == 0, case["id"]
            continue
        assert expected["feasible"], case["id"]
        assert abs(wanted.objective @ weights - expected["lp_value"]) <= 1e-8, case["id"]
        if expected["alpha_unique"]:
            assert np.abs(weights - expected["alpha"]).max() <= 1e-6, case["id"]


def test_preferred_weights_are_those_of_the_reference() -> None:
    seen = 0
    for case in reference("preference_lp"):
        r, expected = np.array(case["preference"]), case["expected"]
        if abs(r.mean() - 1) > 1e-12 or not expected.get("alpha_unique"):
            continue
        slack = 0.1 if case["jstar_rule"] == "within_10pct" else 0.0
        found = preferred(np.array(case["gram"]), case["losses"], r, threshold=case["eps"], slack=slack)
        assert np.abs(found.weights - expected["alpha_min_weight_mix_0p2"]).max() <= 1e-6, case["id"]
        assert (found.mode, found.note) == (expected["mode"], ""), case["id"]
        seen += 1
    assert seen >= 8


def squeezed(kind: str, m: int, d: int, seed: int) -> Matrix:
    U = matrix(kind, m, d, seed)
    return U @ U.T


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 9), st.integers(0, 10**6))
def test_the_weights_are_a_distribution_that_meets_the_constraints(kind: str, m: int, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    G, F, r = squeezed(kind, m, d, seed), rng.uniform(0.1, 3, m), rng.uniform(0.2, 5, m)
    found = preferred(G, F, r, minimum=0.0)
    assert (found.weights >= 0).all()
    assert abs(found.weights.sum() - 1) <= 1e-12
    assert 0 <= found.divergence <= np.log(m) + 1e-12
    if found.mode == "min-norm":
        assert "all weights are equally good" in found.note
        return
    scaled = G / (np.diag(G).max() or 1.0)
    wanted = programme(scaled, F, r / r.mean(), threshold=1e-2, slack=0.0)
    assert found.mode == wanted.mode
    assert (scaled @ found.weights >= wanted.least - 1e-6).all()
    assert wanted.objective @ found.weights >= wanted.objective @ min_norm(G).weights - 1e-6


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.floats(0.01, 100))
def test_the_divergence_is_zero_exactly_on_the_ray_of_the_preference(r: list[float], scale: float) -> None:
    preference = np.array(r)
    assert divergence(scale / preference, preference) <= 1e-12
    far = scale / preference * np.linspace(1, 2, len(r))
    assert divergence(far, preference) > 1e-4
    assert divergence(np.array([1.0] + [0.0] * (len(r) - 1)), preference) == pytest.approx(np.log(len(r)))


def test_moving_along_the_weights_lowers_the_divergence() -> None:
    J = np.random.default_rng(2).standard_normal((3, 40))
    F, r = np.array([2.0, 1.0, 0.5]), np.array([1.0, 1.0, 2.0])
    found = preferred(J @ J.T, F, r)
    assert found.mode == "balance"
    after = F - 1e-3 * J @ (found.weights @ J)
    assert divergence(after, r) < found.divergence


@pytest.mark.parametrize("scale", [1e-200, 1e-12, 1e12, 1e150])
def test_neither_the_scale_of_gradients_nor_that_of_the_preference_plays_a_role(scale: float) -> None:
    case = np.array([[3.0, -1.0, 0.5], [-1.0, 2.0, 0.1], [0.5, 0.1, 1.0]])
    F, r = [1.0, 0.5, 1.2], np.array([1.0, 2.0, 1.0])
    plain = preferred(case, F, r)
    assert np.allclose(preferred(case * scale, F, r).weights, plain.weights, atol=1e-9)
    assert np.allclose(preferred(case, F, 7 * r).weights, plain.weights, atol=1e-9)


@pytest.mark.full
def test_the_same_input_gives_the_same_bytes_in_another_process() -> None:
    code = (
        "import numpy as np\n"
        "from federation.aggregation.rules.preference import preferred\n"
        "U = np.random.default_rng(8).standard_normal((7, 20))\n"
        "print(preferred(U @ U.T, np.linspace(0.5, 1, 7), np.ones(7), threshold=0).weights.tobytes().hex())"
    )
    runs = {completed(["-c", code]).stdout}
    U = np.random.default_rng(8).standard_normal((7, 20))
    for _ in range(2):
        found = preferred(U @ U.T, np.linspace(0.5, 1, 7), np.ones(7), threshold=0)
        runs.add(found.weights.tobytes().hex() + "\n")
    assert found.mode == "balance"
    assert len(runs) == 1


def test_every_weight_is_at_least_the_minimum() -> None:
    found = preferred(np.diag([1.0, 1.0, 1.0, 1.0]), [4.0, 1.0, 1.0, 1.0], np.ones(4), minimum=0.2)
    assert found.weights.min() == pytest.approx(0.2 / 4)
    assert found.weights.sum() == pytest.approx(1)


# --- where there is no programme to follow


@pytest.mark.parametrize("G", [np.zeros((3, 3)), np.ones((3, 3))])
def test_without_anything_to_choose_by_the_min_norm_weights_are_taken(G: Matrix) -> None:
    found = preferred(G, [1.0, 2.0, 3.0], np.ones(3))
    assert found.mode == "min-norm"
    assert found.note == "balance: all weights are equally good; min-norm weights instead"
    assert np.allclose(found.weights, 1 / 3)


def test_an_infeasible_programme_is_named_so() -> None:
    programme = preferences.Programme("descent", np.array([1.0, 2.0]), np.zeros(2))
    with pytest.raises(NoSolutionError, match="the linear programme is infeasible"):
        solve(np.array([[1.0, -3.0], [-3.0, 1.0]]), programme)


@settings(max_examples=40)
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_an_indefinite_estimate_is_clipped_and_then_feasible(m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    G = rng.standard_normal((m, m))
    assume(np.diag(clip_to_psd(G)).max() > 1e-3)
    found = preferred(G, rng.uniform(0.1, 2, m), np.ones(m))
    assert found.mode in ("balance", "descent") or "equally good" in found.note


def test_one_objective_has_all_the_weight() -> None:
    found = preferred(np.array([[2.0]]), [0.5], [3.0])
    assert (found.weights.tolist(), found.divergence, found.mode, found.note) == ([1.0], 0.0, "descent", "")


@pytest.mark.parametrize("losses", [[0.0, 1.0, 2.0], [-1.0, 1.0, 2.0], [0.0, 0.0, 0.0], [1e-300, 1e300, 1.0]])
def test_losses_without_a_logarithm_are_weighed_all_the_same(losses: list[float]) -> None:
    found = preferred(np.diag([1.0, 2.0, 3.0]), losses, np.ones(3))
    assert np.isfinite(found.weights).all()
    assert np.isfinite(found.divergence)


def test_without_cvxpy_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    preferences.check_cvxpy()
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(HyperparameterError, match=r'pip install "fedpareto\[preference\]"'):
        preferences.check_cvxpy()
    with pytest.raises(HyperparameterError, match="not installed here"):
        preferred(np.eye(2), [1.0, 2.0], np.ones(2))


@pytest.mark.full
def test_cvxpy_is_loaded_only_where_a_preference_is_followed() -> None:
    code = "import federation.aggregation.rules.preference, sys; print('cvxpy' in sys.modules)"
    assert completed(["-c", code]).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("losses", "preference", "words"),
    [
        ([1.0, 2.0], [1.0, 0.0], "positive numbers"),
        ([1.0, 2.0], [1.0, np.nan], "positive numbers"),
        ([1.0, 2.0], [], "positive numbers"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "over 3 objectives"),
        ([1.0, np.nan], [1.0, 1.0], "must be finite"),
    ],
)
def test_what_cannot_be_is_refused(losses: list[float], preference: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        preferred(np.eye(2), losses, preference)
