"""Samples that are not in memory: the same results, only what is needed is read, and exact errors."""

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from federation.attacks import AttackError, parse_attack
from federation.process.sockets import SocketPathTooLong, short_enough
from federation.spec.computation import MeasureAlong, PrivateSgd
from federation.spec.run_spec import RunSpec
from federation.spec.train_section import LocalSgd
from federation.tasks import DataError, Dataset, DataSource, Loading, Part, Splits, Task, TaskError, initial_model, task
from federation.tasks.census import census
from federation.tasks.digits import Digits
from federation.training.shared_memory import pass_bytes
from federation.training.stored import SampleReader, with_stored
from federation.training.torch_trainer import TorchTrainer
from federation.vectors import Vector
from federation.work.base import WorkError
from fedpareto.face.simulated import simulate
from fedpareto.simulation.population import populate
from tests.command_lines import failure
from tests.few import few
from tests.trained import jacobian, train
from worker.service import prepare_offers

SOURCE = DataSource(part=Part(0, 8))
WORK = LocalSgd(epochs=2, batch_size=24, learning_rate=0.1)


class Stored(TorchDataset[Any]):
    """Samples one by one. It remembers which were read, and spoils one of them."""

    def __init__(self, data: Dataset, spoiled: int = -1, how: str = "") -> None:
        self.data, self.spoiled, self.how = data, spoiled, how
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.read.append(index)
        x, y = self.data.x[index], int(self.data.y[index])
        if index == self.spoiled:
            match self.how:
                case "raise":
                    raise OSError("scan-7.dcm is damaged")
                case "nan":
                    return torch.full_like(x, torch.nan), y
                case "shape":
                    return x[:-1], y
                case "kill":
                    psutil.Process().kill()
                case "wait":
                    threading.Event().wait()
        return x.numpy(), y


class StoredDigits(Digits):
    """The digits, each read when it is needed."""

    def load(self, source: DataSource) -> Splits:
        return Splits(*(Stored(split) for split in super().load(source)))


def made(spoiled: int = -1, how: str = "", workers: int = 0) -> TorchTrainer:
    """A trainer whose training split has a spoiled sample."""
    digits = task("digits")
    held = digits.load(SOURCE)
    splits = Splits(Stored(held.train, spoiled, how), Stored(held.validation), Stored(held.test))
    return TorchTrainer(digits, with_stored(splits, Loading(workers)), "cpu", 1)


@pytest.fixture(scope="module")
def base() -> Vector:
    return initial_model(task("digits"), 1)[1]


@pytest.fixture(scope="module")
def held() -> TorchTrainer:
    digits = task("digits")
    return TorchTrainer(digits, digits.load(SOURCE), "cpu", 1)


@pytest.fixture(scope="module", params=[0, 2])
def stored(request: pytest.FixtureRequest) -> Iterator[TorchTrainer]:
    trainer = made(workers=request.param)
    yield trainer
    trainer.close()


def test_results_are_those_of_samples_in_memory_to_the_last_byte(
    stored: TorchTrainer, held: TorchTrainer, base: Vector
) -> None:
    more = (LocalSgd(steps=steps, batch_size=size, learning_rate=0.1) for steps, size in ((3, 10**6), (13, 24)))
    for work in (WORK, *more):
        found, expected = (train(trainer, base, work) for trainer in (stored, held))
        assert found.rows["loss"].tobytes() == expected.rows["loss"].tobytes()
        assert (found.losses, found.metrics, found.samples) == (expected.losses, expected.metrics, expected.samples)
    assert stored.measure(base) == held.measure(base)
    assert jacobian(stored, base, 24).rows["loss"].tobytes() == jacobian(held, base, 24).rows["loss"].tobytes()
    along = MeasureAlong(direction=np.ones_like(base), steps=(0.1, 0.2), names=("step/0", "step/1"))
    first, second = (one.compute(base, along, seed=0, round=0, client_id="a").metrics for one in (stored, held))
    assert first == second


def test_dropout_draws_the_same_numbers(base: Vector) -> None:
    class Dropping(Digits):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))

    learned = Dropping()
    learned.name = "dropping"
    splits = learned.load(SOURCE)
    start = initial_model(learned, 1)[1]
    rows = [
        train(TorchTrainer(learned, data, "cpu", 1), start, WORK).rows["loss"].tobytes()
        for data in (splits, with_stored(Splits(*map(Stored, splits))))
    ]
    assert rows[0] == rows[1]


def test_only_the_samples_of_the_minibatches_are_read(base: Vector) -> None:
    trainer = made()
    data = trainer.data.train._reader._samples._splits["train"]
    data.read.clear()
    train(trainer, base, LocalSgd(steps=3, batch_size=7, learning_rate=0.1), measure=False)
    assert len(data.read) == len(set(data.read)) == 21
    jacobian(trainer, base, 7, measure=False, round=1)
    assert len(data.read) == 28
    trainer.try_out()
    assert data.read[28:] == [*range(8), len(data) - 1]


@pytest.mark.parametrize("workers", [0, 1])
@few("raise")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "sample 5 of the train split cannot be read: OSError: scan-7.dcm is damaged"),
        ("nan", "sample 5 of the train split has features that are not finite"),
        (
            "shape",
            "sample 5 of the train split has features and labels of the shapes (63,) and (); those of sample 0 are "
            "(64,) and ()",
        ),
    ],
)
def test_a_sample_that_cannot_be_used_is_named(how: str, message: str, workers: int, base: Vector) -> None:
    trainer = made(5, how, workers)
    for work in (lambda: train(trainer, base, WORK), lambda: trainer.measure(base), trainer.try_out):
        with pytest.raises(DataError, check=lambda error: str(error).startswith(message)):
            work()
    assert trainer.measure(base, ("test",))["test/samples"] == len(trainer.data.test)
    trainer.close()


def test_a_first_sample_that_cannot_be_read_is_named_at_the_start() -> None:
    with pytest.raises(DataError, match=r"sample 0 of the train split cannot be read: OSError: scan-7\.dcm is damaged"):
        made(0, "raise")


def test_a_reading_process_that_ends_is_an_error_and_the_next_work_has_new_ones(base: Vector) -> None:
    trainer = made(5, "kill", 1)
    with pytest.raises(DataError, match="a process that reads the data has ended: DataLoader worker"):
        train(trainer, base, WORK)
    assert trainer.measure(base, ("test",))["test/samples"] == len(trainer.data.test)
    (reader,) = trainer.data.test._reader._loader._iterator._workers
    trainer.close()
    psutil.wait_procs([process for process in psutil.Process().children(True) if process.pid == reader.pid], 20)
    assert not psutil.pid_exists(reader.pid)


def test_reading_processes_that_give_nothing_end_the_pass(caplog: pytest.LogCaptureFixture) -> None:
    reader = SampleReader({"test": Stored(task("digits").load(SOURCE).test, 5, "wait")}, Loading(1), silence=0.1)
    with pytest.raises(
        DataError, match=r"given nothing for 0\.1 seconds; the next batch has 2 samples of the test split"
    ):
        next(reader.read([[("test", 5), ("test", 6)]], torch.device("cpu")))
    assert reader._loader is None
    assert not caplog.records, "shared memory is not the cause"


class Kinds(TorchDataset[Any]):
    """Samples of a type that NumPy does not have."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.full((2, 3), index, dtype=torch.bfloat16), index % 2 == 0


def test_batches_that_go_through_pipes_are_those_of_the_data_set() -> None:
    reader = SampleReader({"train": Kinds()}, Loading(1))
    reader._piped = True
    x, y = next(reader.read([[("train", 3), ("train", 0)]], torch.device("cpu")))
    reader.close()
    assert x.equal(torch.stack([Kinds()[3][0], Kinds()[0][0]]))
    assert (x.dtype, y.dtype, y.tolist()) == (torch.bfloat16, torch.bool, [False, True])


@pytest.mark.parametrize(
    ("batch", "batches", "processes", "most"),
    [(64, 100, 2, 5 * (3_145_728 + 4096)), (1, 2, 4, 2 * (49_152 + 4096))],
)
def test_a_pass_takes_memory_for_two_batches_of_each_process_and_one(
    batch: int, batches: int, processes: int, most: int
) -> None:
    assert pass_bytes((49_152, 8), batch, batches, processes) == most


def test_a_directory_for_temporary_files_with_a_long_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(SocketPathTooLong, match="set TMPDIR to a directory") as caught, short_enough():
        socket.socket(socket.AF_UNIX).bind(str(tmp_path / ("x" * 100)))
    assert caught.value.filename == tempfile.gettempdir()


def test_a_minibatch_of_the_whole_split_is_declined(base: Vector) -> None:
    trainer = made()
    whole = LocalSgd(epochs=1, batch_size=0, learning_rate=0.1)
    works: list[Callable[[], object]] = [lambda: train(trainer, base, whole), lambda: jacobian(trainer, base, 0)]
    for work in works:
        with pytest.raises(WorkError, match=r"whole train split \(batch_size = 0\), and this worker's") as caught:
            work()
        assert caught.value.reason == "whole-split"


def test_samples_that_are_not_in_memory_are_trained_with_noise(base: Vector) -> None:
    pytest.importorskip("opacus", reason="needs fedpareto[dp]")
    work = LocalSgd(steps=2, batch_size=20, learning_rate=0.1)
    assert train(made(), base, work, private=PrivateSgd(noise=1.0, clip=1.0), measure=False).rows["loss"].any()


def test_a_worker_offers_a_task_with_such_data_and_reads_it_as_its_owner_wants(base: Vector) -> None:
    name = f"{__name__}:StoredDigits"
    offers, _ = prepare_offers([name], DataSource(part=Part(0, 8), loading=Loading(1)), device="cpu", threads=1)
    trainer = offers[name]
    assert trainer.data.train._reader._loading == Loading(1)
    assert trainer.samples == len(task("digits").load(SOURCE).train)
    trainer.close()
    with pytest.raises(AttackError, match=f"label-flip changes training data, and that of {name} is not in memory"):
        prepare_offers([name], SOURCE, device="cpu", threads=1, attack=parse_attack("label-flip"))


class Asked(Digits):
    """Says how its owner wants samples to be read."""

    def load(self, source: DataSource) -> Splits:
        raise DataError(str(source.loading))


@pytest.mark.parametrize(
    ("options", "loading"),
    [([], Loading()), (["--set", "loader_workers=2"], Loading(2)), (["--set", "pin_memory=true"], Loading(pin=True))],
)
def test_the_owner_says_how_samples_are_read(options: list[str], loading: Loading) -> None:
    assert failure("worker", "run", "--rehearse", "--task", f"{__name__}:Asked", *options).message == str(loading)


SPEC = "name = 'stored'\nrounds = 2\nsimulation.clients = 3\ntrain = { batch_size = 50 }\n"


@pytest.mark.full
def test_a_simulation_of_such_data_is_that_of_data_in_memory_and_is_not_stacked(tmp_path: Path) -> None:
    held, stored = (
        simulate(f"{SPEC}task = '{name}'\n", backend="loop") for name in ("digits", f"{__name__}:StoredPool")
    )
    assert held.model.tobytes() == stored.model.tobytes()
    with pytest.raises(ValueError, match="cannot be trained stacked: its data is not in memory"):
        simulate(f"{SPEC}task = '{__name__}:StoredPool'\n", backend="stacked")
    flipped = f"{SPEC}task = 'digits'\nsimulation.attackers = 1\nsimulation.attack = 'label-flip'\n"
    with pytest.raises(AttackError, match=r"label-flip changes training data, and that of .* is not in memory"):
        populate(StoredPool(), RunSpec.parse(flipped.encode()), DataSource())


class StoredPool(Task):
    """The digits as a task that can only load."""

    def model(self) -> nn.Module:
        return Digits().model()

    def load(self, source: DataSource) -> Splits:
        return Splits(*(Stored(split) for split in Digits().load(source)))


def test_the_sizes_of_such_data_are_shown_without_classes() -> None:
    counted = census(StoredPool(), DataSource(), Part(0, 3), tried=True)
    assert counted.sizes.sum() == len(task("digits").pool(DataSource()))
    assert not len(counted.classes)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_what_has_no_length_is_refused() -> None:
    held = task("digits").load(SOURCE)
    with pytest.raises(
        DataError, match="the train split is a Stream; it must be a Dataset of fedpareto or a map-style"
    ):
        with_stored(Splits(Stream(), held.validation, held.test))


def test_an_exception_of_the_tasks_code_on_such_data_names_the_samples() -> None:
    class Wrong(Digits):
        def losses(self, output: Any, y: Any) -> Any:
            raise KeyError("diagnosis")

    learned = Wrong()
    learned.name = "wrong"
    splits = Splits(*map(Stored, learned.load(SOURCE)))
    with pytest.raises(TaskError, match="its first 8 samples and the last one"):
        TorchTrainer(learned, splits, "cpu", 1).try_out()
