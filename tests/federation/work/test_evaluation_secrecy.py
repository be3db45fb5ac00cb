"""A private evaluation shows no metric that few members compute, and hides each member's metrics in noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.secure import evaluation as evaluations
from federation.aggregation.secure.evaluation import Means, evaluation
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Sum
from federation.secure.evaluation import clip, deviation, deviation_of_mean, noise
from federation.secure.thresholds import EVALUATION_NOISE, Mode, Thresholds
from federation.spec.task_metrics import MetricKind
from federation.work.base import Result, Work
from federation.work.evaluate.work import Evaluate
from federation.work.secure.ready import Ready
from federation.work.secure.terms import SessionStage
from federation.work.secure.vector import of_metrics
from federation.work.secure.wire import terms_bytes
from tests.federation.work.scene import Cast, Inputs, Member, Question, cast, context, document, held, names

VICTIM = "silo-04"
OWN = tuple(MetricKind(f"metric-{place}") for place in range(16))
ONE_METRIC = Evaluate(splits=("test",), metrics=OWN[:1])
SIXTEEN = Evaluate(splits=("test",), metrics=OWN)
COMMON = {"test/samples": 20.0, "test/loss": 1.0, "test/accuracy": 0.5}
TEN = Thresholds(10, Mode.SUM)
Reals = NDArray[np.float64]


def specification(sigma: float = EVALUATION_NOISE) -> bytes:
    """Of a run that evaluates on the test split."""
    return document(Mode.SUM) + f"\nprivacy.evaluation_noise = {sigma}".encode()


def ten(sigma: float = EVALUATION_NOISE, metrics: Mapping[str, Mapping[str, float]] | None = None) -> Cast:
    """Ten members; `metrics` are those of some, besides the common ones."""
    scene = cast(10, specification=specification(sigma))
    for name, member in scene.members.items():
        member.metrics = {**COMMON, **(metrics or {}).get(name, {})}
    return scene


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Sum]:
    """The sums that the coordinator unmasks in evaluations."""
    seen: list[Sum] = []
    original = secure_sum

    def kept(*args: Any) -> Any:
        seen.append((yield from original(*args)))
        return seen[-1]

    monkeypatch.setattr(evaluations, "secure_sum", kept)
    return seen


def evaluated(scene: Cast, asked: Evaluate = ONE_METRIC, without: Sequence[str] = ()) -> Means:
    """One evaluation."""
    who = tuple(name for name in scene.members if name not in without)
    means: Means = held(scene, evaluation(context(scene, Mode.SUM), asked, who))
    return means


def test_a_metric_that_one_member_alone_computes_is_not_in_the_vector_that_the_coordinator_unmasks(
    sums: list[Sum],
) -> None:
    means = evaluated(ten(metrics={VICTIM: {"test/metric-0": 0.37}}))
    assert sorted(means.metrics) == ["test/accuracy", "test/loss"]
    assert np.flatnonzero(sums[0].words).tolist() == [0, 1], "not even noise is in the entry of the third metric"
    assert means.left_out.startswith("left out are test/metric-0: not every one is computed by silo-00, silo-01")


def test_a_metric_that_one_member_lacks_is_left_out_and_the_record_says_whose_it_is() -> None:
    others = {name: {"test/metric-0": 0.5} for name in names(range(10)) if name != VICTIM}
    assert evaluated(ten(metrics=others)).left_out == (
        f"left out are test/metric-0: not every one is computed by {VICTIM}"
    )


def test_without_a_metric_that_all_members_compute_nothing_is_summed() -> None:
    scene = ten()
    scene.members[VICTIM].metrics = {}
    with pytest.raises(TooFewUpdatesError, match=rf"every metric lacks a member. left out are .* by {VICTIM}"):
        evaluated(scene)
    assert (SessionStage.MASK.value, 0) not in scene.sent


def test_a_member_masks_nothing_of_an_evaluation_whose_members_have_not_signed_which_metrics_they_compute() -> None:
    def lie(stage: str, member: Member, work: Work, result: Result) -> Result:
        if stage != SessionStage.READY or member.name == VICTIM:
            return result
        return replace(result, statement=replace(result.statement, measured=b"\1"))

    scene = ten()
    scene.lie = lie
    with pytest.raises(TooFewUpdatesError):
        evaluated(scene)
    assert scene.declined == {
        (SessionStage.READY.value, name): "statement" for name in names(range(10)) if name != VICTIM
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_counts_as_the_worst_and_as_computed(value: float) -> None:
    asked = Evaluate(splits=("test",), metrics=(MetricKind("auc"), MetricKind("error", "lower", 4.0)))
    claims = {"test/loss": value, "test/accuracy": value, "test/auc": value, "test/error": value}
    vector, measured = of_metrics(claims, asked, ("loss",))
    assert vector.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert measured == b"\1\1\1\1", "which metrics a member computes does not depend on the model"


def test_two_evaluations_that_differ_by_one_member_show_its_metrics_with_noise_of_the_stated_size(
    sums: list[Sum],
) -> None:
    values = np.random.default_rng(1).uniform(0, 1, (10, len(OWN)))
    metrics = {
        name: dict(zip([f"test/{kind.name}" for kind in OWN], row.tolist(), strict=True))
        for name, row in zip(names(range(10)), values, strict=True)
    }

    def errors(sigma: float) -> Reals:
        for without in ((), (VICTIM,)):
            evaluated(ten(sigma, metrics), SIXTEEN, without)
        bound = clip(2 + len(OWN), sigma)
        whole, less = (total.vector(bound * len(total.weights)).astype(float)[2:] for total in sums[-2:])
        return np.asarray(whole - less - values[4])

    assert np.abs(errors(0.0)).max() < 1e-6, "without noise, the difference is the member's metrics"
    nine = Thresholds(9, Mode.SUM)
    size = math.hypot(deviation(0.1, TEN) * math.sqrt(10), deviation(0.1, nine) * 3)
    assert size == pytest.approx(0.1 * math.sqrt(10 / 4 + 9 / 5))
    assert np.sqrt(np.mean(errors(0.1) ** 2)) == pytest.approx(size, rel=0.4)


def test_the_noise_on_the_sum_of_all_members_but_the_colluders_is_at_least_sigma() -> None:
    for m in range(5, 101):
        cohort = Thresholds(m, Mode.SUM)
        assert deviation(0.1, cohort) * math.sqrt(cohort.n_min - cohort.t) == pytest.approx(0.1)
        assert deviation_of_mean(0.1, cohort, m) < 0.3 * math.sqrt(1 / m), "what it costs"


def test_noise_is_standard_normal_repeats_with_its_question_and_differs_for_every_other() -> None:
    long = noise(bytes(32), bytes(32), 20_000)
    assert np.array_equal(long[:5], noise(bytes(32), bytes(32), 5))
    assert abs(long.mean()) < 0.03
    assert long.std() == pytest.approx(1, abs=0.03)
    assert (np.abs(long) < 1.959964).mean() == pytest.approx(0.95, abs=0.01)
    others = [noise(b"\1" * 32, bytes(32), 5), noise(bytes(32), b"\1" * 32, 5)]
    assert not any(np.isclose(long[:5], other).any() for other in others)


def test_a_member_whose_owner_asks_for_more_noise_declines() -> None:
    scene = ten(0.05)
    site = scene.members[VICTIM].site
    site.policies["digits"] = site.policies["digits"].model_copy(update={"evaluation_noise": 0.1})
    assert evaluated(scene).members == 9
    assert scene.declined == {(SessionStage.READY.value, VICTIM): "policy:evaluation-noise"}


def test_a_member_evaluates_the_metrics_that_the_specification_names_and_no_others() -> None:
    def other(stage: str, member: Member, work: Work, inputs: Inputs) -> Question:
        if not isinstance(work, Ready):
            return work, inputs
        agreed = replace(work.agreed, work=ONE_METRIC)
        return Ready(agreed=agreed, terms_bytes=terms_bytes(agreed)), inputs

    scene = ten()
    scene.specification += b"\nevaluate.metrics = { auc = {} }"
    asked = Evaluate(splits=("test",), metrics=(MetricKind("auc"),))
    scene.change = other
    with pytest.raises(TooFewUpdatesError):
        evaluated(scene, asked)
    assert set(scene.declined.values()) == {"terms"}
