"""The layer Standardise, and what becomes of its tensors in a run."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from federation.spec.run_sections import ParametersSpec
from federation.spec.sharing import Sharing, SharingError, Unshared
from federation.statistics.scale import ScaleError, ScaleLayer
from federation.tasks import Task, TaskError, buffers_of, initial_model, scale_layer_of
from federation.tasks.standardise import Standardise
from federation.training.own import assumed_parameters, run_model, scaled_spec
from fedpareto import Column

FIXED = ("0.mean", "0.deviation")
DOCUMENT = b"""{"format": 1, "columns": [
    {"name": "age", "count": 9, "mean": 40.0, "deviation": 20.0},
    {"name": "b", "count": 9, "mean": 1.0, "deviation": 0.0}
]}"""


class Normed(Task):
    """A table with BatchNorm behind the layer."""

    name = "normed"

    def model(self) -> nn.Module:
        return nn.Sequential(
            Standardise([Column(name="age"), "b"]), nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        )


class Plain(Task):
    name = "plain"

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)


class Twice(Task):
    name = "twice"

    def model(self) -> nn.Module:
        return nn.Sequential(Standardise(["a"]), Standardise(["b"]), nn.Linear(1, 2))


def test_values_are_standardised_and_missing_ones_become_0_in_tables_and_channels() -> None:
    layer = Standardise(["age", "b"])
    layer.mean.copy_(torch.tensor([40.0, 1.0]))
    layer.deviation.copy_(torch.tensor([20.0, 0.5]))
    table = torch.tensor([[60.0, 1.0], [math.nan, 2.0], [40.0, -math.inf]])
    assert layer(table).tolist() == [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]
    images = table.view(3, 2, 1, 1).expand(3, 2, 4, 5)
    assert layer(images).shape == (3, 2, 4, 5)
    assert torch.equal(layer(images)[:, :, 2, 3], layer(table))
    assert layer(torch.tensor([[60, 2]])).tolist() == [[1.0, 2.0]]
    assert layer(table.double()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"inputs of shape \(3, 1\); needed: \(samples, 2, \.\.\.\)"):
        layer(table[:, :1])
    for names in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="at least one column, each once"):
            Standardise(names)
    with pytest.raises(TypeError, match=r"give a sequence of columns, such as \['age'\]"):
        Standardise("age")


def test_a_large_offset_leaves_the_small_differences_of_float64() -> None:
    layer = Standardise(["time"])
    layer.mean.fill_(2.0**31)
    x = torch.tensor([[2.0**31 + 0.25], [2.0**31 + 0.5]], dtype=torch.float64)
    assert layer(x).tolist() == [[0.25], [0.5]]


def test_its_tensors_come_last_in_the_model_of_a_run_after_averaged_buffers() -> None:
    task = Normed()
    layout, _ = initial_model(task, 0)
    assert scale_layer_of(task) == ScaleLayer("0", ("age", "b"))
    parameters = ParametersSpec(buffers="averaged", fixed=("0.*",))
    assert assumed_parameters(buffers_of(task), scale_layer_of(task)) == ParametersSpec(buffers="averaged", fixed=FIXED)
    shared, vector = run_model(task, 0, parameters, DOCUMENT)
    names = [tensor.name for tensor in shared.tensors]
    assert names[-5:] == ["2.running_mean", "2.running_var", "2.num_batches_tracked", *FIXED]
    assert shared.split(vector)["0.mean"].tolist() == [40.0, 1.0]
    assert shared.split(vector)["0.deviation"].tolist() == [20.0, 1.0]
    assert parameters.parameters_of(shared).size == layout.size - 7 - 4
    assert parameters.trained(shared).size == layout.size - 4
    sharing = Sharing.of(layout, parameters, buffers_of(task))
    assert (sharing.buffers, sharing.fixed) == (7, 4)
    whole = np.arange(layout.size, dtype=np.float32)
    assert np.array_equal(sharing.with_shared(np.zeros_like(whole), sharing.shared_of(whole)), whole)


def test_a_model_with_the_layer_is_not_trained_unfilled_and_one_without_it_is_not_filled() -> None:
    for parameters in (ParametersSpec(), ParametersSpec(buffers="averaged"), ParametersSpec(buffers="frozen")):
        with pytest.raises(
            SharingError, match=r"has a layer Standardise \('0'\), and 0.mean and 0.deviation are not fixed"
        ):
            run_model(Normed(), 0, parameters)
    with pytest.raises(ScaleError, match="the model of plain has no layer Standardise"):
        scaled_spec(b"", Plain(), "blake3:" + 64 * "0", DOCUMENT)
    with pytest.raises(TaskError, match="one layer Standardise; this one has 0, 1"):
        scale_layer_of(Twice())
    layout, _ = initial_model(Normed(), 0)
    for unshared, words in (
        (Unshared(frozen=("1.*",), fixed=("0.*", "1.*"), buffers="averaged"), "'1.bias' is both frozen and fixed"),
        (Unshared(fixed=("0.*", "*.weight", "*.bias"), buffers="averaged"), "no parameter of the model is shared"),
        (Unshared(fixed=("9.*",)), r"parameters.fixed: '9\.\*' matches no parameter"),
        (Unshared(fixed=("0.*",)), "say what becomes of them"),
    ):
        with pytest.raises(SharingError, match=words):
            Sharing.of(layout, unshared, buffers_of(Normed()))
