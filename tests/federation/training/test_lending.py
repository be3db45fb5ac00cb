"""Models and losses that write into what they are given have the numbers of code that copies first."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federation.spec.computation import Descend, Differentiate, Measure
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, Splits, Task, initial_model
from federation.training.lending import Lending
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.work.base import Result
from fedpareto.simulation.local import LocalWork, Loop, Turn
from fedpareto.simulation.stacked import Stacked
from tests.few import few

X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()


class Changed(nn.Module):
    """A linear model after a change of its input."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(self.change(x))
        return output


class Careful(Task):
    """Copies all that it is given, before `features`, `noise`, `labels` and `logits` write into it."""

    copies = True
    evaluation_batch = 30

    def own(self, given: Tensor) -> Tensor:
        return given.clone() if self.copies else given

    def model(self) -> nn.Module:
        return Changed(lambda x: self.features(self.own(x)))

    def augment(self, x: Tensor) -> Tensor:
        return self.noise(self.own(x))

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().losses(self.logits(self.own(output)), self.labels(self.own(y)))

    def features(self, x: Tensor) -> Tensor:
        return x

    def noise(self, x: Tensor) -> Tensor:
        return x

    def logits(self, output: Tensor) -> Tensor:
        return output

    def labels(self, y: Tensor) -> Tensor:
        return y


class Shift(Careful):
    def features(self, x: Tensor) -> Tensor:
        return x.sub_(0.1)


class InPlaceFirst(Careful):
    def features(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x, inplace=True)


class PastTheCounter(Careful):
    def features(self, x: Tensor) -> Tensor:
        x.data.mul_(0.5)  # PyTorch does not count it
        return x


class Marks(Careful):
    def labels(self, y: Tensor) -> Tensor:
        y[y == 1] = 0
        return y


class Logits(Careful):
    def logits(self, output: Tensor) -> Tensor:
        if not output.requires_grad:
            output[:, 0] = -5.0  # `correct` is given the same output
        return output


class Now(Careful):
    """Augments half of its minibatches: perhaps not the first one."""

    def noise(self, x: Tensor) -> Tensor:
        return x.add_(torch.randn_like(x)) if torch.rand(()) < 0.5 else x


class Seldom(Careful):
    """Writes into a later batch of an evaluation alone."""

    def labels(self, y: Tensor) -> Tensor:
        if torch.equal(y[:4], Y[60:64]):
            y[y == 1] = 0
        return y


class Slopes(Careful):
    def features(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.requires_grad_().square().sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            return x + x.grad.detach()  # adds up in a tensor that is used again


KINDS = [Shift, InPlaceFirst, PastTheCounter, Marks, Logits, Now, Seldom, Slopes]


def made(kind: type[Careful], *, copies: bool) -> Careful:
    task = kind()
    task.copies = copies
    return task


def results(task: Task, size: int) -> list[Any]:
    split = Dataset(X, Y)
    trainer = TorchTrainer(task, Splits(split, split, split), threads=1)
    model = initial_model(task, 0)[1]
    sgd = LocalSgd(steps=4, batch_size=size, learning_rate=0.1)
    plan = TrainingPlan(sgd=sgd, weights={"loss": 1.0}, seed=0, samples=len(Y))
    return [
        [trainer.train(model, plan).tolist() for _ in range(2)],
        [trainer.gradients(model, size, seed)["loss"].tolist() for seed in range(2)],
        [trainer.evaluate(model, EvaluationPlan(split="train")) for _ in range(3)],
    ]


@pytest.mark.parametrize("size", [0, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_code_that_writes_into_its_input_has_the_results_of_code_that_copies_first(
    kind: type[Careful], size: int
) -> None:
    assert results(made(kind, copies=False), size) == results(made(kind, copies=True), size)
    assert torch.equal(X, torch.randn(90, 4, generator=torch.Generator().manual_seed(0)))


def together(backend: type[Stacked] | type[Loop], task: Task, size: int) -> list[Mapping[str, Any]]:
    """What three clients compute twice, as the backends of a simulation do."""
    parts = [Dataset(x.clone(), y.clone()) for x, y in zip(torch.split(X, 30), torch.split(Y, 30), strict=True)]
    local: LocalWork = backend(task, {f"c{index}": Splits(part, part, part) for index, part in enumerate(parts)}, "cpu")
    sgd = LocalSgd(steps=3, batch_size=size, learning_rate=0.1)
    works = (
        Descend(sgd=sgd, targets={"joint": {"loss": 1.0}}),
        Differentiate(batch_size=size),
        Measure(splits=("test",)),
    )
    base, answers = initial_model(task, 0)[1], list[Mapping[str, Any]]()
    for work in (*works, *works):
        outcomes = local.compute(base, {f"c{index}": work for index in range(3)}, Turn(0, 0, lambda: False))
        assert all(isinstance(outcome, Result) for outcome in outcomes.values()), outcomes
        answers.append(
            {
                name: ({row: values.tolist() for row, values in outcome.rows.items()}, outcome.metrics)
                for name, outcome in outcomes.items()
                if isinstance(outcome, Result)
            }
        )
    return answers


@pytest.mark.parametrize("size", [0, 12])
@few(Marks)
@pytest.mark.parametrize("kind", [Shift, Marks, Logits])
def test_stacked_clients_whose_code_writes_have_the_results_of_code_that_copies_first(
    kind: type[Careful], size: int
) -> None:
    assert together(Stacked, made(kind, copies=False), size) == together(Stacked, made(kind, copies=True), size)


def test_code_that_does_not_write_is_given_the_samples_themselves_after_the_first_batch() -> None:
    places: list[int] = []

    class Reads(Careful):
        copies = False

        def features(self, x: Tensor) -> Tensor:
            places.append(x.data_ptr())
            return x

    results(Reads(), 0)
    own, batch = places[-3], 30 * X[0].nbytes
    assert places[1:10] == [own] * 9  # steps and gradients on the whole split
    assert places[-6:] == [own, own + batch, own + 2 * batch] * 2


def test_one_of_several_processes_always_gives_copies_because_it_could_not_begin_again_alone() -> None:
    lending, x = Lending(Shift(), copies=True), X.clone()
    for _ in range(2):
        with lending.of("training", x) as loan:
            assert loan.give(x).data_ptr() != x.data_ptr()
