"""The built-in trainer in two processes: the same result as in one, and what happens when one ends.

`make test` forks the two; torchrun, which imports PyTorch three times, starts them in `make test-full` as well.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from federation.spec.computation import Ability
from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Loading, Part, Task, initial_model, task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.external import ExternalTrainer
from federation.training.ranks import Ranks
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.vectors import Vector
from federation.work.base import WorkError
from fedpareto.cli.member.trainer_choices import torchrun
from tests.harness import federation, wait_for
from tests.paths import OWNERS_CODE, ROOT
from tests.trained import jacobian, train

SOURCE = DataSource(part=Part(0, 8))
FORKS = shlex.join([sys.executable, str(ROOT / "tests" / "programs" / "two_ranks.py")])
WORK = LocalSgd(epochs=2, batch_size=25, learning_rate=0.1, momentum=0.5)  # the second process has 12 of 25 samples


@pytest.fixture(scope="module")
def digits() -> Iterator[Task]:
    """Digits, which meet an operation without a deterministic kernel in mixed precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(OWNERS_CODE)
        patch.setenv("PYTHONPATH", str(OWNERS_CODE), prepend=os.pathsep)  # the processes read the task, too
        yield task("unpooled_task:Rounded")


@pytest.fixture(scope="module")
def base(digits: Task) -> Vector:
    return initial_model(digits, 1)[1]


@pytest.fixture(scope="module")
def alone(digits: Task) -> Trainer:
    return TorchTrainer(digits, digits.load(SOURCE), "cpu", 1)


@pytest.fixture(scope="module", params=["forks", pytest.param("torchrun", marks=pytest.mark.full)])
def two(request: pytest.FixtureRequest, digits: Task) -> Iterator[ExternalTrainer]:
    command = FORKS if request.param == "forks" else torchrun(2, "", ())
    with closing(ExternalTrainer(digits, SOURCE, "cpu", 1, command=command)) as started:
        yield started


def ranks(trainer: ExternalTrainer) -> list[psutil.Process]:
    """The processes that train, in the order of their ranks: they are started in this order."""
    assert trainer._process is not None
    found = psutil.Process(trainer._process.popen.pid).children(recursive=True)
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def same(found: Vector, expected: Vector, close: float = 1e-6) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=close * float(np.abs(expected).max()))


def test_two_processes_come_to_the_result_of_one(two: ExternalTrainer, alone: Trainer, base: Vector) -> None:
    assert len(ranks(two)) == 2
    assert two.device == "2 x cpu"
    expected, found = (train(trainer, base, WORK) for trainer in (alone, two))
    same(found.rows["loss"], expected.rows["loss"])
    assert (found.losses, found.samples) == (expected.losses, expected.samples)
    assert train(two, base, WORK).rows["loss"].tobytes() == found.rows["loss"].tobytes()


@pytest.mark.full
@pytest.mark.parametrize(
    "work",
    [
        LocalSgd(steps=3, batch_size=1, learning_rate=0.1),  # nothing is left for the second process
        LocalSgd(
            steps=3, batch_size=0, learning_rate=0.01, optimizer="adam", epsilon=1e-2, clip_norm=0.1, micro_batch=10
        ),
    ],
)
def test_options_of_the_run_hold_in_two_processes(
    two: ExternalTrainer, alone: Trainer, base: Vector, work: LocalSgd
) -> None:
    same(train(two, base, work).rows["loss"], train(alone, base, work).rows["loss"])


@pytest.mark.full
@pytest.mark.parametrize(("precision", "close"), [("float32", 1e-6), ("bf16", 0.05)])
def test_schedules_decay_and_frozen_parameters_hold_in_two_processes(
    two: ExternalTrainer, alone: Trainer, base: Vector, precision: Any, close: float
) -> None:
    sgd = LocalSgd(
        steps=6, batch_size=25, learning_rate=0.01, optimizer="adamw", epsilon=1e-2, weight_decay=0.1, proximal_mu=0.5,
        step_schedule="cosine", step_warm_up=2, precision=precision,
    )  # fmt: skip
    frozen = (slice(4096, 4160),)  # hidden.bias
    found, expected = (train(trainer, base, sgd, frozen=frozen).rows["loss"] for trainer in (two, alone))
    same(found, expected, close)
    assert not found[4096:4160].any()
    assert found[:4096].any()


@pytest.mark.full
def test_the_statistics_of_the_first_process_are_kept_and_samples_may_be_read_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(OWNERS_CODE)  # this process reads the task, too
    monkeypatch.setenv("PYTHONPATH", str(OWNERS_CODE), prepend=os.pathsep)
    learned, source = task("normed_task:Normed"), replace(SOURCE, loading=Loading(1))
    start, rows = initial_model(learned, 1)[1], []
    for given in (SOURCE, source):
        with closing(ExternalTrainer(learned, given, "cpu", 1, command=torchrun(2, "", ()))) as trainer:
            rows.append(train(trainer, start, WORK).rows["loss"])
    assert rows[0].tobytes() == rows[1].tobytes()
    layout = initial_model(learned, 1)[0]
    after = layout.split(start - rows[0])
    assert after["norm.num_batches_tracked"] == WORK.count(len(learned.load(SOURCE).train))
    assert all(tensor.any() for tensor in layout.split(rows[0]).values())


def test_gradients_are_those_of_the_whole_minibatch(two: ExternalTrainer, alone: Trainer, base: Vector) -> None:
    expected, found = (jacobian(trainer, base, 25).rows["loss"] for trainer in (alone, two))
    same(found, expected)


@pytest.mark.full  # that of the shares of processes is `tests/federation/work/test_minibatch_sizes.py`
def test_no_process_gets_a_single_sample_of_a_model_with_batch_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(OWNERS_CODE), prepend=os.pathsep)
    monkeypatch.syspath_prepend(OWNERS_CODE)
    learned = task("normed_task:Normed")
    start, work = initial_model(learned, 1)[1], LocalSgd(steps=3, batch_size=3, learning_rate=0.1)
    expected = train(TorchTrainer(learned, learned.load(SOURCE), "cpu", 1), start, work).rows["loss"]
    with closing(ExternalTrainer(learned, SOURCE, "cpu", 1, command=FORKS)) as started:
        same(train(started, start, work).rows["loss"], expected)


def test_all_processes_notice_a_divergence_and_a_stop_and_go_on(
    two: ExternalTrainer, alone: Trainer, base: Vector
) -> None:
    with pytest.raises(TrainingDiverged):
        train(two, base, LocalSgd(steps=60, batch_size=10, learning_rate=1e30), measure=False)
    shares: list[float] = []
    with pytest.raises(TrainingStopped):
        train(two, base, LocalSgd(steps=10**6, batch_size=10, learning_rate=1e-6), measure=False,
              progress=shares.append, stopped=lambda: bool(shares))  # fmt: skip
    same(train(two, base, WORK).rows["loss"], train(alone, base, WORK).rows["loss"])


def test_noise_on_samples_is_for_one_process(two: ExternalTrainer) -> None:
    assert two.abilities - {Ability.REPEATABLE} == set(Ability) - {Ability.NOISE, Ability.REPEATABLE}
    with pytest.raises(WorkError, match="cannot add noise", check=lambda error: error.reason == "ability:noise"):
        two.check_private()


@pytest.mark.full
def test_a_process_without_samples_begins_again_when_another_one_meets_an_operation_without_a_deterministic_kernel(
    two: ExternalTrainer, alone: Trainer, base: Vector
) -> None:
    nothing_for_the_second = LocalSgd(steps=3, batch_size=1, learning_rate=0.1, precision="bf16")
    same(train(two, base, nothing_for_the_second).rows["loss"], train(alone, base, nothing_for_the_second).rows["loss"])
    assert Ability.REPEATABLE not in two.abilities
    same(jacobian(two, base, 25).rows["loss"], jacobian(alone, base, 25).rows["loss"])


# The last test of the shared processes: it ends them. In the long tests it also starts them again.
@pytest.mark.full
@pytest.mark.parametrize("rank", [1, 0])
def test_a_process_that_dies_ends_the_training_with_a_reason_and_the_next_one_starts_anew(
    two: ExternalTrainer, base: Vector, rank: int
) -> None:
    train(two, base, WORK)  # they are there
    before, endless = ranks(two), LocalSgd(steps=10**6, batch_size=10, learning_rate=1e-6)

    def kill(share: float) -> None:
        before[rank].kill()

    with pytest.raises(WorkError, check=lambda error: error.reason == "trainer:died"):
        train(two, base, endless, measure=False, progress=kill)
    psutil.wait_procs(before, 20)
    assert not any(process.is_running() for process in before)
    if rank == 0:
        assert np.isfinite(train(two, base, WORK).rows["loss"]).all()


# ---- a worker


@pytest.mark.full
def test_the_devices_of_the_processes_are_a_gpu_each_or_the_cpu() -> None:
    second = Ranks(1, 2)
    assert second.device("cpu") == "cpu"
    with pytest.raises(ValueError, match="device 'cuda:1' is for one process: with 2 processes, use auto, cpu or cuda"):
        second.device("cuda:1")
    if torch.cuda.device_count() < 2:
        with pytest.raises(ValueError, match="2 processes need a GPU each, and there are"):
            second.device("cuda")
    assert Ranks.of({}) is None
    assert Ranks.of({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1", "RANK": "0"}) is None
    assert Ranks.of({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "RANK": "2"}) == Ranks(2, 3)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_that_ends_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    with federation(tmp_path) as real:
        real.serve()
        real.join("clinic")
        worker = real.work("clinic", "--set", "part=1/8", "--device", "cpu", "--set", "processes=2")
        real.attending("clinic")
        children = psutil.Process(worker.popen.pid).children(recursive=True)
        assert len([child for child in children if "RANK" in child.environ()]) >= 2
        text = 'task = "digits"\nrounds = 1\ntrain = { steps = 1000000, learning_rate = 1e-6, measure = false }\n'
        real.submit("endless", text)
        wait_for(lambda: "training" in worker.text, "the training")
        os.kill(worker.popen.pid, number)
        worker.popen.wait(30)
        gone, alive = psutil.wait_procs(children, 30)
        assert not alive
        assert len(gone) == len(children)


@pytest.mark.full
def test_a_trainer_of_the_members_own_is_refused_in_two_processes(digits: Task, tmp_path: Path) -> None:
    (tmp_path / "owned.py").write_text(
        "from federation.training.torch_trainer import TorchTrainer\nclass Owned(TorchTrainer):\n    pass\n"
    )
    with pytest.raises(WorkError, match=r"Owned works in one process; there are 2 \(processes\)"):
        ExternalTrainer(digits, SOURCE, "cpu", 1, command=torchrun(2, "owned:Owned", [str(tmp_path)]))
