"""A Flower app as a task: what is told at submission, how tensors are matched, and the app in Flower's environment."""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.spec.run_spec import RunSpec
from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Part, Task, TaskError, initial_model, task
from federation.training import TrainingStopped
from federation.training.external import ExternalTrainer
from federation.training.plans import TrainingPlan
from federation.work.base import WorkError
from fedpareto.adapters.flower import FlowerTask
from fedpareto.adapters.order import exchanged
from fedpareto.cli.admin.upload import initial_model as submitted
from tests.fedpareto.adapters.scene import run_of_the_page
from tests.harness import federation
from tests.paths import EXAMPLES, ROOT

SGD = LocalSgd(epochs=3, batch_size=4, learning_rate=0.125)
TASKS = "tests.owners_code.flower_tasks"


def test_what_a_flower_app_cannot_do_is_told_when_a_run_is_submitted() -> None:
    noisy = '[privacy]\nsample_noise = 1.0\nsample_clip = 1.0\n[parameters]\nbuffers = "averaged"'
    text = f'name = "a"\ntask = "{TASKS}:Client"\nrounds = 1\n{noisy}'
    stopped, losses, noise = submitted(RunSpec.parse(text.encode()), None).remarks
    assert "cannot be stopped in a training" in stopped
    assert "Set train.measure = false" in losses
    assert "members with privacy.sample_noise decline" in noise
    silent = RunSpec.parse(f"{text}\n[train]\nmeasure = false".encode())
    assert submitted(silent, None).remarks == (stopped, noise)


def test_the_run_of_the_page_asks_only_for_what_a_flower_app_can_do() -> None:
    run = RunSpec.parse(run_of_the_page("Flower", rounds=20).encode())
    assert [caution for caution in FlowerTask().cautions(run) if "cannot be stopped" not in caution] == []


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("lightning_digits.py", "class Digits"),
        ("flower_digits.py", "class Digits"),
        ("transformers_notes.py", "class Mentions"),
    ],
)
def test_what_a_user_adds_has_at_most_ten_lines(file: str, first: str) -> None:
    added = first + (EXAMPLES / file).read_text().partition(f"\n{first}")[2]
    imports = 3  # of the source of data, of the adapter, and of what you have
    assert len([line for line in added.splitlines() if line.strip()]) + imports <= 10


def test_samples_of_no_split_and_an_environment_without_flower_are_refused() -> None:
    with pytest.raises(TaskError, match=r"samples\(\) returned {'train': 12, 'val': 5}, and evaluates is 'validation'"):
        task(f"{TASKS}:Miscounted").load(DataSource())
    learned: Any = task(f"{TASKS}:Client")
    if find_spec("flwr") is None:
        with pytest.raises(TaskError, match="flwr is not installed in this environment; let the worker start"):
            learned.trainer(learned, learned.load(DataSource()))


def test_tensors_of_one_shape_that_come_back_in_another_order_are_found_by_their_values() -> None:
    random = np.random.default_rng(0)
    before = {name: random.standard_normal((8, 8)) for name in "abc"} | {"ones": np.ones(64), "zeros": np.zeros(64)}
    moved = {name: array + random.standard_normal(array.shape) for name, array in before.items()}
    assert exchanged(before, moved) is None
    turned = {"a": before["b"], "b": before["c"], "c": before["a"]}
    near = {name: array + 0.1 * random.standard_normal((8, 8)) for name, array in turned.items()}
    assert exchanged(before, moved | near) == ("a", "b")
    assert exchanged(before, moved | {"ones": np.zeros(64)}) is None  # constant tensors look like no other
    copies = {"a": before["a"], "b": before["a"].copy()}
    assert exchanged(copies, dict.fromkeys(copies, moved["a"])) is None


# --- with Flower

Start = Callable[..., ExternalTrainer]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts trainers in Flower's environment, whose user has an empty home."""
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(EXAMPLES)]))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    made: list[ExternalTrainer] = []

    def started(learned: Task, source: DataSource) -> ExternalTrainer:
        made.append(ExternalTrainer(learned, source, "cpu", 1, command=command()))
        return made[-1]

    yield started
    for trainer in made:
        trainer.close()
    assert list((tmp_path / "user").iterdir()) == []


def command() -> str:
    program = ROOT / ".venv-flower" / "bin" / "python"
    if not program.exists():
        pytest.skip("Flower is not installed: `make test-full` installs it into .venv-flower")
    return shlex.join([str(program), "-m", "fedpareto", "worker", "trainer"])


def plan(trainer: ExternalTrainer, **more: Any) -> TrainingPlan:
    return TrainingPlan(sgd=SGD, weights={"loss": 1.0}, seed=2**63 - 1, samples=trainer.samples, **more)


@pytest.mark.full
def test_the_app_of_the_example_trains_by_names_and_measures_one_split(start: Start) -> None:
    learned = task("flower_digits:Digits")
    trainer, model = start(learned, DataSource(part=Part(1, 3))), initial_model(learned, 0)[1]
    assert trainer.sizes == {"train": 479, "validation": 120, "test": 0}
    trained = trainer.trained(model, plan(trainer))
    np.testing.assert_array_equal(trainer.trained(model, plan(trainer)), trained)
    assert trainer.arrays(trained)["norm.num_batches_tracked"] == 3 * 120  # run_config has the epochs and batches
    before, after = trainer.measure(model), trainer.measure(trained)
    assert set(after) == {
        "train/samples",
        "validation/samples",
        "validation/loss",
        "validation/accuracy",
        "test/samples",
    }
    assert after["validation/loss"] < before["validation/loss"] / 2


@pytest.mark.full
def test_a_numpy_client_gets_tensors_in_the_order_of_the_state_dict_and_the_train_section_as_config(
    start: Start, tmp_path: Path
) -> None:
    learned = task(f"{TASKS}:Client")
    trainer, model = start(learned, DataSource(tmp_path, Part(0, 2))), initial_model(learned, 0)[1]
    trained = trainer.arrays(trainer.trained(model, plan(trainer)))
    for name, array in trainer.arrays(model).items():
        np.testing.assert_array_equal(trained[name], 2 if name == "norm.num_batches_tracked" else array / 2, name)
    told = json.loads((tmp_path / "told.json").read_text())
    wanted = {
        "lr": 0.125,
        "learning-rate": 0.125,
        "local-epochs": 3,
        "batch-size": 4,
        "seed": 2**63 - 1,
        "optimizer": "sgd",
    }
    assert wanted.items() <= told["config"].items()
    assert told["run_config"] == {"batch-size": 4, "greeting": "hello"}
    assert told["node_config"] == {"data-path": str(tmp_path), "partition-id": 0, "num-partitions": 2}
    assert (told["state"], told["telemetry"]) == (0, "0")
    assert told["types"] == ["float32"] * 6 + ["int64"] + ["float32"] * 2
    loss = float(sum(np.abs(array).sum() for array in trainer.arrays(model).values()))
    assert trainer.measure(model, ("validation",))["validation/loss"] == pytest.approx(loss)
    with pytest.raises(TrainingStopped):
        trainer.trained(model, plan(trainer, stopped=lambda: True))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Disordered", "returned tensors in another order: that of first.weight looks like second.weight"),
        (
            "Short",
            r"returned 4 tensors without names, of the shapes \[8, 8\], \[8\], \[8\], \[8\]; the model has 9: first",
        ),
        ("Unknown", "importing its app tests.owners_code.flower_clients:nothing failed"),
    ],
)
def test_tensors_in_a_wrong_order_or_number_and_an_absent_app_are_refused(
    start: Start, tmp_path: Path, name: str, says: str
) -> None:
    learned = task(f"{TASKS}:{name}")

    def trained() -> object:
        trainer = start(learned, DataSource(tmp_path))
        return trainer.trained(initial_model(learned, 0)[1], plan(trainer))

    with pytest.raises(WorkError, match=says):
        trained()


@pytest.mark.full
def test_members_whose_workers_start_the_app_in_flowers_environment_complete_the_run_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    code = ["--code", str(EXAMPLES)]
    trainer = f"trainer_command={command()} {shlex.join(code)}"
    (tmp_path / "run.toml").write_text(run_of_the_page("Flower", rounds=3))
    with federation(tmp_path) as made:
        made.serve()
        for part, member in enumerate(("ann", "ben", "eve"), start=1):
            made.join(member)
            options = [*code, "--set", f"part={part}/3", "--set", trainer]
            made.work(member, *options, task="flower_digits:Digits")
        made.attending("ann", "ben", "eve")
        run = made.admin("submit", str(tmp_path / "run.toml"), *code)["run"]["run_id"]
        made.wait_completed(run)
        measured = [each["metrics"]["accuracy/mean"] for each in made.admin("rounds", run)["rounds"]]
    assert measured[-1] > max(0.5, measured[0]), measured
    assert list((tmp_path / "user").iterdir()) == []
