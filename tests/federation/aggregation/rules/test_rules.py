"""The algorithms, the registry and the library call: what the theory promises, and the references."""

import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.aggregation.interface import Rows
from federation.aggregation.metrics.step_rate import server_rate
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import Replies, RoundContext
from federation.aggregation.registry import ALGORITHMS, algorithm
from fedpareto.offline_aggregation import HyperparameterError, aggregate
from tests.federation.aggregation import scene

# The others need losses or accuracies, or several updates, or have no coefficients.
OTHERS = {"q-fedavg", "afl", "adafed", "fedfa", "fedfv", "fedmdfg", "krum", "multi-krum", "median", "trimmed-mean"}
OVER_OBJECTIVES = {"scalarised", "fsmgda", "fedcmoo", "fedcmoo-pref"}  # whose rounds are in test_objective_rules
NAMES = tuple(name for name in ALGORITHMS if name not in OTHERS)
MGDA = ("fedmgda", "fedmgda+")
CONVEX = ("krum", "multi-krum", "geometric-median")  # c is lambda: the direction is a weighted mean of the updates
cases = st.tuples(scene.zoo, st.sampled_from(NAMES)) | st.tuples(scene.crowds, st.sampled_from(["q-fedavg", *CONVEX]))


def size(U: scene.Matrix) -> float:
    return float(np.linalg.norm(U, axis=1).max(initial=0.0))


def test_fedmgda_plus_is_that_of_the_reference() -> None:
    for case in scene.reference("fedmgda_plus"):
        updates = np.array([[math.nan if x is None else float(x) for x in row] for row in case["updates"]])
        if case["normalize"]:
            result = aggregate("fedmgda+", updates, prior=case["lambda0"], epsilon=case["epsilon"])
        else:
            result = aggregate("fedmgda", updates, prior=case["lambda0"])
        expected = case["expected"]
        rate = server_rate(case["eta0"], case["decay"], case["round"], case["total_rounds"])
        assert rate == pytest.approx(expected["eta_t"], rel=1e-12), case["id"]
        assert np.abs(result.direction - expected["d"]).max() <= 1e-8, case["id"]
        assert np.abs(np.array(case["w"]) - rate * result.direction - expected["w_next"]).max() <= 1e-8, case["id"]
        assert [i for i in range(len(updates)) if i not in result.dropped] == expected["used_clients"], case["id"]


@given(cases)
def test_weights_are_a_distribution_and_the_direction_is_c_u(case: tuple[scene.Matrix, str]) -> None:
    U, name = case
    result = aggregate(name, U, losses=scene.losses(U))
    assert (result.weights >= 0).all()
    assert result.weights.sum() == pytest.approx(1, abs=1e-9)
    scale = np.abs(scene.coefficients_of(result)) @ np.linalg.norm(U, axis=1)
    np.testing.assert_allclose(result.direction, scene.coefficients_of(result) @ U, atol=1e-13 * scale)
    assert result.diagnostics["direction_norm"] == pytest.approx(np.linalg.norm(result.direction), abs=1e-7 * scale)
    assert 0 <= result.diagnostics["entropy"] <= math.log(len(U)) + 1e-9
    if name in CONVEX and not result.diagnostics["stationary"]:
        np.testing.assert_array_equal(result.coefficients, result.weights)


@given(scene.zoo, st.sampled_from(MGDA))
def test_mgda_gives_a_direction_that_no_client_opposes(U: scene.Matrix, name: str) -> None:
    unboxed: dict[str, Any] = {"epsilon": 1.0} if name == "fedmgda+" else {}
    result = aggregate(name, U, **unboxed)
    d = result.direction
    rows = U if name == "fedmgda" else U / np.maximum(np.linalg.norm(U, axis=1, keepdims=True), 1e-300)
    kept = np.linalg.norm(rows, axis=1) > 0
    assert ((rows @ d)[kept] >= d @ d - 1e-8 * size(rows) ** 2).all()
    if np.linalg.norm(d) > 1e-3 * size(rows):  # shorter directions are compared above
        assert result.diagnostics["descent_share"] == 1


@given(scene.zoo, st.integers(0, 8), st.floats(-6, 6), st.sampled_from([0.0, 0.1, 1.0]))
def test_scaling_one_update_does_not_move_fedmgda_plus(
    U: scene.Matrix, row: int, decades: float, epsilon: float
) -> None:
    before = aggregate("fedmgda+", U, epsilon=epsilon)
    V = U.copy()
    V[row % len(U)] *= 10.0**decades
    after = aggregate("fedmgda+", V, epsilon=epsilon)
    np.testing.assert_allclose(after.direction, before.direction, atol=1e-6)


@given(scene.zoo, st.sampled_from(NAMES), st.randoms(use_true_random=False))
def test_the_order_of_the_clients_does_not_matter(U: scene.Matrix, name: str, random: Random) -> None:
    order = list(range(len(U)))
    random.shuffle(order)
    prior = np.arange(1, len(U) + 1, dtype=float)
    one, other = aggregate(name, U, prior=prior), aggregate(name, U[order], prior=prior[order])
    scale = max(size(U), 1.0)
    # The shortest vector is unique; its square is what the residual bounds. A bisection stops within 2^-20, and a
    # median is as sharp as its neighbours are far apart.
    tolerance = 1e-3 if name in {"fedmgda+auto", "geometric-median"} else 1e-6
    np.testing.assert_allclose(other.direction, one.direction, atol=tolerance * scale)


ORTHOGONAL = np.array([[1.0, 0.0], [0.0, 4.0]])  # the shortest vector of the hull weighs them 16/17 and 1/17


@pytest.mark.parametrize(("epsilon", "first"), [(0.0, 0.5), (0.1, 0.6), (0.4, 0.9), (0.5, 16 / 17), (1.0, 16 / 17)])
def test_weights_of_raw_updates_go_as_far_from_the_prior_as_epsilon_allows(epsilon: float, first: float) -> None:
    found = aggregate("fedmgda", ORTHOGONAL, epsilon=epsilon)
    np.testing.assert_allclose(found.weights, [first, 1 - first], atol=1e-12)
    np.testing.assert_allclose(found.direction, [first, 4 * (1 - first)], atol=1e-6)


def test_the_centre_of_the_box_is_the_prior() -> None:
    found = aggregate("fedmgda", ORTHOGONAL, samples=[1, 3], epsilon=0.2)
    np.testing.assert_allclose(found.weights, [0.45, 0.55], atol=1e-12)


@pytest.mark.parametrize(("boxed", "average"), [("fedmgda", "fedavg"), ("fedmgda+", "fedavg-n")])
@given(U=scene.zoo)
def test_epsilon_zero_is_the_average_and_epsilon_one_no_box(boxed: str, average: str, U: scene.Matrix) -> None:
    samples = np.arange(1, len(U) + 1)
    none, plain = (
        aggregate(boxed, U, samples=samples, epsilon=0.0),
        aggregate(average, U, samples=samples, measure=True),
    )
    np.testing.assert_array_equal(none.weights, plain.weights)
    if not none.diagnostics["stationary"]:
        np.testing.assert_array_equal(none.direction, plain.direction)
    if boxed == "fedmgda":
        whole, default = aggregate("fedmgda", U, epsilon=1.0), aggregate("fedmgda", U)
        np.testing.assert_array_equal(whole.direction, default.direction)


def test_fedavg_weighs_by_samples() -> None:
    U = np.array([[1.0, 0.0], [0.0, 2.0]])
    result = aggregate("fedavg", U, samples=[1, 3])
    assert result.weights.tolist() == [0.25, 0.75]
    assert result.direction.tolist() == [0.25, 1.5]
    assert aggregate("fedavg", U).direction.tolist() == [0.5, 1.0]
    assert aggregate("fedavg", U, samples=[1, 3], prior=[1, 1]).direction.tolist() == [0.5, 1.0]


def test_a_zero_update_contributes_nothing_to_normalised_averages() -> None:
    result = aggregate("fedavg-n", np.array([[3.0, 4.0], [0.0, 0.0]]))
    assert scene.coefficients_of(result).tolist() == [0.1, 0.0]
    assert result.direction == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("name", MGDA)
def test_a_zero_update_stops_mgda_unless_it_is_dropped(name: str) -> None:
    U = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    unboxed: dict[str, Any] = {"epsilon": 1.0} if name == "fedmgda+" else {}
    stopped = aggregate(name, U, **unboxed)
    assert stopped.diagnostics["stationary"] == 1
    assert not stopped.direction.any()
    assert not scene.coefficients_of(stopped).any()
    moving = aggregate(name, U, drop_zero=True, **unboxed)
    np.testing.assert_allclose(moving.direction, aggregate(name, U[:2], **unboxed).direction)
    assert moving.weights[2] == 0
    assert aggregate(name, np.zeros((2, 3)), drop_zero=True).diagnostics["stationary"] == 1


@pytest.mark.parametrize(
    ("name", "rounding", "keys"),
    [*((name, 1e-7, {}) for name in (*MGDA, "dual-cone", "adafed", "fedmdfg")), ("fedfv", 1e-6, {"alpha": 0.0})],
)
def test_opposite_updates_are_a_stationary_point_and_their_rounding_is_no_step(
    name: str, rounding: float, keys: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    u, noise = (size * rng.standard_normal(1000).astype(np.float32) for size in (1.0, rounding))
    for other in (-u, -3 * u, -3 * u + noise):
        result = aggregate(name, [u, other], losses=[1.0, 1.0], **keys)
        assert result.diagnostics["stationary"] == 1
        assert not result.direction.any()
        assert not scene.coefficients_of(result).any()


@pytest.mark.parametrize("claimed", [0.0, 1e-300, 1e300, -1.0])
@pytest.mark.parametrize(("name", "keys"), [("adafed", {"gamma": 5.0}), ("fedmdfg", {})])
def test_any_loss_that_can_be_claimed_gives_a_finite_direction(name: str, keys: dict[str, Any], claimed: float) -> None:
    U = scene.matrix("random", 3, 10, 0)
    for losses in ([claimed] * 3, [claimed, 1.0, 2.0]):
        assert np.isfinite(aggregate(name, U, losses=losses, **keys).direction).all()


@pytest.mark.parametrize("name", NAMES)
def test_identical_updates_keep_the_prior(name: str) -> None:
    u = np.random.default_rng(0).standard_normal(100)
    result = aggregate(name, [u, u, u], prior=[2, 1, 1])
    np.testing.assert_allclose(result.weights, [0.5, 0.25, 0.25], rtol=0, atol=1e-12)


def test_centred_clipping_keeps_the_prior_of_identical_updates_whose_products_differ_in_the_last_bit() -> None:
    K, prior = np.full((3, 3), 100.0), np.array([0.5, 0.25, 0.25])
    K[0, 0] = np.nextafter(100.0, 0.0)
    found = scene.rule_named("centred-clipping").combine(Rows(gram=K, prior=prior, samples=np.ones(3)))
    np.testing.assert_allclose(found.weights, prior, rtol=0, atol=1e-12)


@given(st.floats(1, 6), st.floats(0, 30), st.sampled_from([0.0, 2.0]), st.integers(0, 99))
def test_the_size_of_one_update_does_not_let_another_escape_the_clipping(
    large: float, larger: float, radius: float, seed: int
) -> None:
    U = np.random.default_rng(seed).normal(size=(9, 6))
    U /= np.linalg.norm(U, axis=1, keepdims=True)
    U[7:] *= [[10**large], [10 ** (large + larger)]]
    assert np.linalg.norm(aggregate("centred-clipping", U, radius=radius).direction) < 3


@pytest.mark.parametrize("name", NAMES)
def test_one_client_is_followed(name: str) -> None:
    u = np.array([3.0, 4.0])
    result = aggregate(name, [u])
    expected = u / 5 if name in {"fedavg-n", "fedmgda+", "fedmgda+auto"} else u
    np.testing.assert_allclose(result.direction, expected)


def test_more_rows_than_dimensions_need_not_be_stationary() -> None:
    U = scene.matrix("shifted", 9, 2, seed=3)
    result = aggregate("fedmgda+", U)
    assert result.diagnostics["stationary"] == 0
    assert result.diagnostics["descent_min"] > 0


def test_a_huge_update_does_not_stop_the_others_in_fedmgda() -> None:
    U = np.array([[1.0, 0.2], [0.8, 0.5], [1e9, 1e9]])
    result = aggregate("fedmgda", U)
    assert result.diagnostics["stationary"] == 0
    assert result.weights[2] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_not_finite_is_dropped_and_the_prior_renormalised(name: str, bad: float) -> None:
    U = scene.matrix("random", 4, 6, seed=2)
    broken = U.copy()
    broken[1, 3] = bad
    result = aggregate(name, broken, prior=[0.4, 0.2, 0.2, 0.2])
    rest = aggregate(name, U[[0, 2, 3]], prior=[0.5, 0.25, 0.25])
    assert result.dropped == (1,)
    assert result.diagnostics["dropped"] == 1
    assert scene.coefficients_of(result)[1] == result.weights[1] == 0
    np.testing.assert_allclose(result.direction, rest.direction, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_without_any_finite_row_there_is_no_step(name: str) -> None:
    result = aggregate(name, np.full((2, 3), np.nan), state={"kept": 1})
    assert result.direction.tolist() == [0.0, 0.0, 0.0]
    assert scene.coefficients_of(result).tolist() == result.weights.tolist() == [0.0, 0.0]
    assert result.diagnostics["dropped"] == 2
    assert result.state == {"kept": 1}


def test_float32_files_and_arrays_give_the_same_result(tmp_path: Path) -> None:
    U = scene.matrix("random", 3, 500, seed=7).astype(np.float32)
    found = aggregate("fedmgda+", scene.stored(tmp_path, U)).direction
    np.testing.assert_array_equal(found, aggregate("fedmgda+", U).direction)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"updates": []}, "no rows"),
        ({"updates": np.zeros(3)}, r"an update must be a vector|\(m, d\) is needed"),
        ({"updates": np.zeros((2, 0))}, "at least one element"),
        ({"updates": [[1.0, 2.0], [1.0]]}, r"one length.*\[1, 2\]"),
        ({"updates": [["a"]]}, "vector of numbers"),
        (
            {"updates": np.ma.masked_array(np.ones((2, 2)), np.array([[True, False], [False, False]]))},
            "updates: .* some of its elements are mask",
        ),
        (
            {"updates": [np.ma.masked_array([1.0, 2.0], np.array([True, False]))]},
            r"updates\[0\]: .* elements are masked",
        ),
        ({"losses": np.ma.masked_array([1.0, 2.0], np.array([True, False]))}, "losses: .* elements are masked"),
        ({"losses": ["high", 1.0]}, "losses: 2 numbers are needed, one per row: could not convert"),
        ({"samples": [1]}, r"samples has shape \(1,\)"),
        ({"losses": [1, 2, 3]}, r"losses has shape \(3,\)"),
        ({"prior": [1, -1]}, "prior must be finite, not negative"),
        ({"prior": [0, 0]}, "not all zero"),
        ({"prior": [1, math.nan]}, "prior must be finite"),
        ({"samples": [1, math.inf]}, "samples must be finite"),
        ({"name": "afl"}, "afl needs losses, one per row"),
        ({"name": "fedfa"}, "fedfa needs accuracies, one per row"),
        ({"name": "fedfa", "accuracies": [0.5, -1.0]}, "none of them negative"),
        ({"name": "afl", "losses": [1, 2], "clients": ["a"]}, "clients has 1 names"),
        ({"name": "afl", "losses": [1, 2], "clients": ["a", "a"]}, "different names"),
        ({"name": "dual-cone", "ages": [1, 0]}, "rows of earlier rounds come last"),
        ({"name": "dual-cone", "ages": [0, -1]}, "ages must not be negative"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregate(**({"name": "fedavg", "updates": np.eye(2)} | arguments))


@pytest.mark.parametrize(
    ("name", "hyperparameters", "message"),
    [
        ("fedmgda++", {}, r"no algorithm 'fedmgda\+\+'; there are fedavg, fedavg-n, fedmgda, fedmgda\+"),
        ("fedmgda+", {"eps": 1}, r"eps: fedmgda\+ has no such hyper-parameter; it has epsilon, drop_zero"),
        ("fedavg", {"epsilon": 1}, "it has pre, clip_norm, byzantine, bucket_size"),
        ("fedmgda+", {"epsilon": "1"}, "epsilon must be a number or \"auto\"; got '1'"),
        ("fedmgda+", {"epsilon": True}, "epsilon must be a number"),
        ("fedmgda+", {"epsilon": -0.1}, r"epsilon must be \"auto\" or lie in \[0, 1\]; got -0.1"),
        ("fedmgda+", {"epsilon": math.nan}, r"\[0, 1\]"),
        ("q-fedavg", {"q": -1}, r"q must lie in \[0, inf\); got -1"),
        ("q-fedavg", {"lipschitz": -1}, r"lipschitz must lie in \[0, 1e12\]"),
        ("q-fedavg", {"lipschitz": 1e160}, r"lipschitz must lie in \[0, 1e12\]"),
        ("krum", {"byzantine": -1}, r"byzantine must lie in \[0, inf\)"),
        ("krum", {"byzantine": 1.5}, "byzantine must be an integer"),
        ("trimmed-mean", {"byzantine": -1}, r"byzantine must lie in \[0, inf\); got -1"),
        ("multi-krum", {"select": -2}, r"select must lie in \[0, inf\)"),
        ("geometric-median", {"smoothing": 0}, r"smoothing must lie in \[1e-9, 1\]"),
        ("centred-clipping", {"radius": math.inf}, r"radius must lie in \[0, inf\); got inf"),
        ("centred-clipping", {"iterations": 0}, r"iterations must lie in \[1, 10000\]"),
        ("norm-clipping", {"radius": -1}, r"radius must lie in \[0, inf\)"),
        *[("fedmgda", {"epsilon": value}, r"epsilon must lie in \[0, 1\]; got") for value in (-0.1, 1.1, math.nan)],
        ("fedmgda", {"drop_zero": 1}, "drop_zero must be true or false; got 1"),
        ("afl", {"gamma_lambda": 0.0}, r"gamma_lambda must lie in \(0, inf\)"),
        ("afl", {"gamma_lambda": math.inf}, r"gamma_lambda must lie in \(0, inf\)"),
        ("fedfa", {"alpha": 1.1}, r"alpha must lie in \[0, 1\]"),
        ("fedfa", {"gamma": 1.0}, r"gamma must lie in \[0, 1\)"),
        ("fedfa", {"eta": -1.0}, r"eta must lie in \[0, inf\); got -1.0"),
        ("fedfa", {"sign": "times"}, 'sign must be "minus" or "plus"; got \'times\''),
        ("fedfv", {"alpha": -0.1}, r"alpha must lie in \[0, 1\]"),
        ("fedfv", {"order": "ascending"}, 'order must be "loss" or "reversed" or "random"; got'),
        ("fedfv", {"order_seed": -1}, r"order_seed must lie in \[0, inf\)"),
        ("fedfv", {"tau": -1}, r"tau must lie in \[0, inf\)"),
        ("dual-cone", {"tau": 1, "pre": ["bucket"]}, 'not together with the stage "bucket"'),
        ("fedfv", {"tau": 1, "pre": ["arc"]}, 'not together with the stage "arc"'),
        ("fedfv", {"tau": 1, "pre": ["clip", "nnm"]}, 'not together with the stage "nnm"'),
        ("fedcmoo", {"sketch": "wavelet"}, "no sketch 'wavelet'; there are count"),
        ("fedcmoo", {"budget": 0}, "budget must be finite and positive"),
        ("fedcmoo", {"unbiased": True, "sketch": "svd"}, "svd is not linear; it goes with"),
        ("fedcmoo", {"weights": "guess"}, "weights must be one of exact, pgd, pgd-raw, torchjd:NAME"),
        ("fedcmoo", {"weights": "pgd-raw", "normalize": True}, 'normalize: "pgd-raw" takes the matrix as it was'),
        ("fedcmoo", {"scope": "heads"}, 'scope must be "all" or "encoder"'),
        ("fedcmoo", {"steps": 0}, r"steps must lie in \[1, inf\)"),
        ("fsmgda", {"pre": ["normalize"]}, "fsmgda sends several rows for each client"),
        ("fedcmoo-pref", {"preference": [1, 0]}, "preference must be positive"),
        ("fedcmoo-pref", {"preference": [1, "2"]}, r"preference\[1\] must be a number"),
        ("fedcmoo-pref", {"minimum": 1.5}, r"minimum must lie in \[0, 1\]"),
        ("fedcmoo-pref", {"slack": -0.1}, r"slack must lie in \[0, 1\]"),
        ("fedcmoo-pref", {"threshold": np.nan}, r"threshold must lie in \[0, inf\]"),
        ("scalarised", {"weights": [-1, 2]}, "must not be negative"),
        ("scalarised", {"weights": [0, 0]}, "nor all 0"),
        ("fsmgda", {"bound": "some"}, 'bound must be "clip" or "normalize" or "none"; got'),
        ("fsmgda", {"bound_norm": 0.5}, r"bound_norm must lie in \[1, inf\); got 0.5"),
        *[("adafed", {"gamma": value}, r"gamma must lie in \[0, inf\)") for value in (-0.1, math.inf)],
        *[("fedmdfg", {"theta": value}, "theta must") for value in (0.0, 90.0, math.inf)],
        *[("fedmdfg", {key: value}, f"{key} must") for key, value in (("s", -1), ("s", 21), ("tau", -1))],
        ("fedmgda", {"epsilon_decay": -0.5}, r"epsilon_decay must lie in \[0, 10\]; got -0.5"),
        ("fedmgda", {"preferences": "a >= 1"}, "preferences must be a list of texts"),
        ("fedmgda", {"preferences": ["a > 0.5"]}, "'a > 0.5' is no bound"),
        ("fedmgda+", {"preferences": ["a >= 1.5"]}, "is no bound"),
        ("fedmgda+", {"preferences": ["a >= 1.2.3"]}, "is no bound"),
        ("fedmgda+", {"preferences": ["a >= 0.1", "a>=0.2"]}, "a has two bounds >="),
        ("fedmgda+", {"preferences": ["a >= 0.5", "a <= 0.2"]}, "the bounds of a cross"),
        ("fedmgda+", {"preferences": ["a >= 0.6", "b >= 0.6"]}, "add up to 1.2, more than 1"),
        ("fedmgda+", {"preferences": ["a >= 0.6"], "pre": ["nnm"]}, "after the stage nnm"),
        ("fedavg", {"pre": "nnm"}, "pre must be a list of texts; got 'nnm'"),
        ("fedavg", {"pre": [1]}, "pre must be a list of texts"),
        ("fedavg", {"pre": ["nn"]}, "pre: no stage 'nn'; there are normalize, clip, arc, nnm, bucket"),
        ("fedavg", {"pre": ["nnm", "nnm"]}, "each stage at most once"),
        ("fedavg", {"byzantine": 2}, 'byzantine: only for the stage "arc" or "nnm", which pre lacks'),
        ("fedavg", {"pre": ["nnm"], "bucket_size": 2}, 'bucket_size: only for the stage "bucket"'),
        ("fedavg", {"pre": ["nnm"], "byzantine": -1}, r"byzantine must lie in \[0, inf\)"),
        ("fedavg", {"pre": ["clip"], "clip_norm": math.nan}, r"clip_norm must lie in \[0, inf\); got nan"),
        ("fedavg", {"pre": ["bucket"], "bucket_size": 0}, r"bucket_size must lie in \[1, inf\)"),
        ("fedavg", {"pre": ["bucket"], "bucket_seed": -1}, r"bucket_seed must lie in \[0, inf\)"),
    ],
)
def test_wrong_hyperparameters_are_named(name: str, hyperparameters: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperparameterError, match=message):
        algorithm(name, hyperparameters)


def test_the_rate_decays_every_hundred_rounds_and_zero_means_no_decay() -> None:
    assert server_rate(1.5, 0.0, 1999, 2000) == 1.5
    assert server_rate(1.0, 0.1, 99, 2000) == 1.0
    assert server_rate(1.0, 0.1, 100, 2000) == pytest.approx(0.1**0.05)
    assert server_rate(2.0, 0.1, 1999, 2000) == pytest.approx(2 * 0.1**0.95)
    assert server_rate(1.0, 1.0, 500, 1000) == 1.0


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OVER_OBJECTIVES])
def test_a_round_trains_everybody_once_and_steps(name: str) -> None:
    told = (("b", 30, [0.0, 1.0]), ("a", 10, [1.0, 0.0]))
    replies = Replies([scene.reply(c, np.array(u), samples=n, losses={"loss": 1.0}) for c, n, u in told])
    rule, context = scene.rule_named(name), RoundContext(number=0, total=1, prior="samples")
    conversation = rule.round(context)
    assert next(conversation) == TrainingPhase()
    step = scene.last(conversation, replies)
    assert step.replies is replies
    np.testing.assert_array_equal(step.combination.coefficients, rule.combine(replies.rows(context)).coefficients)


def test_rows_that_make_no_sense_cannot_be_made() -> None:
    K, one = np.eye(2), np.array([0.5, 0.5])
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"gram": np.eye(3)}, "K has shape"),
        ({"gram": np.full((2, 2), np.nan)}, "K must be finite"),
        ({"prior": np.array([0.5, 0.6])}, "distribution"),
        ({"samples": np.ones(3)}, "samples has shape"),
        ({"losses": np.array([1.0, np.nan])}, "losses must be finite"),
    )
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            Rows(**({"gram": K, "prior": one, "samples": one} | wrong))
