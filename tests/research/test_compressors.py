"""How well a sketch estimates the Gram matrix is measured on the Jacobians of the federation that a run names."""

import pytest

from compressors.laboratory import measure
from compressors.specification import CompressorSpecification
from fedpareto.experiments.loading import load
from fedpareto.experiments.result_store import Measures
from tests.fedpareto.experiments import scene

one_thread = scene.one_thread  # a fixture


def errors(sketch: str, **changes: object) -> Measures:
    settings = {"name": "a", "seed": 0, "task": "two-digits", "rounds": 2, "batch": 32, "sketch": sketch, **changes}
    return measure(CompressorSpecification.model_validate(settings), None)[0]


@pytest.mark.full
def test_the_exact_jacobian_has_no_error_and_a_smaller_sketch_a_larger_one() -> None:
    exact, whole, tenth = errors("exact"), errors("count"), errors("count", budget=0.1)
    assert exact["nrmse"] < 1e-6
    assert exact["upload/d"] == 2
    assert exact["nrmse"] < whole["nrmse"] < tenth["nrmse"] < 1
    assert tenth["upload/d"] == pytest.approx(0.1, abs=0.01)
    assert errors("count")["nrmse"] == whole["nrmse"]


def test_the_second_leg_of_the_svd_makes_the_estimate_better() -> None:
    assert errors("svd-two-way", budget=0.3)["nrmse"] < errors("svd", budget=0.3)["nrmse"]


def test_a_task_of_one_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="digits has one objective"):
        errors("count", task="digits")


def test_every_run_of_table_3_has_a_specification() -> None:
    experiment = load("fedcmoo-compressors")
    assert len(experiment.cells()) == 12 * 9
    for cell in (*experiment.cells(), *experiment.in_quick_form().cells()):
        cell.spec(0)
