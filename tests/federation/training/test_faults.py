"""Local training that goes wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from federation.spec.train_section import LocalSgd
from federation.tasks import DataError, DataSource, Part, Task, TaskError, initial_model, task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.determinism import pick_device
from federation.training.torch_trainer import TorchTrainer
from tests.federation.training.scene import BASE, Both, Line, _train, _trainer


@pytest.mark.parametrize("batch_size", [0, 5])
def test_divergence_is_reported_with_its_step(batch_size: int) -> None:
    work = LocalSgd(steps=400, batch_size=batch_size, learning_rate=1e6)
    with pytest.raises(TrainingDiverged) as caught:
        _train(_trainer(Line()), BASE, work)
    assert 1 < caught.value.step < 20
    assert f"step {caught.value.step}" in str(caught.value)


def test_a_last_step_that_overflows_is_divergence_too() -> None:
    with pytest.raises(TrainingDiverged, check=lambda error: error.step == 1):
        _train(_trainer(Line()), BASE, LocalSgd(steps=1, batch_size=0, learning_rate=3e38))


def test_a_base_model_without_a_finite_loss_is_divergence_at_step_0() -> None:
    with pytest.raises(TrainingDiverged, check=lambda error: error.step == 0):
        _train(_trainer(Line()), np.full(4, np.nan, dtype=np.float32))


def test_a_trainer_works_on_after_divergence() -> None:
    trainer = _trainer(Line())
    expected = _train(trainer, BASE).rows["loss"].tobytes()
    with pytest.raises(TrainingDiverged):
        _train(trainer, BASE, LocalSgd(steps=50, batch_size=0, learning_rate=1e9))
    assert _train(trainer, BASE).rows["loss"].tobytes() == expected


def test_training_stops_when_the_caller_says_so() -> None:
    answers = iter([False] * 6 + [True])
    shares: list[float] = []
    with pytest.raises(TrainingStopped):
        _train(_trainer(Line()), BASE, stopped=lambda: next(answers), progress=shares.append)
    assert 0 < len(shares) < 3


@pytest.mark.parametrize("made", [Line, Both])
def test_progress_grows_to_one(made: Callable[[], Task]) -> None:
    shares: list[float] = []
    _train(_trainer(made()), BASE, LocalSgd(steps=5, batch_size=10, learning_rate=0.01), progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1


def test_a_client_without_training_samples_cannot_train_but_can_evaluate() -> None:
    line = Line(samples=0)
    trainer = _trainer(line)
    assert trainer.samples == 0
    with pytest.raises(DataError, match="no training samples"):
        _train(trainer, BASE)
    assert trainer.measure(BASE) == {"train/samples": 0, "validation/samples": 0, "test/samples": 0}


def test_a_base_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4 trainable parameters"):
        _train(_trainer(Line()), BASE[:3])


def test_objectives_and_losses_must_agree() -> None:
    class Wrong(Line):
        objectives = ("fit", "fairness")

    with pytest.raises(TaskError, match="fairness"):
        _train(_trainer(Wrong()), BASE)


@pytest.mark.parametrize(
    ("losses", "correct", "says"),
    [
        (lambda mean: mean, None, r"losses\(\) returned a Tensor.*; needed: the mean loss of each objective by name"),
        (lambda mean: None, None, r"losses\(\) returned None; needed"),
        (lambda mean: {"loss": mean.expand(3)}, None, r"losses\(\)\['loss'\] is a Tensor \(3,\) of float32; needed"),
        (lambda mean: {"loss": mean}, 0.5, r"correct\(\) returned a float for 7 samples; needed: a tensor \(7,\)"),
    ],
)
def test_what_a_task_returns_for_its_losses_and_marks_is_refused_in_words(
    losses: Callable[[Tensor], Any], correct: Any, says: str
) -> None:
    class Wrong(Line):
        def losses(self, output: Tensor, y: Tensor) -> Any:
            return losses(output.mean())

        def correct(self, output: Tensor, y: Tensor) -> Any:
            return correct

    with pytest.raises(TaskError, match=says):
        _trainer(Wrong()).measure(BASE, ("train",))


def test_an_objective_cannot_be_called_accuracy() -> None:
    class Wrong(Line):
        objectives = ("accuracy",)

    with pytest.raises(TaskError, match="accuracy"):
        _trainer(Wrong())


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 1, "steps": 1},
        {"epochs": 0},
        {"epochs": -1},
        {"epochs": 1, "batch_size": -1},
        {"epochs": 1, "learning_rate": float("nan")},
        {"epochs": 1, "momentum": 1.0},
        {"epochs": 1, "proximal_mu": -0.1},
    ],
)
def test_work_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"epochs|should be"):
        LocalSgd.from_values({"learning_rate": 0.1} | wrong)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "", "cuda:999", "mps"])
def test_a_device_that_is_not_here_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=name or "''"):
        pick_device(name)


def test_part_of_the_digits_trains_on_its_own_labels_only() -> None:
    digits = task("digits")
    splits = digits.load(DataSource(part=Part(0, 8, "shards:1")))
    trainer = TorchTrainer(digits, splits, "cpu", 1)
    _, base = initial_model(digits, 0)
    result = _train(trainer, base, LocalSgd(epochs=20, batch_size=10, learning_rate=0.1))
    assert trainer.measure(base - result.rows["loss"])["train/accuracy"] == 1
    assert result.samples == len(splits.train)
