"""A task's own metrics: measured, recorded, summed in private; runs that stop by them, and the best model by them."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.rounds.runs.submission import Submission
from federation.aggregation.metrics.model_metrics import scores_of_means
from federation.refusals import Refusal
from federation.secure.evaluation import common
from federation.spec.task_metrics import MOST_METRICS, MOST_VALUES, MetricKind, check_metrics, values
from federation.tasks import TaskError, metrics_of, task
from federation.tasks.digits import Digits
from federation.work.evaluate.work import Evaluate
from federation.work.secure.vector import metric_means, of_metrics
from fedpareto import Metric, simulate
from tests.few import few_of
from tests.paths import EXAMPLES

PRIVATE = 'algorithm.name = "fedavg-n"\nprivacy.secure = "sum"\n'
AUC, ERROR = MetricKind("auc"), MetricKind("error", better="lower", largest=4.0)
SPEC = """
name = "metrics"
task = "tests.federation.tasks.test_own_metrics:Measured"
rounds = 6
train = { steps = 2, batch_size = 20 }
simulation.clients = 3
"""


class Error:
    """The mean distance between the digit that the model says and the true one, by parity of the true one."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums, self.counts = [0.0, 0.0], [0, 0]

    def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
        for wrong, digit in zip((output.argmax(1) - y).abs().tolist(), y.tolist(), strict=True):
            self.sums[digit % 2] += wrong
            self.counts[digit % 2] += 1

    def compute(self) -> dict[str, float]:
        pairs = zip(("even", "odd"), self.sums, self.counts, strict=True)
        return {name: total / count if count else math.nan for name, total, count in pairs}


class Measured(Digits):
    """Digits with two metrics: one of torchmetrics, one of its own."""

    def metrics(self) -> dict[str, Metric]:
        from torchmetrics.classification import MulticlassAUROC  # seconds that collecting the tests need not take

        return {
            "auc": Metric(MulticlassAUROC(num_classes=10)),
            "error": Metric(Error(), better="lower", largest=9.0),
        }


def test_a_metric_is_a_number_a_vector_or_a_mapping() -> None:
    assert values("auc", torch.tensor(0.5)) == {"auc": 0.5}
    assert values("recall", torch.tensor([0.5, 1.0])) == {"recall/0": 0.5, "recall/1": 1.0}
    assert values("error", {"odd": 1}) == {"error/odd": 1.0}


@pytest.mark.parametrize(
    ("computed", "why"),
    [
        ("text", "is str, which is not a number"),
        (None, "is NoneType"),
        ([[1.0]], "is list"),
        ({"a/b": 1.0}, "cannot be the name of a value"),
        ({"x" * 33: 1.0}, "cannot be the name of a value"),
        ([0.0] * (MOST_VALUES + 1), f"at most {MOST_VALUES}"),
    ],
)
def test_what_a_metric_must_not_return(computed: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        values("auc", computed)


@pytest.mark.parametrize(
    "known",
    [
        [MetricKind("loss")],
        [MetricKind("AUC")],
        [MetricKind("a/b")],
        [MetricKind("auc", better="more")],
        [MetricKind("auc", largest=0.0)],
        [MetricKind("auc", largest=math.inf)],
        [AUC, AUC],
        [MetricKind(f"m{number}") for number in range(MOST_METRICS + 1)],
    ],
)
def test_a_metric_has_a_name_a_direction_and_a_range(known: list[MetricKind]) -> None:
    with pytest.raises(ValueError, match="metric"):
        check_metrics(known)


def test_a_task_whose_metrics_cannot_be_used_says_so() -> None:
    class Wrong(Digits):
        def metrics(self) -> dict[str, Metric]:
            return {"loss": Metric(Error())}

    with pytest.raises(TaskError, match="cannot be the name of a metric"):
        metrics_of(Wrong())


def test_a_private_evaluation_opens_the_mean_of_clipped_values() -> None:
    asked = Evaluate(splits=("test",), metrics=(AUC, ERROR))
    claims = [{"test/auc": 0.5, "test/error": 9.0, "test/loss": 0.1}, {"test/auc": 1.0, "test/error": 2.0}]
    vectors, measured = zip(*(of_metrics(claim, asked, ("loss",)) for claim in claims), strict=True)
    assert common(measured) == b"\0\0\1\1", "one member computes no loss"
    total = np.sum(vectors, axis=0, dtype=np.float64)
    means = metric_means(np.asarray(total), 2, common(measured), asked, ("loss",))
    assert means == {"test/auc": 0.75, "test/error": 3.0}, "9 is clipped to 4"
    assert of_metrics({"test/auc/0": 1.0}, asked, ("loss",))[1] == bytes(4), "values by class are not summed"
    assert metric_means(np.asarray(total - 2), 2, common(measured), asked, ("loss",))["test/auc"] == 0.0, (
        "noise leaves no range"
    )
    assert scores_of_means(means, 3, ("loss",), (AUC, ERROR)) == {
        "metric/auc/mean": 0.75,
        "metric/error/mean": 3.0,
        "evaluated": 3.0,
    }


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Any:
    """Lets `module:Class` find the examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


@pytest.mark.parametrize("backend", few_of(["loop", "stacked"], "loop"))
@pytest.mark.full
def test_metrics_are_in_the_history_of_a_simulation(backend: str) -> None:
    history = simulate(SPEC, backend=backend, threads=1)
    last = history.round_records[-1]
    own = [record for record in history.client_records if record["round"] == 5 and record["split"] == "test"]
    assert last["metric/auc/worst"] == min(record["auc"] for record in own)
    assert last["metric/error/odd/worst"] == max(record["error/odd"] for record in own)
    assert 0.5 < last["metric/auc/mean"] <= 1.0
    assert last["metric/auc/mean"] > history.round_records[0]["metric/auc/mean"]
    trained = [record for record in history.client_records if record["split"] == "train"]
    assert all("auc" in record for record in trained)


def test_a_run_ends_when_its_target_is_reached_or_nothing_gets_better() -> None:
    history = simulate(SPEC + 'stop = { metric = "auc", of = "worst", target = 0.6 }', threads=1)
    rounds = history.round_records
    assert history.state == "COMPLETED"
    assert history.reason.startswith("target reached: validation auc (worst) = 0.")
    assert len(rounds) < 6
    assert [record["stop/value"] >= 0.6 for record in rounds] == [False] * (len(rounds) - 1) + [True]
    stop = 'stop = { metric = "error/odd", patience = 2, improvement = 100.0 }'
    history = simulate(SPEC + stop, threads=1)
    assert [record["stop/since"] for record in history.round_records] == [0.0, 1.0, 2.0]
    values = [record["stop/value"] for record in history.round_records]
    assert [record["stop/best"] for record in history.round_records] == [min(values[: n + 1]) for n in range(3)]
    assert values[0] > min(values), "a better value that does not count as better"
    assert history.reason.startswith("no better validation error/odd (mean) in 2 evaluations")


def submitted(keys: str, metrics: tuple[MetricKind, ...] = (AUC, ERROR)) -> Submission:
    document = f'name = "x"\ntask = "digits"\nrounds = 2\n{keys}\n'
    return Submission.parse(document.encode(), ("loss",), metrics)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ('stop.metric = "dice"\nstop.patience = 1', "stop.metric: digits has no metric 'dice'"),
        ('stop.metric = "auc"', "target or a patience"),
        ("stop.patience = 1", "give a metric"),
        ('stop.metric = "auc"\nstop.patience = 1\nevaluate.splits = ["test"]', "stop.split"),
        ('stop.metric = "auc"\nstop.patience = 1\nevaluate.every = 0', "evaluate.every = 0"),
        ("evaluate.metrics = { other = {} }", "evaluate.metrics.other"),
        ('evaluate.metrics = { auc = { better = "lower" } }', "evaluate.metrics.auc"),
        (f'{PRIVATE}stop = {{ metric = "auc", of = "worst", patience = 1 }}', "a private round shows only the mean"),
        (
            f'{PRIVATE}stop = {{ metric = "accuracy", of = "weighted", patience = 1 }}',
            'a private round shows only the mean of a metric: use of = "mean", or',
        ),
        (
            f'{PRIVATE}stop = {{ metric = "error/odd", patience = 1 }}',
            'a private round shows only the mean of a metric: use of = "mean" and no class',
        ),
    ],
)
def test_what_submit_refuses(keys: str, why: str) -> None:
    with pytest.raises(Refusal, match=why, check=lambda error: error.reason == "spec"):
        submitted(keys)


def test_a_private_run_may_be_stopped_by_what_it_discloses() -> None:
    for keys in (
        'stop = { metric = "auc", patience = 1 }',
        'stop = { metric = "auc", of = "worst", patience = 1 }\nprivacy.disclose = ["evaluation"]',
    ):
        assert submitted(PRIVATE + keys).spec.stop.metric == "auc"


def test_a_specification_may_name_the_metrics_of_a_task_that_is_not_installed() -> None:
    found = submitted('evaluate.metrics = { rmse = { better = "lower", largest = 9.0 } }', ())
    assert found.metrics == (MetricKind("rmse", better="lower", largest=9.0),)


def test_the_documented_example_measures_what_doctors_ask_for() -> None:
    assert [kind.name for kind in metrics_of(task("clinic:Tumours"))] == ["auc", "recall", "calibration"]
    spec = 'name = "auc"\ntask = "clinic:Tumours"\nrounds = 2\nsimulation.clients = 2'
    last = simulate(spec, threads=1).round_records[-1]
    assert {"metric/auc/mean", "metric/recall/1/worst", "metric/calibration/weighted"} <= last.keys()
    assert json.dumps(last)


@pytest.mark.full
def test_the_regression_of_the_page_is_measured_by_rmse_and_stopped_by_it() -> None:
    document = """
        name = "rmse"
        task = "progression:Progression"
        rounds = 20
        algorithm.name = "fedavg"
        train = { batch_size = 16, learning_rate = 0.01 }
        simulation.clients = 3
        stop = { metric = "rmse", target = 0.7 }
    """
    history = simulate(document, threads=1)
    assert history.reason.startswith("target reached: validation rmse (mean) = 0.6")
    for record in history.client_records:
        assert record["rmse"] == pytest.approx(math.sqrt(record["loss"]), rel=1e-4)
    assert "accuracy/mean" not in history.round_records[-1]
