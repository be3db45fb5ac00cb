"""Trainers in processes of their own: what they answer, and every way in which they can fail."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from federation.attacks import AttackError, parse_attack
from federation.spec.train_section import LocalSgd
from federation.tasks import DataError, DataSource, Task, initial_model, task
from federation.text import escaped
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.external import ExternalTrainer
from federation.training.reasons import reason_of
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainers import TrainerChoice, trainer_kind
from federation.work.base import WorkError
from fedpareto.cli.member.trial import lines
from tests.federation.training.scene import Start, Three, child, starting
from tests.few import few
from tests.paths import EXAMPLES
from tests.trained import jacobian, train
from tests.waiting import wait_for
from worker.service import prepare_offers
from worker.work.trial import try_round

SGD = LocalSgd(epochs=1, batch_size=0, learning_rate=1.0)
BASE = np.array([1.0, 2.0, 3.0], dtype=np.float32)


class Pair(Three):
    objectives = ("left", "right")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from starting(tmp_path)


def training(trains: str) -> str:
    """What a process does that is asked to train; of the rest it does what it should."""
    return f"if kind == 'train':\n    {trains}\nelse: answer()"


def declined(trainer: ExternalTrainer) -> str:
    with pytest.raises(WorkError) as caught:
        train(trainer, BASE, SGD)
    return f"{caught.value.reason}: {caught.value}"


def test_the_process_trains_and_evaluates_and_tells_its_progress(start: Start) -> None:
    halves = "say(type='progress', id=id, share=0.5); say(bytes(12), type='model', id=id)"
    shares: list[float] = []
    trainer = start(training(halves))
    result = train(trainer, BASE, SGD, progress=shares.append)
    np.testing.assert_array_equal(result.rows["loss"], BASE)
    assert (shares, result.samples, result.losses) == ([0.5], 10, {"loss": 1.0})
    assert trainer.measure(BASE) == {
        "train/samples": 10.0,
        "train/loss": 1.0,
        "train/accuracy": 0.5,
        "validation/samples": 0.0,
        "test/samples": 3.0,
        "test/loss": 1.0,
        "test/accuracy": 0.5,
    }
    assert trainer.abilities == {"repeatable"}


def test_of_a_split_that_the_process_does_not_measure_only_the_samples_are_told(start: Start) -> None:
    ready = "say(type='ready', id=0, samples=samples, measures=['test'])"
    trainer = start(ready=ready)
    assert trainer.measure(BASE) == {
        "train/samples": 10.0,
        "validation/samples": 0.0,
        "test/samples": 3.0,
        "test/loss": 1.0,
        "test/accuracy": 0.5,
    }
    assert train(trainer, BASE, SGD).losses == {}
    with pytest.raises(WorkError, match=r"said it measures other splits than train, validation, test: .*'val'"):
        start(ready=ready.replace("test", "val"))


def test_a_rehearsal_tells_the_memory_of_the_process(start: Start) -> None:
    found = try_round(start())
    assert (found.task, found.samples, found.steps) == ("three", 10, 1)
    assert (found.trainer_bytes or 0) > 1_000_000
    assert "B in each process of the trainer on this machine, without GPUs" in "\n".join(lines(found))


def test_gradients_come_as_one_vector_for_each_objective(start: Start) -> None:
    abilities = "say(type='ready', id=0, samples=samples, abilities=['gradients', 'weights'])"
    scores = "say(type='scores', id=id, scores={'loss/left': 1.0, 'loss/right': None})"
    trainer = start(f"if kind == 'evaluate': {scores}\nelse: answer()", ready=abilities, learned=Pair())
    rows = jacobian(trainer, BASE, 0, measure=False).rows
    assert rows.keys() == {"left", "right"}
    np.testing.assert_array_equal(rows["right"], BASE)
    with pytest.raises(TrainingDiverged, match="no finite loss"):  # null is no number
        train(trainer, BASE, SGD)


@few(
    "os.kill(os.getpid(), 9)",
    "say(type='scores', id=id)",
    "say(b'12345', type='model', id=id)",
    "say(model[:8], type='model', id=id)",
    "say(type='error', id=id, message='no GPU')",
)
@pytest.mark.parametrize(
    ("trains", "says"),
    [
        ("os._exit(3)", "trainer:died: the process of the trainer ended with exit status 3"),
        ("os.kill(os.getpid(), 9)", "trainer:died: the process of the trainer was ended by SIGKILL"),
        ("print('hello', flush=True)", "trainer:protocol: .* sent an invalid message: a line that is not JSON"),
        ("say(1 and b'', type=7)", "trainer:protocol: .* a line that is no JSON object with a type"),
        ("print('[1]', flush=True)", "trainer:protocol: .* a line that is no JSON object with a type"),
        ("say(type='scores', id=id)", "trainer:protocol: .* answered 'scores' where 'model' is needed"),
        (
            "say(type='model', id=id, bytes=10**15)",
            "trainer:protocol: .* 'model' with 1000000000000000 bytes; at most 12",
        ),
        (
            "say(b'12345', type='model', id=id)",
            "trainer:protocol: .* 'model' with 5 bytes; at most 12, a multiple of 4",
        ),
        ("say(type='model', id=id, bytes=12); os._exit(0)", "trainer:protocol: .* ended after 0 of 12 bytes"),
        ("say(model[:8], type='model', id=id)", "trainer:result: .* returned 2 numbers; 1 times 3 are needed"),
        ("say(type='error', id=id, message='no GPU')", "trainer:error: the process of the trainer failed: no GPU"),
        ("say(type='error', id=id, message='x', reason='no-gpu')", "no-gpu: the process of the trainer failed: x"),
        (
            "say(type='error', id=id, message='x', reason='NO GPU')",
            "trainer:error: the process of the trainer failed: x",
        ),
        (
            "say(type='error', id=id, message='\\ud800\\x1b[2J' + 'x' * 1000)",
            r"trainer:error: the process of the trainer failed: \\ud800\\x1b\[2Jx+\.\.\. \(1005 characters\)$",
        ),
    ],
)
def test_a_failure_is_declined_with_its_reason_and_the_next_assignment_is_done(
    start: Start, trains: str, says: str, tmp_path: Path
) -> None:
    mark = tmp_path / "failed"
    first = f"kind == 'train' and not os.path.exists({str(mark)!r})"
    trainer = start(f"if {first}: open({str(mark)!r}, 'w').close(); {trains}\nelse: answer()")
    assert re.match(says, declined(trainer))
    np.testing.assert_array_equal(train(trainer, BASE, SGD).rows["loss"], np.zeros(3))


FAILING = """
import numpy as np
from federation.tasks import DataError
from federation.work.base import WorkError
from fedpareto import Dataset, Splits, Task, Trainer

NAME = "a" * 1_100_000  # as long as the names of a mixture of experts together
CASES = [
    *(MemoryError(), DataError("sample 7 cannot be read"), WorkError("no"), ZeroDivisionError("x")),
    *(SystemExit("no licence"), None, (np.zeros(3), 9, {}), {NAME: np.ones(3)}),
]


class Failing(Trainer):
    def train(self, model, plan):
        case = CASES[int(plan.sgd.learning_rate)]
        if isinstance(case, BaseException):
            raise case
        return case

    def evaluate(self, model, plan):
        return {"loss": 0.0}


class Numbers(Task):
    trainer = Failing

    def initial(self, seed):
        return {NAME: np.zeros(3)}

    def load(self, source):
        empty = Dataset(np.zeros((0, 1)), np.zeros(0))
        return Splits(Dataset(np.zeros((9, 1)), np.zeros(9)), empty, empty)
"""


@pytest.mark.full
def test_a_trainer_of_very_long_names_fails_with_the_same_reasons_and_messages_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    learned, source = task("failing:Numbers"), DataSource()
    command = shlex.join([sys.executable, "-m", "fedpareto", "worker", "trainer"])
    here = trainer_kind(learned)(learned, learned.load(source))
    expected = ["memory", "no-data", "failed", "", "", "trainer:result", "trainer:result"]
    failures = (MemoryError, DataError, WorkError, ZeroDivisionError, SystemExit)
    with closing(ExternalTrainer(learned, source, command=command)) as there:
        for rate, reason in enumerate(expected):
            with pytest.raises(failures) as caught:
                train(here, BASE, LocalSgd(epochs=1, batch_size=0, learning_rate=rate))
            assert reason_of(caught.value) == reason
            with pytest.raises(WorkError) as other:
                train(there, BASE, LocalSgd(epochs=1, batch_size=0, learning_rate=rate))
            assert other.value.reason == reason or (reason, other.value.reason) == ("", "trainer:error")
            assert str(other.value).endswith(escaped(" ".join(str(caught.value).split()), 400))
        rows = train(there, BASE, LocalSgd(epochs=1, batch_size=0, learning_rate=len(expected))).rows
        np.testing.assert_array_equal(rows["loss"], BASE - 1)


def test_a_diverged_training_and_nan_are_told_as_such(start: Start) -> None:
    for trains, step in (
        ("say(type='diverged', id=id, step=7)", 7),
        ("say(struct.pack('<3f', 1, float('nan'), 1), type='model', id=id)", 1),
    ):
        with pytest.raises(TrainingDiverged) as caught:
            train(start(training(trains)), BASE, SGD)
        assert caught.value.step == step


def test_a_silent_process_is_ended_and_started_again(start: Start) -> None:
    sleeps = "say(type='progress', id=id, share=0.1); time.sleep(600)"  # ended long before
    trainer = start(training(sleeps), silence=0.5)
    assert declined(trainer) == "trainer:silent: the process of the trainer said nothing about its order for 0.5 s"
    assert trainer.measure(BASE, ("test",))["test/loss"] == 1.0


def test_a_stop_reaches_the_process_and_a_late_answer_is_not_taken_for_another(start: Start) -> None:
    late = "stop, _ = order(); assert stop == {'type': 'stop', 'id': id}; say(bytes(12), type='model', id=id)"
    trainer = start(f"if kind == 'train' and header['seed'] % 2 == 0: {late}\nelse: answer()")
    with pytest.raises(TrainingStopped):
        train(trainer, BASE, SGD, measure=False, secret_seed=2, stopped=lambda: True)
    rows = train(trainer, BASE, SGD, measure=False, secret_seed=1).rows
    np.testing.assert_array_equal(rows["loss"], np.zeros(3))


@pytest.mark.parametrize(
    ("ready", "says"),
    [
        ("os._exit(1)", "trainer:died: the process of the trainer ended with exit status 1"),
        (
            "say(type='ready', id=0)",
            "trainer:protocol: the process of the trainer said it is ready without samples by split",
        ),
        (
            "say(type='ready', id=0, samples=samples, abilities=['telepathy'])",
            "trainer:protocol: the process of the trainer said it is ready without samples by split, or with abilities",
        ),
        ("say(type='error', id=0, message='no data')", "trainer:error: the process of the trainer failed: no data"),
    ],
)
def test_a_process_that_does_not_get_ready_is_no_trainer(start: Start, ready: str, says: str) -> None:
    with pytest.raises(WorkError) as caught:
        start(ready=ready)
    assert f"{caught.value.reason}: {caught.value}".startswith(says)


def test_a_command_that_does_not_exist_is_named() -> None:
    with pytest.raises(WorkError, match=r"the trainer's command \['/no/such/program', '-x'\]") as caught:
        ExternalTrainer(Three(), DataSource(), command="/no/such/program -x")
    assert caught.value.reason == "trainer:start"


def test_the_process_is_told_the_task_the_data_and_the_tensors_and_ends_with_the_worker(
    start: Start, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    trainer = start(
        ready=f"open({str(told)!r}, 'w').write(json.dumps(first | {{'pid': os.getpid()}})); "
        "say(type='ready', id=0, samples=samples)"
    )
    first = json.loads(told.read_text())
    assert (first["type"], first["protocol"], first["task"], first["part"]) == ("prepare", 1, "three", None)
    assert first["tensors"] == [{"name": "a", "shape": [2]}, {"name": "b", "shape": [1]}]
    assert psutil.pid_exists(first["pid"])
    trainer.close()
    wait_for(lambda: not psutil.pid_exists(first["pid"]), "the end of the process", 60)


def test_an_attack_on_training_data_is_refused_where_the_data_is_in_another_process(tmp_path: Path) -> None:
    command = child(tmp_path, "answer()")
    asked: dict[str, Any] = {"device": "cpu", "threads": 1, "trainers": {"digits": TrainerChoice(command=command)}}
    with pytest.raises(AttackError, match="label-flip changes training data, and that of digits is in the trainer's"):
        prepare_offers(["digits"], DataSource(), attack=parse_attack("label-flip"), **asked)
    offers, device = prepare_offers(["digits"], DataSource(), attack=parse_attack("sign-flip"), **asked)
    assert (offers["digits"].samples, device) == (10, "external")
    offers["digits"].close()


class Tumours(Task):
    """The model of the example."""

    name = "tumours"

    def initial(self, seed: int) -> dict[str, NDArray[np.float64]]:
        return {"coef": np.zeros((1, 30)), "intercept": np.zeros(1)}


@pytest.mark.parametrize(
    ("sgd", "steps"),
    [
        (LocalSgd(steps=3, batch_size=0, learning_rate=0.5), 3),
        (LocalSgd(epochs=2, batch_size=0, learning_rate=0.5), 2),
        (LocalSgd(steps=5, batch_size=10, learning_rate=0.5), 5),  # 24 samples: three steps a pass
        (LocalSgd(epochs=2, batch_size=10, learning_rate=0.5), 6),
    ],
)
def test_the_example_in_plain_python_makes_the_steps_that_the_run_asks_for(
    tmp_path: Path, sgd: LocalSgd, steps: int
) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.uniform(0.5, 2.0, (30, 30)), generator.integers(0, 2, 30)
    np.savetxt(tmp_path / "tumours.csv", np.c_[x, y], delimiter=",", header="measurements and label")
    command = shlex.join([sys.executable, "-S", str(EXAMPLES / "plain_trainer.py")])
    shares: list[float] = []
    with closing(ExternalTrainer(Tumours(), DataSource(tmp_path), command=command)) as trainer:
        found = train(trainer, np.zeros(31, np.float32), sgd, progress=shares.append)
    assert shares == [(step + 1) / steps for step in range(steps)]
    samples, labels = np.c_[np.log(x[6:] + 1e-3), np.ones(24)], y[6:]
    model = np.zeros(31)
    for _ in range(steps):
        model -= 0.5 * (1 / (1 + np.exp(-samples @ model)) - labels) @ samples / 24
    if sgd.batch_size == 0:  # the order of the samples is the example's own affair
        np.testing.assert_allclose(-found.rows["loss"], model, rtol=1e-5)
    elif sgd.epochs:
        assert np.linalg.norm(-found.rows["loss"] - model) < np.linalg.norm(model)


@pytest.mark.full
def test_the_built_in_trainer_gives_the_same_bytes_in_a_process_of_its_own() -> None:
    digits, source = task("digits"), DataSource()
    base, work = initial_model(digits, 1)[1], LocalSgd(epochs=1, batch_size=64, learning_rate=0.1)
    command = shlex.join([sys.executable, "-m", "fedpareto", "worker", "trainer"])
    here = train(TorchTrainer(digits, digits.load(source), "cpu", 1), base, work)
    with closing(ExternalTrainer(digits, source, "cpu", 1, command=command)) as other:
        there = train(other, base, work)
    assert here.rows["loss"].tobytes() == there.rows["loss"].tobytes()
    assert (here.losses, here.metrics, here.samples) == (there.losses, there.metrics, there.samples)
    assert other.abilities == TorchTrainer.abilities
