"""A model that Hugging Face's Trainer trains, as a task, with the real library; and what is refused before."""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from federation.spec.train_section import LocalSgd
from federation.tasks import DataError, DataSource, Part, PartError, Pool, TaskError, initial_model, task
from federation.training import TrainingStopped
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.work.base import WorkError
from fedpareto import simulate
from fedpareto.adapters.transformers import TransformersTask, TransformersTrainer
from tests.fedpareto.adapters.scene import run_of_the_page
from tests.paths import EXAMPLES

SGD = LocalSgd(epochs=2, batch_size=100, learning_rate=0.003)


class Plain(TransformersTask):
    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def pool(self, source: DataSource) -> Pool:
        return Pool(np.zeros((40, 3), np.float32), np.zeros(40, np.float32))


class Writing(Plain):
    arguments = {"output_dir": "files"}  # noqa: RUF012 - as an owner writes it


class Deciding(Plain):
    arguments = {"learning_rate": 1e-4}  # noqa: RUF012


class Keeping(Plain):
    options = {"optimizers": (None, None)}  # noqa: RUF012


class Named(Plain):
    def data(self, source: DataSource) -> Any:
        return {"train": [1, 2], "dev": [3]}


class Endless(Plain):
    def data(self, source: DataSource) -> Any:
        return {"train": iter([1, 2])}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Writing, "arguments has 'output_dir', which the adapter sets: leave it out"),
        (Deciding, "arguments has 'learning_rate', which the adapter sets: leave it out"),
        (Keeping, "options has 'optimizers', which the adapter sets: leave it out"),
    ],
)
def test_what_the_adapter_or_the_run_sets_is_refused(kind: type[Plain], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        TransformersTrainer(kind(), kind().load(DataSource()))


def test_data_sets_of_no_split_or_without_a_length_are_refused() -> None:
    with pytest.raises(DataError, match=r"with train, dev; needed: data sets by split \(train, validation, test\)"):
        Named().load(DataSource())
    with pytest.raises(DataError, match=r"iterator.* as train; needed: a data set with a length"):
        Endless().load(DataSource())


def test_an_environment_without_the_library_is_told_what_to_install() -> None:
    if find_spec("transformers") is not None:
        pytest.skip("transformers is installed here")
    with pytest.raises(TaskError, match=r"needs transformers.* not installed here: .*\[transformers\]"):
        TransformersTrainer(Plain(), Plain().load(DataSource()))


# --- with the library


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The task of the example; nothing was written into the working directory or the home at the end."""
    pytest.importorskip("transformers", reason="needs fedpareto[transformers], which `make test-full` installs")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("here", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield task("transformers_notes:Mentions")
    assert [*Path.cwd().iterdir(), *(tmp_path / "home").iterdir()] == []


def made(learned: Any) -> Any:
    return learned.trainer(learned, learned.load(DataSource()), "cpu", 1)


def plan(trainer: Any, sgd: LocalSgd = SGD, **more: Any) -> TrainingPlan:
    return TrainingPlan(sgd=sgd, weights={"loss": 1.0}, seed=2**63 - 1, samples=trainer.samples, **more)


def changed(example: Any, **body: Any) -> Any:
    """The example with other attributes."""
    return type("Changed", (type(example),), body)()


@pytest.mark.full
def test_the_example_learns_from_the_data_of_three_members(notes: Any, tmp_path: Path) -> None:
    tokens, labels = sys.modules[type(notes).__module__].made_up(3000)
    members = {}
    for number in range(3):
        members[f"m{number}"] = tmp_path / str(number)
        members[f"m{number}"].mkdir()
        torch.save((tokens[number::3].clone(), labels[number::3].clone()), members[f"m{number}"] / "notes.pt")
    spec = run_of_the_page("Transformers", rounds=3)
    history = simulate(spec, members=members, home=tmp_path / "simulation", threads=1, progress=lambda done: None)
    assert history.rounds["accuracy/mean"].iloc[-1] > 0.9
    assert set(history.clients["split"]) == {"train", "validation", "test"}


@pytest.mark.full
def test_a_round_has_the_steps_the_minibatches_and_the_rate_of_the_run_and_begins_afresh(notes: Any) -> None:
    trainer, shares = made(notes), list[float]()
    model = initial_model(notes, 0)[1]
    trained = trainer.trained(model, plan(trainer, tell=shares.append))
    steps = 2 * -(-trainer.samples // 100)
    assert shares == pytest.approx([step / steps for step in range(steps + 1)])
    assert np.abs(trained - model).max() > 0.01
    state = torch.get_rng_state()
    np.testing.assert_array_equal(trainer.trained(model, plan(trainer)), trained)
    assert torch.equal(torch.get_rng_state(), state)
    shares.clear()
    few = SGD.changed(epochs=0, steps=3, learning_rate=0.0)
    np.testing.assert_array_equal(trainer.trained(model, plan(trainer, few, tell=shares.append)), model)
    assert len(shares) == 4
    half = trainer.trained(model, plan(trainer, SGD.changed(precision="bf16")))
    assert not np.array_equal(half, trained)
    np.testing.assert_array_equal(trainer.trained(model, plan(trainer)), trained)


@pytest.mark.full
@pytest.mark.parametrize(("parts", "steps"), [(1, 9), (4, 1)])
def test_a_result_that_is_no_longer_wanted_ends_training_and_measuring(notes: Any, parts: int, steps: int) -> None:
    trainer, asked = made(changed(notes, arguments={"gradient_accumulation_steps": parts})), list[bool]()
    model = initial_model(notes, 0)[1]

    def stopped() -> bool:
        asked.append(True)
        return len(asked) > 3

    with pytest.raises(TrainingStopped):
        trainer.trained(model, plan(trainer, SGD.changed(epochs=0, steps=steps), stopped=stopped))
    assert len(asked) == 4
    with pytest.raises(TrainingStopped):
        trainer.scored(model, EvaluationPlan(split="train", stopped=lambda: True))


@pytest.mark.full
def test_nothing_is_reported_printed_or_sent_and_callbacks_of_the_owner_that_do_not_report_are_called(
    notes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
    from transformers.integrations import TensorBoardCallback

    told: list[str] = []

    class Reporting(TensorBoardCallback):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            told.append("reported")

    class Own(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            told.append("own")

    connections: list[str] = []
    watching = [True]
    sys.addaudithook(lambda event, _: connections.append(event) if watching and event == "socket.connect" else None)
    callbacks = [Reporting(), Own(), EarlyStoppingCallback(), PrinterCallback()]
    trainer = made(changed(notes, options={**type(notes).options, "callbacks": callbacks}))
    model = initial_model(notes, 0)[1]
    trainer.trained(model, plan(trainer, SGD.changed(epochs=0, steps=2)))
    trainer.scored(model, EvaluationPlan(split="test"))
    watching.clear()
    assert told == ["own"]
    assert connections == []
    assert capfd.readouterr().out == ""
    constants: Any = import_module("huggingface_hub.constants")
    assert constants.HF_HUB_DISABLE_TELEMETRY
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


@pytest.mark.full
def test_samples_without_labels_and_other_names_of_scores_are_told(notes: Any) -> None:
    model = initial_model(notes, 0)[1]
    renamed = changed(notes, scores={"loss": "eval_runtime"})
    assert set(made(renamed).scored(model, EvaluationPlan(split="test"))) == {"loss"}
    unlabelled = changed(notes, columns=("input_ids", "ignored"), pool=pool, data=TransformersTask.data, options={})
    with pytest.raises(WorkError, match=r"needs 'eval_loss' as the loss; the Trainer tells .*whether each sample has"):
        made(unlabelled).scored(model, EvaluationPlan(split="test"))
    with pytest.raises(TaskError, match=r"making its TrainingArguments.*no_such_argument"):
        made(changed(notes, arguments={"no_such_argument": 1}))


def pool(self: Any, source: DataSource) -> Pool:
    tokens, labels = sys.modules[type(self).__mro__[1].__module__].made_up()
    return Pool(tokens, labels)


@pytest.mark.full
def test_a_pool_is_dealt_and_the_data_of_one_member_is_not(notes: Any) -> None:
    with pytest.raises(PartError, match="returns the data of one member, which is not dealt to several"):
        notes.load(DataSource(part=Part(0, 3)))
    pooled = changed(notes, pool=pool, data=TransformersTask.data)
    trainer = pooled.trainer(pooled, pooled.load(DataSource(part=Part(0, 2))), "cpu", 1)
    model = initial_model(pooled, 0)[1]
    trained = trainer.trained(model, plan(trainer, SGD.changed(batch_size=16, epochs=3)))
    split = EvaluationPlan(split="validation")
    assert trainer.scored(trained, split)["loss"] < trainer.scored(model, split)["loss"] / 2


@pytest.mark.full
def test_a_trainer_of_the_owners_own_computes_its_loss(notes: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class Doubled(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            loss = self.args.factor * loss
            return (loss, outputs) if return_outputs else loss

    class Arguments(TrainingArguments):  # type: ignore[misc]
        factor = 2.0

    model, split = initial_model(notes, 0)[1], EvaluationPlan(split="test")
    own = changed(notes, trainer_class=Doubled, arguments_class=Arguments)
    assert made(own).scored(model, split)["loss"] == pytest.approx(2 * made(notes).scored(model, split)["loss"])
