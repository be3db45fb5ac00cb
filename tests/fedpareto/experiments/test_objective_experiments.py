"""The experiments on several objectives measure what the tables and figures that they name measure."""

import math

import pytest
import torch

from federation.tasks import task
from fedpareto.experiments.loading import load
from tests.fedpareto.experiments.scene import catalogue, simulated


def test_the_threshold_of_fmol_is_one_hundredth_of_a_loss_that_is_divided_by_the_batch_once_more() -> None:
    experiment = load("fmol-table2")
    assert len(experiment.cells()) == 12
    targets = {target.measure: target.value for target in experiment.derived.targets}
    for cell in experiment.cells():
        spec = simulated(cell)
        assert spec.task == "multi-mnist-fmol"
        wanted = 0.01 * spec.train.batch_size
        assert targets == {"loss/train/left": wanted, "loss/train/right": wanted}
        # The published number of rounds and a few more.
        row = experiment.published_values(cell)
        assert spec.rounds >= max(int(row["left"]), int(row["right"])) * 1.2
        assert spec.evaluate.every == (2 if spec.train.steps == 1 else 1)
    compared = {column.published: column.measure for column in experiment.columns if column.published}
    assert compared == {side: f"rounds_to/1.28/loss/train/{side}" for side in ("left", "right")}


WITH_FEDCMOO = [
    name
    for name, experiment in catalogue().items()
    # The first two attack sketches and sums; the last one has rules without sketches.
    if not name.startswith(("leakage", "cover-search", "scaled-digits"))
    and any(cell.document.get("algorithm", {"name": ""})["name"].startswith("fedcmoo") for cell in experiment.cells())
]
LABELS = {"count": "CountSketch", "svd": "one-way SVD", "svd-two-way": "two-way SVD"}


@pytest.mark.parametrize("name", WITH_FEDCMOO)
def test_every_experiment_of_fedcmoo_has_rows_with_both_sketches_each_labelled_by_its_sketch(name: str) -> None:
    sketches: dict[str, set[str]] = {}
    for cell in load(name).cells():
        algorithm = simulated(cell).algorithm
        if algorithm.name.startswith("fedcmoo"):
            sketch = algorithm.model_dump().get("sketch", "count")
            assert LABELS[sketch] in cell.label
            sketches.setdefault(algorithm.name, set()).add(sketch)
        else:
            assert "Sketch" not in cell.label
            assert "SVD" not in cell.label
    if name == "objectives-digits":  # its row of FedCMOO-Pref is one of many rules
        del sketches["fedcmoo-pref"]
    assert all({"count", "svd-two-way"} <= found for found in sketches.values())


def test_in_table_2_of_fedcmoo_the_first_digit_has_the_norm_for_a_loss() -> None:
    logits = {side: torch.zeros(1, 10) for side in ("left", "right")}
    losses = task("multi-mnist-l1").losses(logits, torch.tensor([[3, 4]]))
    assert float(losses["left"]) == pytest.approx(1.8)  # nine shares of 0.1 too much, one of 0.9 too little
    assert float(losses["right"]) == pytest.approx(math.log(10))
    conditions = {cell.condition.name: cell.document["task"] for cell in load("fedcmoo-scales").cells()}
    assert conditions == {"NLL and NLL": "multi-mnist", "l1 and NLL": "multi-mnist-l1"}


def test_river_flow_leaves_the_corrupt_row_out_and_compares_sums_with_means_of_thirty_gradients() -> None:
    cells = {cell.label: simulated(cell) for cell in load("river-flow").cells()}
    assert {spec.task for spec in cells.values()} == {"river-flow"}
    plain, summed, mean = (cells[f"FSMGDA{which}"] for which in ("", ", K = 30, sum", ", K = 30, mean"))
    assert {spec.rounds * spec.train.steps for spec in (plain, summed, mean)} == {1500}
    assert mean.train == summed.train
    assert summed.server.learning_rate == pytest.approx(30 * mean.server.learning_rate)


def test_clients_that_serve_different_objectives_are_compared_under_four_indicator_matrices() -> None:
    cells = load("objectives-served").cells()
    conditions = {cell.condition.name: simulated(cell) for cell in cells}
    assert [spec.simulation.objectives for spec in conditions.values()] == ["all", "cycle:1", "all", "all"]
    for name, left, right in (
        ("four both, three left, three right", 3, 3),
        ("eight left, two right", 8, 2),
    ):
        alone = list(conditions[name].objectives.serve.values())
        assert (alone.count(("left",)), alone.count(("right",)), len(alone)) == (left, right, left + right)
    assert {simulated(cell).algorithm.name for cell in cells} == {"fsmgda", "fedcmoo", "scalarised", "fedavg"}
