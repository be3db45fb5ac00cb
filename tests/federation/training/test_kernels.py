"""Operations without a deterministic kernel: the work begins again, and the trainer is no longer repeatable."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from federation.spec.computation import Ability, Descend, Differentiate
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Splits, Task, TaskError, initial_model
from federation.training.torch_trainer import TorchTrainer
from federation.work.base import WorkError
from tests.federation.training.scene import SGD, Line, Start, starting
from tests.owners_code.unpooled_task import Undetermined
from tests.trained import ASKED, jacobian, train

ERROR, WARN = 2, 1  # PyTorch's numbers of its modes
ADAM = LocalSgd(epochs=2, batch_size=10, learning_rate=0.1, optimizer="adam")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Attending(nn.Module):
    """Attention, BatchNorm and dropout. It notes the mode of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.modes.append(torch.get_deterministic_debug_mode())
        some = self.norm(self.first(x))[None]
        attended = functional.scaled_dot_product_attention(some, some, some)
        return self.out(functional.dropout(attended[0] * self.get_buffer("table"), 0.2, self.training))


class Late(Line):
    """An operation without a deterministic kernel in the last minibatch, of 6, of each pass over 23 samples."""

    short = 6

    def model(self) -> nn.Module:
        return Attending()

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().losses(Undetermined.apply(output) if len(y) == self.short else output, y)


class Never(Late):
    short = -1


def made(kind: Callable[[], Task], **given: Any) -> TorchTrainer:
    learned = kind()
    return TorchTrainer(learned, learned.load(DataSource()), **given)


def modes(trainer: TorchTrainer) -> list[int]:
    found: Any = trainer._model.modes
    return list(found)


def test_work_that_meets_such_an_operation_begins_again_and_nothing_is_counted_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer, other = made(Late), made(Late)
    base = initial_model(Late(), 1)[1]
    other.kernels.repeatable = False  # it never begins in the mode "error"
    found, expected = (train(each, base, ADAM, measure=False) for each in (trainer, other))
    assert found.rows["loss"].tobytes() == expected.rows["loss"].tobytes()
    after = trainer.layout.split(base - found.rows["loss"])
    assert after["norm.num_batches_tracked"] == ADAM.count(23) == 6
    assert modes(trainer) == [ERROR] * 3 + [WARN] * 6
    assert trainer.abilities == set(Ability) - {Ability.REPEATABLE}
    assert trainer.kernels.operations == {"undetermined_backward"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # one of each trainer
    assert "PyTorch has no deterministic kernel for undetermined_backward on this device (cpu)" in said[0]
    train(trainer, base, ADAM)
    assert len(caplog.records) == 2
    assert (torch.get_deterministic_debug_mode(), modes(trainer)[-1]) == (0, WARN)


def test_attention_stays_in_the_mode_error_as_long_as_each_operation_has_a_deterministic_kernel() -> None:
    trainer, base = made(Never), initial_model(Never(), 1)[1]
    trainer.try_out()
    for _ in range(2):
        train(trainer, base, ADAM)
        trainer.measure(base)
    assert set(modes(trainer)) == {ERROR}
    assert Ability.REPEATABLE in trainer.abilities


def test_one_trainer_decides_for_all_that_share_its_model() -> None:
    first = made(Late)
    second = first.on(first.data)
    base = initial_model(Late(), 1)[1]
    train(first, base, ADAM, measure=False)
    begun = len(modes(second))
    with pytest.raises(WorkError, match="cannot repeat"):
        second.check_can_do(Differentiate(batch_size=6, again=True))
    train(second, base, ADAM, measure=False)
    assert modes(second)[begun:] == [WARN] * 6
    assert Ability.REPEATABLE not in second.abilities


def test_gradients_that_must_be_the_same_again_are_declined_once_they_cannot_be() -> None:
    again, base = Differentiate(batch_size=6, again=True), initial_model(Late(), 1)[1]
    trainer = made(Late)
    for _ in range(2):  # found in the work, and known before it
        with pytest.raises(WorkError, match="cannot repeat", check=lambda error: error.reason == "ability:repeatable"):
            trainer.compute(base, again, **ASKED)
    assert jacobian(trainer, base, 6).rows["loss"].any()
    first_step = Descend(sgd=SGD, targets={"loss": {"loss": 1.0}}, from_jacobian=True)
    assert trainer.compute(base, first_step, **ASKED).rows["loss"].any()


def test_another_error_is_an_error_and_work_is_not_done_twice() -> None:
    class Wrong(Never):
        def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
            raise RuntimeError("this operation is not implemented")

    trainer = made(Wrong)
    with pytest.raises(RuntimeError, match="not implemented"):
        train(trainer, initial_model(Wrong(), 1)[1], SGD, measure=False)
    assert modes(trainer) == [ERROR]
    assert Ability.REPEATABLE in trainer.abilities


def test_the_start_check_meets_such_an_operation_and_leaves_buffers_and_generators_as_they_were() -> None:
    class Moving(Attending):
        def forward(self, x: Tensor) -> Any:
            self.get_buffer("table").mul_(0.99)
            return Undetermined.apply(super().forward(x))

    class Moved(Never):
        def model(self) -> nn.Module:
            return Moving()

    trainer = made(Moved)
    before = [buffer.clone() for buffer in trainer._model.buffers()]
    drawn = torch.get_rng_state()
    trainer.try_out()
    assert all(map(torch.equal, before, trainer._model.buffers()))
    assert torch.equal(drawn, torch.get_rng_state())
    assert Ability.REPEATABLE not in trainer.abilities
    assert not torch.any(trainer._buffers.gradient.isnan())
    assert train(trainer, initial_model(Moved(), 1)[1], SGD).rows["loss"].any()  # gradients still reach the buffer


@pytest.mark.parametrize("samples", [1, 2])
def test_the_start_check_makes_training_passes_on_the_training_split_alone(samples: int) -> None:
    learned = Never()
    whole = learned.load(DataSource()).train
    train_split, one = (Dataset(whole.x[:count], whole.y[:count]) for count in (samples, 1))
    trainer = TorchTrainer(learned, Splits(train_split, one, one))
    if samples > 1:
        trainer.try_out()
        return
    with pytest.raises(TaskError, match="the train split has one sample, and the model trains on two or more only"):
        trainer.try_out()


@pytest.fixture
def child(tmp_path: Path) -> Any:
    yield from starting(tmp_path)


def test_a_process_says_with_an_answer_that_it_can_no_longer_repeat_its_work(child: Start) -> None:
    trainer = child("say(model, type='model', id=id, repeatable=kind != 'train')")
    base = initial_model(trainer.task, 0)[1]
    assert Ability.REPEATABLE in trainer.abilities
    train(trainer, base, SGD, measure=False)
    assert Ability.REPEATABLE not in trainer.abilities


def test_other_warnings_are_shown_once_in_spite_of_the_search_for_operations(recwarn: pytest.WarningsRecorder) -> None:
    class Warns(Late):
        def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
            warnings.warn("an owner's warning", stacklevel=1)
            return super().losses(output, y)

    trainer, base = made(Warns), initial_model(Warns(), 1)[1]
    train(trainer, base, ADAM, measure=False)
    shown = len(recwarn.list)
    for _ in range(3):
        train(trainer, base, ADAM)
    assert 0 < shown == len(recwarn.list)
    assert {str(one.message) for one in recwarn.list} == {"an owner's warning"}
