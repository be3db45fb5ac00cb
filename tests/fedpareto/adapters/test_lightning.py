"""A LightningModule as a task, trained and measured by Lightning itself; and what is refused before."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Part, PartError, Pool, TaskError, initial_model, task
from federation.training import TrainingStopped
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.work.base import WorkError
from fedpareto import simulate
from fedpareto.adapters.lightning import LightningTask, LightningTrainer
from tests.paths import EXAMPLES

SGD = LocalSgd(epochs=2, batch_size=100, learning_rate=0.01)


class Plain(LightningTask):
    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def pool(self, source: DataSource) -> Pool:
        return Pool(np.zeros((40, 3), np.float32), np.zeros(40, np.float32))


class Deciding(Plain):
    options = {"max_epochs": 3}  # noqa: RUF012 - as an owner writes it


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Plain, r"model\(\) returned .*Linear.*; needed: a LightningModule"),
        (Deciding, "options has 'max_epochs', which the adapter sets: leave it out"),
    ],
)
def test_a_module_that_is_none_of_lightnings_and_an_option_of_the_run_are_refused(kind: type[Plain], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        LightningTrainer(kind(), kind().load(DataSource()))


# --- with Lightning


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The task of the example; nothing was written into the working directory at the end."""
    pytest.importorskip("lightning", reason="needs fedpareto[lightning], which `make test-full` installs")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield task("lightning_digits:Digits")
    assert list(Path.cwd().iterdir()) == []


def made(learned: Any) -> Any:
    return learned.trainer(learned, learned.load(DataSource()), "cpu", 1)


def plan(trainer: Any, sgd: LocalSgd = SGD, **more: Any) -> TrainingPlan:
    return TrainingPlan(sgd=sgd, weights={"loss": 1.0}, seed=2**63 - 1, samples=trainer.samples, **more)


def changed(example: Any, module: Callable[[type[Any]], type[Any]]) -> Any:
    """The example with a module that is derived from its own."""
    kind = module(sys.modules[type(example).__module__].Classifier)
    return type("Changed", (type(example),), {"model": lambda self: kind()})()


@pytest.mark.full
def test_the_example_learns_from_the_data_of_three_members(digits: Any, tmp_path: Path) -> None:
    whole = digits.load(DataSource())
    members = {}
    for number in range(3):
        members[f"m{number}"] = tmp_path / str(number)
        members[f"m{number}"].mkdir()
        (x, y) = whole.train.dataset.tensors
        torch.save((x[number::3].clone(), y[number::3].clone()), members[f"m{number}"] / "digits.pt")
    spec = {
        "name": "digits",
        "task": "lightning_digits:Digits",
        "rounds": 3,
        "algorithm": {"name": "fedavg"},
        "parameters": {"buffers": "averaged"},
        "train": {"epochs": 1, "batch_size": 16, "learning_rate": 0.01},
    }
    history = simulate(spec, members=members, home=tmp_path / "home", threads=1, progress=lambda done: None)
    assert history.rounds["accuracy/mean"].iloc[-1] > 0.8
    assert set(history.clients["split"]) == {"train", "validation", "test"}
    assert float(history.state_dict()["layers.1.num_batches_tracked"]) > 2


@pytest.mark.full
def test_a_round_has_the_steps_the_minibatches_and_the_rate_of_the_run_and_begins_afresh(digits: Any) -> None:
    trainer, shares = made(digits), list[float]()
    model = initial_model(digits, 0)[1]
    trained = trainer.trained(model, plan(trainer, tell=shares.append))
    steps = 2 * -(-trainer.samples // 100)
    assert shares == pytest.approx([step / steps for step in range(steps + 1)])
    assert np.abs(trained - model).max() > 0.05
    np.testing.assert_array_equal(trainer.trained(model, plan(trainer)), trained)
    state = torch.get_rng_state()
    few = trainer.trained(model, plan(trainer, SGD.changed(epochs=0, steps=3, learning_rate=0.0)))
    assert torch.equal(torch.get_rng_state(), state)
    kept, counted = trainer.arrays(few), "layers.1.num_batches_tracked"
    assert kept[counted] == 3
    np.testing.assert_array_equal(kept["layers.0.weight"], trainer.arrays(model)["layers.0.weight"])
    half = trainer.trained(model, plan(trainer, SGD.changed(precision="bf16")))
    assert not np.array_equal(half, trained)


@pytest.mark.full
def test_a_result_that_is_no_longer_wanted_ends_training_and_measuring(digits: Any) -> None:
    trainer, asked = made(digits), list[bool]()
    model = initial_model(digits, 0)[1]

    def stopped() -> bool:
        asked.append(True)
        return len(asked) > 3

    with pytest.raises(TrainingStopped):
        trainer.trained(model, plan(trainer, stopped=stopped))
    assert len(asked) == 4
    with pytest.raises(TrainingStopped):
        trainer.scored(model, EvaluationPlan(split="train", stopped=lambda: True))


@pytest.mark.full
def test_checkpoints_and_early_stopping_of_the_module_do_nothing(digits: Any) -> None:
    def module(base: type[Any]) -> type[Any]:
        from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

        class Careful(base):  # type: ignore[misc]
            def configure_callbacks(self) -> list[Any]:
                kept.append(Timer())
                return [ModelCheckpoint(dirpath="files"), EarlyStopping("val_loss"), kept[-1]]

        return Careful

    kept: list[Any] = []
    trainer = made(changed(digits, module))
    model = initial_model(digits, 0)[1]
    trainer.trained(model, plan(trainer))
    assert kept[-1].time_elapsed() > 0  # other callbacks are called


@pytest.mark.full
def test_a_loss_under_another_name_is_found_by_scores_or_refused_with_what_was_logged(digits: Any) -> None:
    def module(base: type[Any]) -> type[Any]:
        class Renamed(base):  # type: ignore[misc]
            def log(self, name: str, *values: Any, **more: Any) -> None:
                super().log(name.replace("val_", "valid/"), *values, **more)

        return Renamed

    renamed = changed(digits, module)
    model = initial_model(digits, 0)[1]
    with pytest.raises(
        WorkError, match=r"needs 'val_loss' as the loss; validation_step logs 'valid/acc', 'valid/loss'"
    ):
        made(renamed).scored(model, EvaluationPlan(split="test"))
    type(renamed).scores = {"loss": "valid/loss"}
    assert set(made(renamed).scored(model, EvaluationPlan(split="test"))) == {"loss"}


@pytest.mark.full
def test_every_training_sample_is_measured_once_whatever_the_loader_leaves_out(digits: Any) -> None:
    trainer = made(digits)
    model = initial_model(digits, 0)[1]
    module, loader = trainer.data.module, trainer.data.module.train_dataloader
    before = trainer.scored(model, EvaluationPlan(split="train"))

    def shortened() -> Any:
        made_loader = loader()
        return torch.utils.data.DataLoader(made_loader.dataset, batch_size=1000, drop_last=True, shuffle=True)

    module.train_dataloader = shortened
    assert trainer.scored(model, EvaluationPlan(split="train")) == pytest.approx(before, abs=1e-5)


@pytest.mark.full
def test_a_pool_is_dealt_and_a_data_module_is_not(digits: Any) -> None:
    with pytest.raises(PartError, match="is the data of one member, and is not dealt to several"):
        digits.load(DataSource(part=Part(0, 3)))
    x, y = digits.load(DataSource()).train.dataset.tensors
    pooled = type("Pooled", (type(digits),), {"pool": lambda self, source: Pool(x, y), "data": LightningTask.data})()
    trainer = pooled.trainer(pooled, pooled.load(DataSource(part=Part(0, 3))), "cpu", 1)
    model = initial_model(pooled, 0)[1]
    assert trainer.samples == 0.8 * len(x) // 3
    trained = trainer.trained(model, plan(trainer, SGD.changed(batch_size=10, epochs=4)))
    split = EvaluationPlan(split="validation")
    assert trainer.scored(trained, split)["loss"] < trainer.scored(model, split)["loss"] / 2


@pytest.mark.full
def test_modules_of_the_package_pytorch_lightning_are_taken_too(digits: Any) -> None:
    base: Any = pytest.importorskip("pytorch_lightning").LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(64, 10)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.training_step(batch, index))

        configure_optimizers = type(digits.model()).configure_optimizers

    x, y = digits.load(DataSource()).train.dataset.tensors
    body = {"model": lambda self: Module(), "pool": lambda self, source: Pool(x, y)}
    other = type("Other", (LightningTask,), body)()
    trainer, model = made(other), initial_model(other, 0)[1]
    assert np.any(trainer.trained(model, plan(trainer)) != model)


@pytest.mark.full
def test_ctrl_c_in_a_training_is_ctrl_c_and_is_heeded_afterwards(digits: Any) -> None:
    def module(base: type[Any]) -> type[Any]:
        class Interrupted(base):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> None:
                signal.raise_signal(signal.SIGINT)

        return Interrupted

    trainer = made(changed(digits, module))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.trained(initial_model(digits, 0)[1], plan(trainer))
    assert signal.getsignal(signal.SIGINT) is before
