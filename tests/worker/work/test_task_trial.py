"""A task is tried on a batch of the owner's data before a worker joins a round, and in `data show`."""

from collections.abc import Iterator

import pytest
import torch

from federation.tasks import DataError, Dataset, DataSource, Splits, Task, TaskError
from federation.training.torch_trainer import TorchTrainer
from tests.command_lines import failure
from worker.service import prepare_offers

OWN = """
import torch
from torch import nn

from federation.tasks import Dataset, Pool, Splits
from federation.tasks.digits import Digits


def changed(pool, index, x=None, y=None):
    features, labels = pool.x.clone(), pool.y.clone()
    if x is not None:
        features[index, 3] = x
    if y is not None:
        labels[index] = y
    return Pool(features, labels)


class NotANumber(Digits):
    def load(self, source):
        splits = super().load(source)
        bad = changed(splits.validation, 60, x=float("nan"))
        return Splits(splits.train, Dataset(bad.x, bad.y), splits.test)


class Label(Digits):
    def pool(self, source):
        return changed(super().pool(source), 1000, y=10)


class Loss(Digits):
    def losses(self, output, y):
        return {"loss": nn.functional.mse_loss(output[:, 10], y)}


class Names(Digits):
    def losses(self, output, y):
        return {"error": output.sum()}


class Data(Digits):
    def load(self, source):
        return self.missing
"""


@pytest.fixture(scope="module", autouse=True)
def _code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("code")
    (directory / "trial_tasks.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "NotANumber",
            DataError,
            r"the loss 'loss' on the validation split is nan: 1 of its 180 samples have features that are not finite "
            r"\(the first is sample 60, counted from 0\)",
        ),
        (
            "Label",
            TaskError,
            r"the label 10 is none of the classes 0 to 9 of the model, .*; the labels are 0 to 10: give the model more",
        ),
        ("Loss", TaskError, r"failed: IndexError: .*\n  .*trial_tasks\.py, line 32, in losses\n    return \{\"loss\""),
        ("Names", TaskError, r"losses\(\) returned \['error'\], its objectives are \['loss'\]"),
        ("Data", TaskError, r"loading its data failed: AttributeError: .*\n  .*trial_tasks\.py, line 42, in load\n"),
    ],
)
def test_a_worker_finds_out_before_it_attends(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        prepare_offers([f"trial_tasks:{name}"], DataSource(), device="cpu", threads=None)
    assert str(caught.value).startswith(f"task 'trial_tasks:{name}': ")
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Label", "the label 10 is none of the classes 0 to 9"),
        ("Loss", "trial_tasks.py, line 32, in losses"),
    ],
)
def test_data_show_finds_out_too(name: str, message: str) -> None:
    result = failure("data", "show", f"trial_tasks:{name}", "--clients", "2")
    assert message in result.message


class Regression(Task):
    objectives = ("left", "right")

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2)

    def losses(self, output: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: ((output[:, at] - y[:, at]) ** 2).mean() for at, name in enumerate(self.objectives)}

    def correct(self, output: torch.Tensor, y: torch.Tensor) -> None:
        return None


def test_labels_of_objectives_that_a_client_does_not_serve_need_not_be_finite() -> None:
    y = torch.zeros(20, 2)
    y[:, 1] = torch.nan
    data = Dataset(torch.ones(20, 3), y)
    splits = Splits(data, Dataset(torch.empty(0, 3), torch.empty(0, 2)), data)
    TorchTrainer(Regression(), splits, objectives=["left"]).try_out()
    with pytest.raises(DataError, match="the loss 'right' on the train split is nan: 20 of its 20 samples have labels"):
        TorchTrainer(Regression(), splits).try_out()
