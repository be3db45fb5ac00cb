"""Rules that remember: AFL, FedFa, FedFV, and the dual cone with updates of earlier rounds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from federation.aggregation.base import Algorithm
from federation.aggregation.phases import Replies, RoundContext, Step
from federation.aggregation.registry import algorithm
from federation.aggregation.rules.afl import onto_simplex
from federation.aggregation.rules.fedfv import project
from fedpareto.offline_aggregation import TooFewUpdatesError, aggregate
from tests.federation.aggregation import scene

losses_of = st.lists(st.floats(-1e3, 1e3), min_size=9, max_size=9)


class Run:
    """Rounds of one rule, with a store of updates from which some may be lost."""

    def __init__(self, name: str, **hyperparameters: Any) -> None:
        self.rule: Algorithm = algorithm(name, hyperparameters)
        self.state: dict[str, Any] = {}
        self.number = 0
        self.store: dict[str, scene.Vector] = {}
        self.revoked: frozenset[str] = frozenset()

    def play(
        self, clients: Sequence[str], U: scene.Matrix, losses: Sequence[float] | None = None, **metrics: float
    ) -> Step:
        told = [1.0] * len(clients) if losses is None else losses
        replies = []
        for client, u, loss in zip(clients, U, told, strict=True):
            payload = f"payload-{client}-{self.number}"
            self.store[payload] = np.asarray(u, dtype=np.float64)
            loss_told = {} if math.isnan(loss) else {"loss": loss}
            facts = {"losses": loss_told, "metrics": metrics, "envelope": f"envelope-{client}-{self.number}"}
            replies.append(replace(scene.reply(client, **facts), rows=(self.store[payload],), payload=payload))
        places: dict[str, Any] = {"recall": self.store.__getitem__, "revoked": lambda: self.revoked}
        context = RoundContext(number=self.number, total=99, state=self.state, **places)
        step = scene.stepped(self.rule.round(context), Replies(replies))
        self.number += 1
        self.state = step.combination.state
        return step


def test_fedfv_in_random_order_does_without_losses() -> None:
    run, U = Run("fedfv", order="random"), scene.matrix("conflicting", 3, 9, 0)
    assert len(run.play(["a", "b", "c"], U, [math.nan] * 3).replies) == 3
    run = Run("fedfv")
    with pytest.raises(TooFewUpdatesError, match="no client reported one"):
        run.rule.usable(Replies([scene.reply("a")]))


# --- AFL


def test_what_a_revoked_client_held_of_afls_weights_goes_to_the_others() -> None:
    run, U = Run("afl", gamma_lambda=1.0), scene.matrix("random", 3, 9, 0)
    run.play(["a", "b", "evil"], U, [1.0, 2.0, 9.0])
    assert run.state["lambda"] == {"a": 0.0, "b": 0.0, "evil": 1.0}
    run.revoked = frozenset({"evil"})
    step = run.play(["a", "b"], U[:2], [1.0, 1.2])
    assert step.forgotten == ("evil",)
    np.testing.assert_allclose(step.combination.weights, 0.5)
    assert run.state["lambda"] == pytest.approx({"a": 0.4, "b": 0.6})
    again = run.play(["a", "b"], U[:2], [1.0, 1.0])
    assert again.forgotten == ()
    np.testing.assert_allclose(again.combination.weights, [0.4, 0.6])


def test_the_projection_onto_the_simplex_is_that_of_the_reference() -> None:
    for case in scene.reference("simplex_projection"):
        found = onto_simplex(np.array(case["y"], dtype=np.float64))
        np.testing.assert_allclose(found, case["expected"], atol=1e-12, err_msg=case["id"])


def test_afl_is_that_of_the_reference() -> None:
    for case in scene.reference("afl"):
        w, models = np.array(case["w"]), np.array(case["client_models"])
        names = [f"c{i}" for i in range(len(models))]
        state = {"lambda": dict(zip(names, case["lam"], strict=True))}
        losses = np.add(case["losses_at_w"], case["loss_bias"])
        given = {"clients": names, "state": state, "gamma_lambda": case["gamma_lambda"]}
        result = aggregate("afl", w - models, losses=losses, **given)
        expected, t = case["expected"], case["round"]
        after = w - result.direction
        np.testing.assert_allclose(after, expected["w_next"], atol=1e-10, err_msg=case["id"])
        found = [result.state["lambda"][name] for name in names]
        np.testing.assert_allclose(found, expected["lambda_next"], atol=1e-10, err_msg=case["id"])
        average = (t * np.array(case["avg_model"]) + after) / (t + 1)
        np.testing.assert_allclose(average, expected["avg_next"], atol=1e-10, err_msg=case["id"])
    assert algorithm("afl").averages


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), losses_of), min_size=1, max_size=6), st.floats(1e-3, 1e3)
)
def test_lambda_stays_in_the_simplex_and_the_absent_keep_theirs(
    rounds: list[tuple[set[int], list[float]]], gamma: float
) -> None:
    state: dict[str, Any] = {}
    for present, told in rounds:
        names = [f"c{i}" for i in sorted(present)]
        before = state.get("lambda", {})
        given: dict[str, Any] = {"losses": told[: len(names)], "clients": names, "state": state, "gamma_lambda": gamma}
        result = aggregate("afl", np.eye(6)[: len(names)], **given)
        state = result.state
        shares = np.array(list(state["lambda"].values()))
        assert (shares >= 0).all()
        assert shares.sum() == pytest.approx(1, abs=1e-12)
        if before.keys() >= set(names):
            kept = [{c: s for c, s in told.items() if c not in names} for told in (before, state["lambda"])]
            assert kept[0] == kept[1]
        assert result.weights.sum() == pytest.approx(1)


@given(scene.zoo, losses_of, st.sampled_from([-1e6, 7.0, 1e6]))
def test_a_bias_on_all_losses_moves_nothing(U: scene.Matrix, told: list[float], bias: float) -> None:
    told = [round(loss, 3) for loss in told[: len(U)]]
    one, other = (aggregate("afl", U, losses=np.array(told) + b, gamma_lambda=0.01) for b in (0.0, bias))
    np.testing.assert_array_equal(one.direction, other.direction)
    np.testing.assert_allclose(list(one.state["lambda"].values()), list(other.state["lambda"].values()), atol=1e-10)


def test_afl_steps_with_the_old_lambda_and_a_newcomer_gets_an_equal_share() -> None:
    run = Run("afl", gamma_lambda=0.5)
    U = np.eye(3)
    assert run.play("ab", U[:2], [1.0, 2.0]).combination.weights.tolist() == [0.5, 0.5]
    assert run.state == {"lambda": {"a": 0.25, "b": 0.75}}
    step = run.play("bc", U[:2], [1.0, 1.0])
    assert run.state["lambda"] == pytest.approx({"a": 0.25 * 2 / 3, "b": 0.75 * 2 / 3, "c": 1 / 3})
    np.testing.assert_allclose(step.combination.weights, [0.6, 0.4])
    assert run.play("abc", U, [0.0, 0.0, math.nan]).replies[-1].client_id == "b"


def test_clients_without_a_share_step_as_equals_and_stay_without() -> None:
    state = {"lambda": {"a": 1.0, "b": 0.0, "c": 0.0}}
    result = aggregate("afl", np.eye(2), losses=[1.0, 5.0], clients=["b", "c"], state=state)
    assert result.weights.tolist() == [0.5, 0.5]
    assert result.state == state


# --- FedFa


def test_fedfa_is_that_of_the_reference() -> None:
    for case in scene.reference("fedfa"):
        w, models = np.array(case["w"]), np.array(case["client_models"])
        names = [f"c{i}" for i in range(len(models))]
        rule = {"alpha": case["alpha"], "gamma": case["gamma_server"], "eta": case["eta_server"]}
        state = {"counts": {name: f - 1 for name, f in zip(names, case["frequency"], strict=True)}}
        accuracies = case["train_accuracy"]
        result = aggregate("fedfa", w - models, accuracies=accuracies, clients=names, state=state, **rule)
        expected = case["expected"]
        np.testing.assert_allclose(result.weights, expected["weights"], atol=1e-9, err_msg=case["id"])
        assert list(result.state["counts"].values()) == case["frequency"]
        for sign, key in (("minus", "w_next_author_sign_minus"), ("plus", "w_next_plus_sign")):
            optimizer = algorithm("fedfa", {**rule, "sign": sign}).optimizer()
            assert optimizer is not None
            # The reference's momentum is of changes of the model, ours of directions.
            step, after = optimizer.apply(result.direction, {"momentum": -np.array(case["momentum"])})
            np.testing.assert_allclose(w - step, expected[key], atol=1e-9, err_msg=case["id"])
            np.testing.assert_allclose(-after["momentum"], expected["momentum_next"], atol=1e-9, err_msg=case["id"])


def test_fedfa_leaves_out_who_reports_no_accuracy_and_counts_only_who_took_part() -> None:
    run = Run("fedfa")
    metrics: dict[str, Any] = {"train/accuracy": 0.5}
    run.play("ab", np.eye(2), **metrics)
    run.play("b", np.eye(2)[:1], **metrics)
    assert run.state == {"counts": {"a": 1, "b": 2}}
    conversation = run.rule.round(RoundContext(number=2, total=3))
    with pytest.raises(TooFewUpdatesError, match="fedfa needs accuracies on training splits, and no client reported"):
        scene.stepped(conversation, Replies([scene.reply("a", np.ones(2))]))


def test_fedfa_leaves_out_an_accuracy_that_is_no_share() -> None:
    told = {"ann": 0.5, "ben": -1.0, "cleo": 1e300, "dan": 1.0}
    replies = [scene.reply(name, np.ones(2), metrics={"train/accuracy": accuracy}) for name, accuracy in told.items()]
    step = scene.stepped(algorithm("fedfa").round(RoundContext(number=0, total=1)), Replies(replies))
    assert [one.client_id for one in step.replies] == ["ann", "dan"]


# --- FedFV


def test_fedfv_without_history_is_that_of_the_reference() -> None:
    for case in scene.reference("fedfv_internal"):
        U, told, expected = np.array(case["updates"]), np.array(case["losses"]), case["expected"]
        result = aggregate("fedfv", U, losses=told, alpha=case["alpha"])
        scale = np.abs(U).max()
        np.testing.assert_allclose(result.direction, expected["g_final"], atol=1e-9 * scale, err_msg=case["id"])
        C, _ = project(U @ U.T, expected["order"], expected["keep"])
        np.testing.assert_allclose(C, case["expected_gram_coefficients"], atol=1e-9, err_msg=case["id"])
        assert result.diagnostics["kept"] == len(expected["keep"])


def test_fedfv_with_history_is_that_of_the_reference() -> None:
    for case in scene.reference("fedfv_external"):
        run = Run("fedfv", alpha=case["alpha"], tau=case["tau"])
        for round_ in case["rounds"]:
            step = run.play([f"c{i}" for i in round_["clients"]], np.array(round_["updates"]), round_["losses"])
            message = f"{case['id']} round {round_['round']}"
            np.testing.assert_allclose(scene.direction(step), round_["expected"]["g_final"], atol=1e-9, err_msg=message)
            assert len(step.combination.coefficients) == len(step.rows) == len(step.gram)
            assert len(step.combination.weights) == len(step.replies)


def fedfv_on_the_updates(
    U: scene.Matrix, told: scene.Vector, alpha: float, groups: Sequence[scene.Matrix]
) -> scene.Vector:
    """Algorithms 2 and 3 as the paper writes them."""
    order = np.argsort(told, kind="stable")
    kept = order[math.ceil((len(U) - 1) * (1 - alpha)) :] if alpha > 0 else order[:0]
    projected = U.copy()
    for i in range(len(U)):
        for j in order:
            if i not in kept and j != i and projected[i] @ U[j] < 0:
                projected[i] -= (projected[i] @ U[j]) / (U[j] @ U[j]) * U[j]
    g = projected.mean(axis=0)
    for group in groups:
        s = group[group @ g < 0].sum(axis=0)
        if g @ s < 0:
            g = g - (g @ s) / (s @ s) * s
    return np.asarray(g * np.linalg.norm(U.mean(axis=0)) / np.linalg.norm(g))


@given(st.integers(2, 7), st.integers(0, 3), st.integers(0, 3), st.integers(0, 9999), st.sampled_from([0.0, 0.1, 0.5]))
def test_fedfv_in_gram_space_is_that_on_the_updates(m: int, old: int, older: int, seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    U, told = rng.standard_normal((m + old + older, 12)), rng.standard_normal(m)
    given: dict[str, Any] = {"losses": [*told, *[math.nan] * (old + older)], "ages": [0] * m + [1] * old + [2] * older}
    result = aggregate("fedfv", U, alpha=alpha, tau=2, **given)
    expected = fedfv_on_the_updates(U[:m], told, alpha, [U[m + old :], U[m : m + old]])
    np.testing.assert_allclose(result.direction, expected, atol=1e-9)
    assert not result.weights[m:].any()
    assert result.weights.sum() == pytest.approx(1)


@given(scene.zoo, losses_of, st.integers(0, 99))
def test_fedfv_that_keeps_all_is_fedavg(U: scene.Matrix, told: list[float], seed: int) -> None:
    prior = np.random.default_rng(seed).dirichlet(np.ones(len(U)))
    found = aggregate("fedfv", U, losses=told[: len(U)], prior=prior, alpha=1.0)
    expected = aggregate("fedavg", U, prior=prior)
    np.testing.assert_array_equal(found.coefficients, expected.coefficients)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-12)


ORDERS = ["loss", "reversed"]


@given(st.integers(2, 9), st.integers(0, 9999), st.sampled_from(ORDERS), st.randoms(use_true_random=False))
def test_the_order_of_the_clients_does_not_matter_to_fedfv(m: int, seed: int, order: str, random: Random) -> None:
    U, told = scene.matrix("random", m, 12, seed), np.random.default_rng(seed).permutation(m).astype(np.float64)
    places = list(range(m))
    random.shuffle(places)
    one = aggregate("fedfv", U, losses=told, alpha=0.3, order=order)
    other = aggregate("fedfv", U[places], losses=told[places], alpha=0.3, order=order)
    np.testing.assert_allclose(other.direction, one.direction, atol=1e-9)


def test_the_direction_has_the_length_of_the_average() -> None:
    U = scene.matrix("conflicting", 6, 9, 3)
    found = aggregate("fedfv", U, losses=np.arange(6), alpha=0.0)
    assert np.linalg.norm(found.direction) == pytest.approx(np.linalg.norm(U.mean(axis=0)))
    assert found.diagnostics["projections"] > 0


def test_a_random_order_changes_with_the_round_and_is_the_same_again() -> None:
    U = scene.matrix("conflicting", 7, 4, 1)
    rule = scene.rule_named("fedfv", order="random", alpha=0.0)

    def found(t: int) -> scene.Vector:
        return rule.combine(scene.rows_of(U, round=t)).coefficients

    np.testing.assert_array_equal(found(0), found(0))
    assert any((found(0) != found(t)).any() for t in range(1, 5))
    assert rule.cautions() == ()
    assert "inflates its loss" in algorithm("fedfv").cautions()[0]


# --- earlier updates


@given(scene.zoo, st.integers(1, 8))
def test_the_dual_cone_leaves_no_conflict_with_earlier_updates_either(U: scene.Matrix, present: int) -> None:
    assume(present < len(U))
    ages = [0] * present + [1] * (len(U) - present)
    result = aggregate("dual-cone", U, ages=ages, tau=1)
    longest = scene.norms(U).max()
    reach = float(np.abs(scene.coefficients_of(result)) @ scene.norms(U))
    assert (U @ result.direction >= -1e-7 * longest * max(reach, 1e-300)).all()
    assert not result.weights[present:].any()
    alone = aggregate("dual-cone", U[:present])
    if (U[present:] @ alone.direction >= 0).all():
        np.testing.assert_allclose(result.direction, alone.direction, atol=1e-6 * longest)


def test_the_window_holds_the_last_update_of_the_absent_oldest_first() -> None:
    run = Run("dual-cone", tau=2)
    U = np.eye(4)
    run.play("abc", U[:3])
    run.play("cd", U[2:])
    step = run.play("d", U[3:])
    told = [(past.client_id, past.round, past.envelope, past.payload) for past in step.history]
    assert told == [(c, t, f"envelope-{c}-{t}", f"payload-{c}-{t}") for c, t in (("a", 0), ("b", 0), ("c", 1))]
    assert run.state["history"] == {
        c: {"round": t, "envelope": f"envelope-{c}-{t}", "payload": f"payload-{c}-{t}"} for c, t in (("c", 1), ("d", 2))
    }
    assert run.rule.blobs(run.state) == ("payload-c-1", "payload-d-2")
    run.number += 2  # two rounds were skipped
    assert [past.client_id for past in run.play("a", U[:1]).history] == []


def test_fedfv_looks_back_from_round_tau_on() -> None:
    run = Run("fedfv", tau=2)
    assert [len(run.play(client, np.eye(3)[i : i + 1]).history) for i, client in enumerate("abc")] == [0, 0, 2]
    assert len(run.state["history"]) == 2


@pytest.mark.parametrize("name", ["fedfv", "dual-cone"])
def test_without_tau_nothing_is_kept(name: str) -> None:
    run = Run(name)
    step = run.play("ab", np.eye(2))
    assert (step.history, run.state, run.rule.keeps_updates, run.rule.blobs(run.state)) == ((), {}, False, ())
    assert Run(name, tau=1).rule.keeps_updates


def test_an_earlier_update_that_is_gone_is_an_error() -> None:
    run = Run("fedfv", tau=1)
    run.play("a", np.eye(2)[:1])
    del run.store["payload-a-0"]
    with pytest.raises(LookupError, match="payload-a-0"):
        run.play("b", np.eye(2)[1:])
    run.play("a", np.eye(2)[:1])  # of those who are present, nothing is needed


def test_an_update_that_was_not_stored_is_an_error() -> None:
    conversation = algorithm("fedfv", {"tau": 1}).round(RoundContext(number=0, total=1))
    with pytest.raises(LookupError, match="the update of ann was not stored"):
        scene.stepped(conversation, Replies([scene.reply("ann", np.ones(2), losses={"loss": 1.0})]))


def test_earlier_updates_are_normalised_like_the_others() -> None:
    U = np.array([[1.0, 0.0], [-1.0, 1.0], [-1.0, -0.5]])
    ages = [0, 1, 1]
    one = aggregate("fedfv", U, losses=[1.0, 0, 0], ages=ages, tau=1, pre=["normalize"])
    scaled = aggregate("fedfv", U * [[1], [1], [1000]], losses=[1.0, 0, 0], ages=ages, tau=1, pre=["normalize"])
    np.testing.assert_allclose(scaled.direction, one.direction, atol=1e-12)
