"""Metrics over clients, against the independent reference vectors where they are at hand."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.rounds import signed_results
from coordinator.rounds.runs import scores
from federation.aggregation.diagnostics import conflicts
from federation.aggregation.direction import Direction
from federation.aggregation.interface import Combination, Coordinates, Objectives
from federation.aggregation.metrics import metrics, model_metrics
from federation.aggregation.metrics.step_metrics import agreement
from federation.aggregation.phases import Past, PhaseReply, Replies, RoundContext, Step
from federation.spec.task_metrics import MetricKind
from federation.vectors import update_layout
from federation.work.evaluate.work import Evaluate
from tests.federation.aggregation import scene
from tests.federation.aggregation.objective_clients import recorded
from tests.federation.aggregation.scene import reply, rule_named


def reference(kind: str) -> list[dict[str, Any]]:
    """The cases of a kind, of which there are some."""
    cases = [case for case in scene.reference("metrics") if case["kind"] == kind]
    assert cases
    return cases


def test_accuracies_agree_with_the_reference_vectors() -> None:
    for case in reference("user_accuracy"):
        found, expected = metrics.accuracies(case["input"]), case["expected"]
        tails = {"worst5": "worst5_tail_mean", "best5": "best5_tail_mean"}
        theirs = {**tails, "p5": "worst5_percentile", "p95": "best5_percentile"}
        for name in ("mean", "std", "variance", *theirs):
            wanted = pytest.approx(expected[theirs.get(name, name)], abs=1e-9)
            assert found[f"accuracy/{name}"] == wanted, (case["id"], name)


def test_improved_participants_agree_with_the_reference_vectors() -> None:
    for case in reference("improved"):
        told = (case["input"][name] for name in ("loss_before", "loss_after"))
        before, after = ({str(i): float(loss) for i, loss in enumerate(losses)} for losses in told)
        share = metrics.improved(before, after, before)
        assert (None if share is None else 100 * share) == case["expected"]["percent"], case["id"]


def test_what_all_objectives_in_one_model_cost_agrees_with_the_reference_vectors() -> None:
    for case in reference("delta_m"):
        given = case["input"]
        found = metrics.delta_m(given["method"], given["baseline"], [bool(one) for one in given["higher_is_better"]])
        assert found == pytest.approx(case["expected"]["delta_m_percent"], rel=1e-10), case["id"]


def test_what_all_objectives_in_one_model_cost_is_positive_where_it_is_worse() -> None:
    assert metrics.delta_m([0.6], [0.8], [True]) == pytest.approx(25)  # an accuracy that fell by a quarter
    assert metrics.delta_m([0.6], [0.8], [False]) == pytest.approx(-25)  # a loss that fell by a quarter
    assert metrics.delta_m([0.9, 0.3], [0.9, 0.2], [True, False]) == pytest.approx(25)  # half of 0 % and 50 %
    with pytest.raises(ValueError, match="2 values, 1 baselines, 2 directions"):
        metrics.delta_m([1.0, 2.0], [1.0], [True, True])
    with pytest.raises(ValueError, match="one of them is 0"):
        metrics.delta_m([1.0, 2.0], [1.0, 0.0], [True, True])


def test_a_tie_counts_as_improved_and_a_non_finite_loss_does_not() -> None:
    before = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    after = {"a": 1.0, "b": 0.5, "c": np.nan, "d": 2.0}
    assert metrics.improved(before, after, before) == 0.5


def test_nobody_evaluated_is_no_number() -> None:
    assert metrics.improved({}, {}, []) is None
    assert metrics.accuracies([]) == {}


def test_jains_index_is_one_for_equals_and_one_of_n_for_one_who_has_all() -> None:
    assert metrics.jain([0.3] * 7) == pytest.approx(1)
    assert metrics.jain([0, 0, 0, 1]) == pytest.approx(1 / 4)
    assert metrics.jain([0.0, 0.0]) == 1
    assert metrics.jain([1.0, 3.0]) == pytest.approx(16 / 20)
    assert metrics.jain([1e200, 3e200]) == metrics.jain([1e-200, 3e-200]) == pytest.approx(16 / 20)


def test_the_length_of_a_combination_agrees_with_the_reference_vectors() -> None:
    for case in reference("stationarity"):
        gradients, weights = np.array(case["input"]["gradients"]), np.array(case["input"]["weights"])
        K = gradients @ gradients.T
        assert metrics.length(K, weights) == pytest.approx(case["expected"]["norm"], rel=1e-10)
        found = metrics.stationarity(K)
        assert found["stationarity"] <= metrics.length(K, weights)
        longest = np.linalg.norm(gradients, axis=1).max()
        assert found["stationarity/relative"] == pytest.approx(found["stationarity"] / longest)


def test_stationarity_is_the_distance_of_the_origin_from_the_hull() -> None:
    U = np.array([[3.0, 1.0], [3.0, -1.0]])
    assert metrics.stationarity(U @ U.T)["stationarity"] == pytest.approx(3)
    opposed = np.vstack([U, [-1.0, 0.0]])
    assert metrics.stationarity(opposed @ opposed.T)["stationarity"] == pytest.approx(0, abs=1e-7)
    assert metrics.stationarity(np.eye(2) / 16)["stationarity/relative"] == pytest.approx(np.sqrt(0.5))
    assert metrics.stationarity(np.zeros((2, 2))) == {"stationarity": 0.0, "stationarity/relative": 0.0}
    assert metrics.stationarity(np.zeros((0, 0))) == {}
    assert metrics.stationarity(np.ones((metrics.LARGEST_PROGRAM,) * 2))["stationarity"] == pytest.approx(1)
    assert metrics.stationarity(np.eye(metrics.LARGEST_PROGRAM + 1)) == {}


def test_conflicts_have_a_number_and_a_depth() -> None:
    U = np.array([[1.0, 0.0], [0.0, 2.0], [-3.0, -3.0], [0.0, 0.0]])
    found = conflicts(U @ U.T)
    assert found["conflicts"] == 2
    assert found["conflict_depth"] == pytest.approx(-np.sqrt(0.5))
    assert found["conflict_mean"] == pytest.approx(-np.sqrt(0.5))
    none = {"conflicts": 0.0, "conflict_depth": 0.0, "conflict_mean": 0.0}
    assert conflicts(np.eye(3)) == conflicts(np.ones((1, 1))) == none


def replies(rows: NDArray[np.float64], **measured: list[float]) -> Replies:
    """One client a row; `measured` gives each client a number of that name."""
    told = [{name.replace("_", "/"): values[i] for name, values in measured.items()} for i in range(len(rows))]
    return Replies([reply(f"client-{i}", row, metrics=told[i]) for i, row in enumerate(rows)])


def test_a_step_is_described_by_its_own_updates_whatever_the_rule() -> None:
    U = np.random.default_rng(0).standard_normal((4, 9))
    told = replies(U)
    K = told.gram
    for name in ("fedavg", "fedmgda+", "geometric-median"):
        made = rule_named(name).decide(told.rows(RoundContext(number=0, total=1)))
        assert agreement(Step(told, made).gram, 4) == {**conflicts(K), **metrics.stationarity(K)}
    median = Combination(np.zeros(0), np.full(4, 0.25), {}, {}, Coordinates(np.eye(4), 1))
    direction = Direction(median, told.updates, K)
    taken = np.concatenate(list(direction))
    share = signed_results.shares(Step(told, median), direction)["client-2"]
    assert share.weight == 0.25
    assert share.norm == pytest.approx(np.linalg.norm(U[2]), rel=1e-6)
    assert share.cosine == pytest.approx(U[2] @ taken / np.linalg.norm(U[2]) / np.linalg.norm(taken), rel=1e-6)
    assert np.isnan(share.coefficient)


def test_a_clients_share_is_of_all_its_rows() -> None:
    U = np.array([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])
    told = Replies([reply("a", *U[:2]), reply("b", U[2])])
    answer = Combination(np.array([0.5, 0.25, 1.0]), np.array([0.5, 0.3, 0.2]), {}, {})
    direction = Direction(answer, told.updates, told.gram)
    list(direction)
    found = signed_results.shares(Step(told, answer), direction)
    d = np.array([1.5, 1.0])
    cosine = (U[0] + U[1]) @ d / 5 / np.linalg.norm(d)
    assert dataclasses.astuple(found["a"]) == pytest.approx((5.0, 0.8, 0.75, cosine))
    assert dataclasses.astuple(found["b"]) == pytest.approx((0.0, 0.2, 1.0, 0.0))


def test_of_a_step_that_is_combined_already_only_the_weights_are_known() -> None:
    told = replies(np.ones((2, 3)))
    answer = Combination(np.ones(1), np.array([0.75, 0.25]), {}, {})
    step = Step(told, answer, combined=np.ones(3, np.float32))
    found = signed_results.shares(step, Direction(answer, step.rows, step.gram))
    assert {name: share.weight for name, share in found.items()} == {"client-0": 0.75, "client-1": 0.25}
    assert all(np.isnan((share.norm, share.coefficient, share.cosine)).all() for share in found.values())


def test_the_updates_of_earlier_rounds_are_left_out_of_a_rounds_conflicts() -> None:
    told = replies(np.eye(2))
    past = Past(client_id="gone", round=0, envelope="", payload="", row=-np.ones(2, np.float32))
    step = Step(told, Combination(np.ones(3), np.ones(2), {}, {}), history=(past,))
    assert agreement(step.gram, 2)["conflicts"] == 0


NAMES = ("left", "right", "none")


def claims(client: str, **losses: float) -> PhaseReply:
    """A reply of a client that serves the objectives whose losses it claims, and claims one that it does not serve."""
    return reply(client, np.ones(2), losses={**losses, "none": 9.0}, objectives=tuple(losses))


def objective_step(found: Objectives | None) -> Step:
    told = Replies([claims("a", left=1.0, right=2.0), claims("b", left=3.0)])
    earlier = (claims("a", left=5.0, right=1e308), claims("c", right=1e308))
    return Step(told, Combination(np.ones(2), np.ones(2), {}, {}, objectives=found), consulted=earlier)


def test_a_run_with_one_objective_has_no_record_of_it() -> None:
    assert signed_results.objectives(objective_step(None), ("left",)) is None


def test_an_objectives_loss_is_the_mean_of_the_first_claims_of_the_clients_that_serve_it() -> None:
    known, numbers = recorded(objective_step(None), NAMES)
    assert (known.names, known.clients) == (NAMES, {"left": 2, "right": 1, "none": 0})
    assert known.losses == {"left": 4.0}, "the mean of the others is beyond a float64, or of nobody"
    assert (numbers, known.weights, known.cosines) == ({}, {}, None)


def test_the_weights_of_objectives_and_what_their_gradients_say_are_on_record() -> None:
    gram = np.array([[4.0, -2.0], [-2.0, 1.0]])
    told: dict[str, Any] = {"left_out": {"none": "nobody"}, "notes": ("note",), "divergence": 0.25, "mode": "solved"}
    weighed = Objectives(names=("left", "right"), weights=np.array([0.5, 0.5]), gram=gram, **told)
    known, numbers = recorded(objective_step(weighed), NAMES)
    assert (known.weights, known.mode) == ({"left": 0.5, "right": 0.5}, "solved")
    assert (known.left_out, known.notes, known.cosines) == ({"none": "nobody"}, ("note",), [[1.0, -1.0], [-1.0, 1.0]])
    assert numbers == {
        "weight/left": 0.5,
        "weight/right": 0.5,
        "preference/divergence": 0.25,
        **{f"objective/{name}": value for name, value in conflicts(gram).items()},
        "objective/stationarity": 0.5,
    }
    assert recorded(objective_step(weighed), NAMES[:2])[1] == numbers
    short, _ = recorded(objective_step(replace(weighed, gram=gram / 16)), NAMES)
    assert short.cosines == known.cosines
    zero = replace(weighed, gram=np.diag([1.0, 0.0]), exact=np.eye(2), divergence=None)
    known, numbers = recorded(objective_step(zero), NAMES)
    assert known.cosines == [[1.0, 0.0], [0.0, 0.0]]
    assert numbers["objective/stationarity"] == pytest.approx(np.sqrt(0.5)), "of the exact gradients"
    assert "preference/divergence" not in numbers
    missing = replace(weighed, gram=None, exact=np.full((2, 2), np.nan))
    known, numbers = recorded(objective_step(missing), NAMES)
    assert known.cosines is None
    assert set(numbers) == {"weight/left", "weight/right", "preference/divergence"}


def test_what_clients_measured_is_recorded_split_by_split() -> None:
    measured = {"train/loss": 1.0, "train/accuracy": 1.0, "train/samples": 1e300, "train/loss/left": 2.0}
    measured |= {"train/accuracy/left": 0.5, "train/loss/other": 3.0, "test/accuracy": 1.5, "test/samples": -1.0}
    told = Replies([reply("a", metrics=measured, objectives=("left", "right"))])
    train, test, validation = scores.evaluations(7, "model", told, Evaluate(splits=("train", "test", "validation")))
    place = {"round_id": 7, "client_id": "a", "model": "model", "split": "train"}
    others = {"loss/left": 2.0, "accuracy/left": 0.5}
    assert train == {**place, "loss": 1.0, "accuracy": 1.0, "samples": 2**53, "others": others}
    assert [test[name] for name in ("loss", "accuracy", "samples", "others")] == [None, None, 0, {}]
    assert (validation["split"], validation["samples"]) == ("validation", 0)


def test_an_accuracy_that_is_no_share_is_left_out_and_losses_stand_in_where_there_is_none() -> None:
    rows = np.eye(3)
    measured = {"test_accuracy": [0.5, 7.0, 1.0], "test_loss": [1.0, 2.0, 3.0], "train_accuracy": [0.25] * 3}
    measured |= {"test_accuracy_loss": [0.5, 0.5, 0.5], "test_loss_loss": [1.0, 1.0, 1.0]}
    found = model_metrics.scores(replies(rows, **measured), ("loss",), (MetricKind("auc"),))
    assert (found["accuracy/mean"], found["accuracy/worst"], found["loss/test"]) == (0.75, 0.5, 2.0)
    assert not {"loss/worst", "accuracy/objective/loss", "loss/test/loss", "metric/auc/mean"} & found.keys()
    found = model_metrics.scores(replies(rows, test_loss=[1.0, 1.0, 4.0], train_loss=[1.0, 2.0, 3.0]), ("loss",))
    assert [found["loss/worst"], found["loss/jain"]] == [4.0, pytest.approx(36 / 54)]
    assert not any(name.startswith("accuracy") for name in found)
    assert found["evaluated"] == 3.0


def test_each_objective_is_the_mean_over_the_clients_that_serve_it() -> None:
    told = [
        {"test/loss": 1.0, "test/loss/left": 1.0, "test/accuracy": 0.5, "test/accuracy/left": 0.5},
        {"test/loss": 2.0, "test/loss/left": 3.0, "test/loss/right": 1.0, "test/accuracy/right": 7.0},
    ]
    served = (("left",), ("left", "right"))
    answers = [reply(f"client-{i}", metrics=told[i], objectives=served[i]) for i in (0, 1)]
    found = model_metrics.scores(Replies(answers), ("left", "right"))
    assert (found["loss/test"], found["loss/test/left"], found["loss/test/right"]) == (1.5, 2.0, 1.0)
    assert found["accuracy/objective/left"] == 0.5
    assert "accuracy/objective/right" not in found  # 7 is no share


def test_means_over_the_members_alone_give_the_metrics_that_need_no_more() -> None:
    means = {"train/loss": 1.0, "train/accuracy": 0.9, "test/accuracy": 0.5, "test/accuracy/left": 0.25}
    means |= {"train/accuracy/right": 0.75, "test/loss/left": 3.0, "train/loss/right": 4.0}
    means |= {"train/auc": 0.75, "test/auc": 0.5}
    found = model_metrics.scores_of_means(means, 3, ("left", "right"), (MetricKind("auc"), MetricKind("dice")))
    accuracies = {"accuracy/mean": 0.5, "accuracy/objective/left": 0.25, "metric/auc/mean": 0.5}
    losses = {"loss/train": 1.0, "loss/test/left": 3.0, "loss/train/right": 4.0}
    assert found == {**accuracies, **losses, "evaluated": 3.0}
    found = model_metrics.scores_of_means({"test/loss": 2.0, "test/loss/loss": 2.0}, 1, ("loss",))
    assert found == {"loss/test": 2.0, "evaluated": 1.0}


def test_an_update_is_d_floats_and_a_header_as_the_reference_counts() -> None:
    for case in reference("communication"):
        layout = update_layout([("loss", case["input"]["d"])])
        assert layout.file_bytes - len(layout.header) == case["expected"]["per_client_up"]["fedavg"]
