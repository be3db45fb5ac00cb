"""Fair and robust rules: against the references, and against the same rule written on the updates themselves."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from federation.aggregation.geometry import coordinates
from federation.aggregation.phases import PhaseReply, Replies, RoundContext
from federation.aggregation.pre import STAGES
from federation.aggregation.registry import ALGORITHMS, algorithm
from fedpareto.offline_aggregation import TooFewUpdatesError, aggregate
from tests.federation.aggregation import scene
from tests.federation.aggregation.scene import losses

ROBUST = ("krum", "multi-krum", "geometric-median", "centred-clipping")
FAMILY = ("fedmgda+auto", "dual-cone", "q-fedavg", "fedmdfg", *ROBUST, "norm-clipping")
EQUIVARIANT = tuple(
    name for name in ALGORITHMS if name not in {"fedavg-n", "fedmgda+", "fedmgda+auto", "q-fedavg", "fedfa"}
)

# --- all of them


@given(scene.crowds, st.sampled_from(EQUIVARIANT), st.floats(-3, 3))
def test_scaling_all_updates_scales_the_direction(U: scene.Matrix, name: str, decades: float) -> None:
    factor = 10.0**decades
    one, other = aggregate(name, U, losses=losses(U)), aggregate(name, factor * U, losses=losses(U))
    np.testing.assert_allclose(other.direction, factor * one.direction, atol=1e-3 * factor * scene.norms(U).max())


@pytest.mark.parametrize("name", FAMILY)
def test_updates_that_are_all_zero_are_a_stationary_point(name: str) -> None:
    result = aggregate(name, np.zeros((5, 3)), losses=np.ones(5))
    assert result.diagnostics["stationary"] == 1
    assert not scene.coefficients_of(result).any()


def test_coordinates_have_the_gram_matrix_of_the_updates() -> None:
    for kind in ("random", "wildly scaled", "zero rows", "low rank", "duplicated"):
        U = scene.matrix(kind, 7, 5, seed=1)
        K = U @ U.T
        points = coordinates(K)
        scale = np.sqrt(np.outer(np.diag(K), np.diag(K)))
        np.testing.assert_array_less(np.abs(points @ points.T - K), 1e-12 * scale + 1e-300)


# --- q-FedAvg


def test_q_fedavg_is_that_of_the_reference() -> None:
    for case in scene.reference("qfedavg"):
        models = [[math.nan if x is None else float(x) for x in model] for model in case["client_models"]]
        updates = np.array(case["w"]) - np.array(models)
        reported = [math.nan if loss is None else float(loss) for loss in case["losses_at_w"]]
        result = aggregate("q-fedavg", updates, losses=reported, q=case["q"], lipschitz=case["L"])
        expected = case["expected"]
        used = [i for i in range(len(updates)) if i not in result.dropped]
        assert used == expected["used_clients"], case["id"]
        np.testing.assert_allclose(np.array(case["w"]) - result.direction, expected["w_next"], atol=1e-9)
        if updates[used].any():
            weights = expected["weights_on_w_minus_wk"]
            np.testing.assert_allclose(
                scene.coefficients_of(result)[used], weights, rtol=1e-9, atol=1e-300, err_msg=case["id"]
            )


@given(scene.crowds, st.floats(0.01, 100))
def test_q_fedavg_with_q_zero_is_fedavg_whatever_the_losses(U: scene.Matrix, lipschitz: float) -> None:
    for reported in (losses(U), np.zeros(len(U))):
        result = aggregate("q-fedavg", U, losses=reported, q=0.0, lipschitz=lipschitz)
        np.testing.assert_allclose(
            scene.coefficients_of(result), scene.coefficients_of(aggregate("fedavg", U)), rtol=1e-12
        )


@pytest.mark.parametrize("name", ["fedavg", "fedavg-n", "fedfv"])
def test_updates_that_cancel_each_other_are_reported(name: str) -> None:
    u = scene.matrix("random", 1, 50, 3)[0].astype(np.float32)
    assert aggregate(name, np.stack([u, -u]), losses=np.ones(2)).diagnostics["stationary"] == 1


def test_an_update_next_to_nothing_brings_fedmgda_to_a_standstill_that_is_reported() -> None:
    U = scene.matrix("random", 5, 30, 1)
    U[4] *= 1e-12
    found = aggregate("fedmgda", U)
    assert found.diagnostics["stationary"] == 1
    assert not found.direction.any()
    without = aggregate("fedmgda", U, drop_zero=True)
    assert without.diagnostics["stationary"] == 0
    assert without.weights[4] == 0
    np.testing.assert_allclose(without.direction, aggregate("fedmgda", U[:4]).direction)


def test_fedfv_keeps_as_many_as_the_formula_says_whatever_the_rounding() -> None:
    found = aggregate("fedfv", scene.matrix("conflicting", 11, 20, 0), losses=np.arange(11.0), alpha=0.7)
    assert found.diagnostics["kept"] == 8


@pytest.mark.parametrize("pre", [[], *([stage] for stage in STAGES)], ids=str)
def test_q_fedavg_takes_its_step_from_the_clients_rate_also_behind_a_stage(pre: list[str]) -> None:
    U = scene.matrix("random", 6, 8, 3)
    rows = scene.rows_of(U, losses=losses(U), local_rate=0.01)
    known, given = (scene.rule_named("q-fedavg", pre=pre, **more) for more in ({}, {"lipschitz": 100.0}))
    np.testing.assert_array_equal(known.decide(rows).coefficients, given.decide(rows).coefficients)


def test_q_fedavg_without_any_loss_to_reduce_takes_no_step() -> None:
    result = aggregate("q-fedavg", scene.matrix("random", 3, 4, 0), losses=[0.0, 0.0, -1.0])
    assert result.diagnostics["stationary"] == 1
    assert not result.direction.any()


def test_q_fedavg_follows_the_worst_client_as_q_grows_without_overflow() -> None:
    result = aggregate("q-fedavg", scene.matrix("random", 3, 4, 0), losses=[1.0, 1e30, 2.0], q=500.0)
    assert result.weights.tolist() == [0.0, 1.0, 0.0]
    assert np.isfinite(result.direction).all()


def test_a_reply_without_a_loss_is_left_out_where_losses_are_read() -> None:
    def told(client: str, **losses: float) -> PhaseReply:
        return scene.reply(client, np.array([1.0, float(len(losses))]), losses=losses)

    def play(*replies: PhaseReply) -> list[str]:
        step = scene.stepped(algorithm("q-fedavg").round(RoundContext(number=0, total=1)), Replies(replies))
        return [told.client_id for told in step.replies]

    assert play(told("a"), told("b", loss=1.0), told("c", loss=math.nan)) == ["b"]
    with pytest.raises(TooFewUpdatesError, match="no client reported one"):
        play(told("a"))


# --- the smallest box


@given(scene.zoo)
def test_the_smallest_box_descends_for_everybody_and_a_smaller_one_does_not(U: scene.Matrix) -> None:
    found = aggregate("fedmgda+auto", U)
    epsilon = found.diagnostics["epsilon"]
    assert found.diagnostics["descent_min"] >= -1e-9
    assert (np.abs(found.weights - 1 / len(U)) <= epsilon + 1e-12).all()
    if epsilon > 1e-5:
        assert aggregate("fedmgda+", U, epsilon=epsilon - 1e-5).diagnostics["descent_min"] < 0


def test_where_averaging_helps_everybody_the_smallest_box_is_empty() -> None:
    U = scene.matrix("nearly parallel", 5, 8, 0)
    found = aggregate("fedmgda+auto", U)
    assert found.diagnostics["epsilon"] == 0
    np.testing.assert_array_equal(found.direction, aggregate("fedavg-n", U, measure=True).direction)


def test_the_smallest_box_is_where_the_first_client_stops_being_hurt() -> None:
    # Unit rows at 0, 0 and 120 degrees: <d, g_2> = 0 where lambda_2 = 1/3, so with this prior epsilon = 1/12.
    U = np.array([[1.0, 0.0], [1.0, 0.0], [-0.5, math.sqrt(3) / 2]])
    found = aggregate("fedmgda+auto", U, prior=[3, 3, 2])
    assert found.diagnostics["epsilon"] == pytest.approx(1 / 12, abs=2e-6)
    assert found.weights[2] == pytest.approx(1 / 3, abs=2e-6)


# --- the dual cone


@given(scene.zoo)
def test_the_dual_cone_opposes_nobody_and_is_nearest_to_the_average(U: scene.Matrix) -> None:
    found = aggregate("dual-cone", U)
    assert found.diagnostics["residual"] <= 1e-9
    d, average = found.direction, U.mean(axis=0)
    size = float(scene.norms(U).mean())
    lengths = np.maximum(scene.norms(U), 1e-300)
    assert ((U @ d) / lengths >= -1e-7 * size).all()
    # The nearest point of a cone leaves a residue at right angles to it, which no element of the cone can reduce.
    assert (scene.coefficients_of(found) * len(U) >= 1 - 1e-12).all() or found.diagnostics["stationary"]
    assert abs((average - d) @ d) <= 1e-6 * size**2
    if (U @ average >= 0).all():
        np.testing.assert_allclose(d, average, atol=1e-9 * size)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 10**6))
def test_the_dual_cone_is_the_best_of_all_faces(m: int, d: int, seed: int) -> None:
    U = scene.matrix("random", m, d, seed)
    average = U.mean(axis=0)
    best = math.inf
    for size in range(m + 1):
        for face in itertools.combinations(range(m), size):
            rows = U[list(face)]
            projected = average - np.linalg.pinv(rows) @ (rows @ average) if face else average
            if (U @ projected >= -1e-9).all():
                best = min(best, float(np.linalg.norm(projected - average)))
    found = aggregate("dual-cone", U).direction
    assert float(np.linalg.norm(found - average)) == pytest.approx(best, abs=1e-6)


def test_two_clients_that_oppose_each_other_but_for_rounding_stop_no_round() -> None:
    for seed in range(20):
        U = scene.matrix("random", 9, 1000, seed).astype(np.float32)
        d = aggregate("dual-cone", np.vstack([U, np.float32(-3) * U[8]])).direction
        assert (U @ d > -1e-6 * scene.norms(U).mean() * scene.norms(U)).all()
        assert np.linalg.norm(d) > 0


@pytest.mark.parametrize("name", ["dual-cone", "fedmgda+auto"])
def test_one_client_that_opposes_all_others_stops_what_has_no_box_and_an_operator_is_told(name: str) -> None:
    U = scene.matrix("nearly parallel", 5, 8, 0)
    U[4] = -U[:4].mean(axis=0)
    assert aggregate(name, U).diagnostics["stationary"] == 1
    assert any("standstill" in caution for caution in algorithm(name).cautions())


# --- robust rules


def krum_scores(U: scene.Matrix, byzantine: int) -> scene.Vector:
    squares = ((U[:, None] - U[None]) ** 2).sum(axis=2)
    nearest: scene.Vector = np.sort(squares, axis=1)[:, 1 : len(U) - byzantine - 1].sum(axis=1)
    return nearest


@given(scene.crowds, st.integers(0, 3), st.integers(1, 4))
def test_krum_and_multi_krum_are_those_of_the_definition(U: scene.Matrix, byzantine: int, select: int) -> None:
    m = len(U)
    assume(m >= 2 * byzantine + 3 and select <= m - byzantine - 2)
    scores = krum_scores(U, byzantine)
    ranked = np.argsort(scores, kind="stable")
    assume((np.diff(scores[ranked]) > 1e-9 * scores.max()).all())
    assert np.flatnonzero(aggregate("krum", U, byzantine=byzantine).weights).tolist() == [ranked[0]]
    several = aggregate("multi-krum", U, byzantine=byzantine, select=select)
    np.testing.assert_allclose(several.direction, U[ranked[:select]].mean(axis=0), atol=1e-9 * scene.norms(U).max())


@pytest.mark.parametrize(
    ("name", "hyperparameters", "message"),
    [
        ("krum", {"byzantine": 2}, "krum with byzantine = 2 needs at least 7 updates; there are 6"),
        ("multi-krum", {"byzantine": 1, "select": 4}, "needs at least 7 updates; there are 6"),
        ("fedavg", {"pre": ["arc"], "byzantine": 3}, "arc with byzantine = 3 needs at least 7 updates; there are 6"),
        ("fedavg", {"pre": ["nnm"], "byzantine": 3}, "nnm with byzantine = 3 needs at least 7 updates; there are 6"),
        ("krum", {"byzantine": 1, "pre": ["bucket"]}, "krum with byzantine = 1 needs at least 5 updates; there are 3"),
    ],
)
def test_bounds_are_checked_against_the_updates_that_arrived(
    name: str, hyperparameters: dict[str, Any], message: str
) -> None:
    U = np.vstack([scene.matrix("random", 6, 4, 0), np.full(4, np.nan)])  # the seventh is dropped
    with pytest.raises(TooFewUpdatesError, match=message):
        aggregate(name, U, **hyperparameters)


@given(scene.crowds, st.integers(0, 99))
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(U: scene.Matrix, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prior = rng.dirichlet(np.ones(len(U)))
    found = aggregate("geometric-median", U, prior=prior)
    assert found.diagnostics["residual"] <= 1e-6

    def cost(v: scene.Vector) -> float:
        return float(prior @ np.linalg.norm(U - v, axis=1))

    here = cost(found.direction)
    near = found.direction + 1e-2 * rng.standard_normal((5, U.shape[1])) * scene.norms(U).mean()
    for other in (*U, prior @ U, *near):
        assert here <= cost(other) + 1e-4 * here


@given(scene.crowds, st.floats(0.1, 10), st.integers(1, 5))
def test_centred_clipping_is_that_of_the_definition(U: scene.Matrix, reach: float, moves: int) -> None:
    radius = reach * float(np.median(scene.norms(U)))
    centre = np.zeros(U.shape[1])
    for _ in range(moves):
        away = U - centre
        centre = centre + (away * np.minimum(1, radius / np.linalg.norm(away, axis=1))[:, None]).mean(axis=0)
    found = aggregate("centred-clipping", U, radius=radius, iterations=moves)
    np.testing.assert_allclose(found.direction, centre, atol=1e-6 * scene.norms(U).max())


@given(scene.crowds)
def test_clipping_beyond_every_norm_is_fedavg(U: scene.Matrix) -> None:
    radius = 1.01 * float(scene.norms(U).max())
    plain = aggregate("fedavg", U).direction
    clipped = aggregate("norm-clipping", U, radius=radius)
    np.testing.assert_array_equal(clipped.coefficients, np.full(len(U), 1 / len(U)))
    once = aggregate("centred-clipping", U, radius=radius, iterations=1)
    np.testing.assert_allclose(once.direction, plain, atol=1e-12 * scene.norms(U).max())


@given(scene.crowds)
def test_norm_clipping_shortens_to_the_median(U: scene.Matrix) -> None:
    middle = np.median(scene.norms(U))
    clipped = U * np.minimum(1, middle / scene.norms(U))[:, None]
    found = aggregate("norm-clipping", U)
    np.testing.assert_allclose(found.direction, clipped.mean(axis=0), atol=1e-12 * scene.norms(U).max())
    assert found.diagnostics["clipped"] == (scene.norms(U) > middle).sum()


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("attack", [-10.0, 1e6, -1e6])
def test_two_attackers_of_ten_do_not_move_robust_rules_far(name: str, attack: float) -> None:
    rng = np.random.default_rng(4)
    common = rng.standard_normal(50)
    U = common + 0.5 * rng.standard_normal((10, 50))
    U[8:] = attack * common
    keys: dict[str, Any] = {"byzantine": 2} if "krum" in name else {}
    honest = U[:8].mean(axis=0)
    assert np.linalg.norm(aggregate(name, U, **keys).direction - honest) < 0.6 * np.linalg.norm(honest)
    assert np.linalg.norm(aggregate("fedavg", U).direction - honest) > 2 * np.linalg.norm(honest)
