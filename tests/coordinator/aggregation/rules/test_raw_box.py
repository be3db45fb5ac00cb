"""FedMGDA with a box around lambda0 on the raw updates: between FedAvg and multi-gradient descent (eq. 25)."""

import numpy as np
import pytest
from hypothesis import given, settings

from coordinator.aggregation import HyperparameterError, aggregate
from coordinator.aggregation.registry import algorithm
from experiments.loading import load
from tests.coordinator.aggregation.scene import Matrix, zoo

ORTHOGONAL = np.array([[1.0, 0.0], [0.0, 4.0]])  # the shortest vector of the hull weighs them 16/17 and 1/17


@pytest.mark.parametrize(("epsilon", "first"), [(0.0, 0.5), (0.1, 0.6), (0.4, 0.9), (0.5, 16 / 17), (1.0, 16 / 17)])
def test_weights_of_raw_updates_go_as_far_from_the_prior_as_epsilon_allows(epsilon: float, first: float) -> None:
    found = aggregate("fedmgda", ORTHOGONAL, epsilon=epsilon)
    np.testing.assert_allclose(found.weights, [first, 1 - first], atol=1e-12)
    np.testing.assert_allclose(found.direction, [first, 4 * (1 - first)], atol=1e-6)


def test_the_centre_of_the_box_is_the_prior() -> None:
    found = aggregate("fedmgda", ORTHOGONAL, samples=[1, 3], epsilon=0.2)
    np.testing.assert_allclose(found.weights, [0.45, 0.55], atol=1e-12)


@settings(deadline=None)
@given(zoo)
def test_epsilon_zero_is_fedavg_and_epsilon_one_is_what_no_epsilon_is(U: Matrix) -> None:
    samples = np.arange(1, len(U) + 1)
    none = aggregate("fedmgda", U, samples=samples, epsilon=0.0)
    plain = aggregate("fedavg", U, samples=samples)
    np.testing.assert_array_equal(none.weights, plain.weights)
    if not none.diagnostics["stationary"]:
        np.testing.assert_array_equal(none.direction, plain.direction)
    whole, default = aggregate("fedmgda", U, epsilon=1.0), aggregate("fedmgda", U)
    np.testing.assert_array_equal(whole.direction, default.direction)


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, float("nan")])
def test_an_epsilon_outside_of_0_to_1_is_refused(epsilon: float) -> None:
    with pytest.raises(HyperparameterError, match=r"epsilon must lie in \[0, 1\]; got"):
        algorithm("fedmgda", {"epsilon": epsilon})


@pytest.mark.parametrize("name", ["fedmgda-epsilon", "fashion-mnist-epsilon"])
def test_the_epsilon_experiments_sweep_raw_updates_on_both_partitions_and_show_the_training_loss(name: str) -> None:
    experiment = load(name)
    swept = {cell.method.x: cell for cell in experiment.cells() if cell.method.x is not None}
    assert {0.0, 0.05, 0.1, 0.5, 1.0} <= swept.keys()
    for x, cell in swept.items():
        assert cell.document["algorithm"] == {"name": "fedmgda", "epsilon": x}
    assert {cell.document["simulation"]["partition"] for cell in experiment.cells()} == {"shards:5", "iid"}
    assert "loss/train" in {column.measure for column in experiment.columns}
    assert "train" in experiment.spec["evaluate"]["splits"]
