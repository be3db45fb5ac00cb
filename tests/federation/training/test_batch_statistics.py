"""Models that normalise with the statistics of a minibatch: small last minibatches, and where one sample is left."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedpareto
from federation.spec.computation import Descend
from federation.spec.run_spec import RunSpec
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Pool, Splits, Task, initial_model
from federation.training.plans import TrainingPlan
from federation.training.reasons import texts_of
from federation.training.stored import with_stored
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import training_seed
from federation.vectors import Vector
from federation.work.base import WorkError
from fedpareto.simulation import SimulationError
from fedpareto.simulation.local import Loop, Turn
from fedpareto.simulation.population import populate, try_smallest
from fedpareto.simulation.stacked import Stacked, why_not_stacked
from tests.command_lines import failure
from tests.trained import jacobian, train
from worker.service import prepare_offers

pytestmark = pytest.mark.filterwarnings(r"ignore:std\(\)")  # of one sample, by `Standard`
SGD = LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
NOTHING = Dataset(torch.empty(0, 6), torch.empty(0, dtype=torch.int64))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Normed(Task):
    """A small network with a layer that normalises. It notes how many samples pass through it in training."""

    name = "normed"
    unlabelled = 0

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def norm(self) -> nn.Module:
        return nn.BatchNorm1d(8)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), self.norm(), nn.Tanh(), nn.Linear(8, 2))

    def pool(self, source: DataSource) -> Pool:
        data = splits(57).train
        return Pool(data.x, data.y)

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        if output.requires_grad:
            self.sizes.append(len(y))
        return {"loss": functional.cross_entropy(output, y)}


class Layered(Normed):
    """Normalises each sample alone."""

    def norm(self) -> nn.Module:
        return nn.LayerNorm(8)


class Standard(nn.Module):
    """Normalises with the statistics of the minibatch in training, without a layer of PyTorch and without buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3) if self.training else x


class Standardised(Normed):
    def norm(self) -> nn.Module:
        return Standard()


class Functional(Normed):
    """As `Standardised`, but a single sample raises an exception."""

    def norm(self) -> nn.Module:
        class Norm(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return functional.batch_norm(x, None, None, training=True) if self.training else x

        return Norm()


class Frozen(Normed):
    """A pretrained BatchNorm, which its model keeps in evaluation mode."""

    def norm(self) -> nn.Module:
        class Norm(nn.BatchNorm1d):
            def train(self, mode: bool = True) -> "Norm":
                return super().train(False)

        return Norm(8)


class Unlabelled(Layered):
    """The first sample has no label that counts, so alone it has no finite loss."""

    unlabelled = 1


class Drawing(Normed):
    """Its code draws random numbers of Python and NumPy."""

    def augment(self, x: Tensor) -> Tensor:
        return x + random.random() * np.random.random()


def splits(samples: int, unlabelled: int = 0) -> Splits:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
    y = (x.sum(1) > 0).long()
    y[:unlabelled] = -100  # which the cross-entropy ignores
    return Splits(Dataset(x, y), NOTHING, NOTHING)


def made(kind: type[Normed], samples: int = 51) -> tuple[TorchTrainer, Vector]:
    task = kind()
    return TorchTrainer(task, splits(samples, task.unlabelled), "cpu", 1), initial_model(task, 1)[1]


def formed(trainer: TorchTrainer, base: Vector, sgd: LocalSgd = SGD, **given: Any) -> list[int]:
    """The samples that pass through the model at a time in a training; not those of the trial before it."""
    seen: Any = trainer.task.sizes  # type: ignore[attr-defined]
    trainer._evens(sgd, given.get("frozen", ()))
    seen.clear()
    train(trainer, base, sgd, measure=False, **given)
    return list(seen)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Normed, [10, 10, 10, 10, 6, 5]),
        (Standardised, [10, 10, 10, 10, 6, 5]),
        (Functional, [10, 10, 10, 10, 6, 5]),
        (Layered, [10, 10, 10, 10, 10, 1]),
        (Frozen, [10, 10, 10, 10, 10, 1]),
        (Unlabelled, [10, 10, 10, 10, 10, 1]),
    ],
)
def test_a_model_with_batch_statistics_and_no_other_one_trains_on_two_halves_in_place_of_a_small_remainder(
    kind: type[Normed], sizes: list[int]
) -> None:
    trainer, base = made(kind)
    assert formed(trainer, base) == sizes


def test_a_training_that_freezes_the_statistics_keeps_its_minibatches() -> None:
    trainer, base = made(Normed)
    frozen = (slice(trainer._parameters, len(base)),)
    assert formed(trainer, base, frozen=frozen) == [10, 10, 10, 10, 10, 1]
    assert formed(trainer, base) == [10, 10, 10, 10, 6, 5]


def test_parts_of_a_minibatch_are_evened_out_too() -> None:
    trainer, base = made(Normed, 21)
    assert formed(trainer, base, LocalSgd(epochs=1, batch_size=10, micro_batch=9, learning_rate=0.1)) == [5, 5, 6, 5]
    assert formed(trainer, base, LocalSgd(epochs=1, batch_size=10, micro_batch=4, learning_rate=0.1)) == [
        4, 4, 2, 4, 2, 3, 2,
    ]  # fmt: skip


class Items(torch.utils.data.Dataset[Any]):
    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.data.x[index], self.data.y[index]


def test_samples_that_are_not_in_memory_give_the_same_bytes() -> None:
    trainer, base = made(Normed)
    task = Normed()
    stored = TorchTrainer(task, with_stored(Splits(*map(Items, splits(51)))), "cpu", 1)
    rows = [train(each, base, SGD, measure=False).rows["loss"].tobytes() for each in (trainer, stored)]
    assert rows[0] == rows[1]


def test_the_first_minibatch_of_gradients_is_that_of_the_training() -> None:
    trainer, base = made(Standardised, 11)
    step = LocalSgd(steps=1, batch_size=10, learning_rate=1.0)
    trained = train(trainer, base, step, measure=False).rows["loss"]
    seen: Any = trainer.task.sizes  # type: ignore[attr-defined]
    gradient = jacobian(trainer, base, 10, measure=False).rows["loss"]
    assert seen[-2:] == [6, 6]
    np.testing.assert_allclose(gradient, trained, rtol=0, atol=1e-6)


def test_stacked_clients_have_the_minibatches_of_workers() -> None:
    names = ("ann", "ben")
    task, given = Standardised(), {name: splits(count) for name, count in zip(names, (51, 51), strict=True)}
    base = initial_model(task, 1)[1]
    work = Descend(sgd=SGD, targets={"loss": {"loss": 1.0}}, measure=False)
    turn = Turn(0, 0, lambda: False)
    one, two = (kind(task, given, "cpu").compute(base, dict.fromkeys(names, work), turn) for kind in (Loop, Stacked))
    for name in names:
        found, expected = two[name], one[name]
        assert not isinstance(found, Exception)
        assert not isinstance(expected, Exception)
        np.testing.assert_allclose(found.rows["loss"], expected.rows["loss"], rtol=0, atol=1e-6)


def test_clients_whose_evaluation_would_mix_their_samples_are_not_stacked() -> None:
    class Unkept(Normed):
        def norm(self) -> nn.Module:
            return nn.BatchNorm1d(8, track_running_stats=False)

    why = why_not_stacked(Unkept(), {"ann": splits(51), "ben": splits(51)}, "cpu", SGD)
    assert why == "its BatchNorm would mix the samples of clients that are evaluated together"
    trainer, base = made(Unkept)
    assert formed(trainer, base) == [10, 10, 10, 10, 6, 5]


def test_looking_for_batch_statistics_changes_no_random_number_and_no_buffer() -> None:
    trainer, _ = made(Drawing)

    def state() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(), *buffers()]

    def buffers() -> list[Any]:
        return [buffer.tolist() for buffer in trainer._model.buffers()]

    before = state()
    assert trainer._needs_two(())
    assert state() == before


def plan(sgd: LocalSgd = SGD, samples: int = 51) -> TrainingPlan:
    return TrainingPlan(sgd=sgd, weights={"loss": 1.0}, seed=training_seed(0, 0, "a"), samples=samples)


def test_a_trainer_of_ones_own_gets_even_minibatches_if_it_asks() -> None:
    assert [len(batch) for batch in plan().minibatches()] == [10, 10, 10, 10, 10, 1]
    batches = list(plan().minibatches(even=True))
    assert [len(batch) for batch in batches] == [10, 10, 10, 10, 6, 5]
    assert sorted(np.concatenate(batches).tolist()) == list(range(51))
    steps = plan(LocalSgd(steps=7, batch_size=10, learning_rate=0.1)).minibatches(even=True)
    assert [len(batch) for batch in steps] == [10, 10, 10, 10, 6, 5, 10]


@pytest.mark.parametrize(
    ("kind", "samples", "changes", "message"),
    [
        (Normed, 1, {}, "a minibatch would have one sample (1 training sample, train.batch_size = 10),"),
        (Normed, 3, {"batch_size": 2}, "a minibatch would have one sample (3 training samples, train.batch_size = 2),"),
        (
            Standardised,
            5,
            {"batch_size": 1},
            "and the model trains on two or more only, as models with BatchNorm do: ",
        ),
        (Functional, 12, {"micro_batch": 1}, "part of a minibatch would have one sample (12 training samples, train."),
        (Functional, 12, {"micro_batch": 1}, "do: use another train.micro_batch, more samples, or a model with"),
        (Normed, 1, {}, "do: use more samples, or a model with GroupNorm or LayerNorm"),
    ],
)
def test_where_a_single_sample_is_left_the_decline_names_the_remedy(
    kind: type[Normed], samples: int, changes: dict[str, Any], message: str
) -> None:
    trainer, base = made(kind, samples)
    with pytest.raises(WorkError, match=re.escape(message)) as caught:
        train(trainer, base, SGD.changed(**changes))
    assert caught.value.reason == "batch-of-one"
    assert message in texts_of(caught.value).wire
    full = LocalSgd(steps=1, batch_size=2, learning_rate=0.1)
    if samples > 1:  # a run whose steps end before
        assert np.isfinite(train(trainer, base, full).rows["loss"]).all()


@pytest.mark.parametrize("kind", [Layered, Frozen])
def test_a_model_that_trains_on_one_sample_is_not_declined(kind: type[Normed]) -> None:
    trainer, base = made(kind, 1)
    assert formed(trainer, base) == [1]


SPEC = """
name = "few"
task = "{task}"
rounds = 1
train.batch_size = {size}
selection.minimum = 1
simulation = {{ clients = 1 }}
"""
MODULE = __name__


def specified(directory: Path, size: int, *, task: str = "Standardised") -> tuple[str, str]:
    """The task and the specification of a run with minibatches of this size; the client has 45 training samples."""
    path = directory / "few.toml"
    path.write_text(SPEC.format(task=f"{MODULE}:{task}", size=size))
    return f"{MODULE}:{task}", str(path)


@pytest.mark.full
def test_a_rehearsal_a_start_and_a_simulation_try_the_smallest_minibatch_first(tmp_path: Path) -> None:
    task, spec = specified(tmp_path, 1)
    options = ["--task", task, "--device", "cpu", "--set", f"spec={spec}"]
    remedy = "a minibatch would have one sample (45 training samples, train.batch_size = 1)"
    assert failure("worker", "run", "--rehearse", *options).message.startswith(remedy)
    with pytest.raises(SimulationError, match=rf"^client-000: {re.escape(remedy)}.*: use another train\.batch_size"):
        fedpareto.simulate(Path(spec), threads=1)
    offers, _ = prepare_offers([task], DataSource(), device="cpu", threads=1)
    assert offers[task].samples == 45
    with pytest.raises(WorkError, match=re.escape(remedy)):
        prepare_offers([task], DataSource(), device="cpu", threads=1, run=RunSpec.parse(Path(spec).read_text()))
    _, even = specified(tmp_path, 9)
    assert fedpareto.simulate(Path(even), threads=1).state == "COMPLETED"


class Choosy(Layered):
    """Needs three samples at a time."""

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        if output.requires_grad and len(y) < 3:
            raise ValueError("three neighbours are needed")
        return super().losses(output, y)


def test_the_number_of_samples_is_named_where_code_fails_on_the_smallest_minibatch(tmp_path: Path) -> None:
    task, spec = specified(tmp_path, 43, task="Choosy")
    message = rf"task '{task}': a training pass on 2 samples, the smallest minibatch of the run, failed: ValueError"
    assert re.match(message, failure("worker", "run", "--rehearse", "--task", task, "--set", f"spec={spec}").message)
    with pytest.raises(SimulationError, match=rf"^client-000: {message}"):
        fedpareto.simulate(Path(spec), threads=1)


def test_a_worker_says_if_a_specification_is_for_another_task(tmp_path: Path) -> None:
    task, spec = specified(tmp_path, 10)
    refused = failure("worker", "run", "--task", "digits", "--set", f"spec={spec}")
    assert f"is for the task {task}, and this worker offers digits: add --task {task}, or" in refused.message


def test_attackers_and_members_that_a_run_does_not_select_need_not_train(tmp_path: Path) -> None:
    text = SPEC.format(task=f"{MODULE}:Standardised", size=10).replace("clients = 1", "clients = 20")
    run = RunSpec.parse(text)
    task = Standardised()
    given = populate(task, run, DataSource())
    assert 1 in given.samples.values()
    with pytest.raises(SimulationError, match=r"client-\d+: a minibatch would have one sample \(1 training"):
        try_smallest(task, run, given, "cpu")
    several = [name for name, count in given.samples.items() if count > 1]
    try_smallest(task, RunSpec.parse(text + f"selection.members = {several}\n"), given, "cpu")
    noisy = RunSpec.parse(text + "privacy.sample_noise = 1.0\nprivacy.sample_clip = 1.0\n")
    try_smallest(task, noisy, given, "cpu")
