"""The page "My own PyTorch loop": its code in a simulation and a federation, and the help that it uses."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Part, Task, task
from federation.training.torch_trainer import TorchTrainer
from federation.vectors import Vector, read_vector
from federation.work.base import WorkError
from fedpareto import simulate
from tests.harness import federation
from tests.owners_code.normed_task import Normed
from tests.paths import DOCS, EXAMPLES
from tests.trained import train

PAGE = (DOCS / "start/your-own-trainer.md").read_text().partition("\n## My own PyTorch loop\n")[2].partition("\n## ")[0]
SGD = LocalSgd(epochs=1, batch_size=32, learning_rate=0.003)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    return task("own_loop:Digits")


@pytest.fixture
def normed() -> TorchTrainer:
    made = Normed()
    return TorchTrainer(made, made.load(DataSource()))


def specification(rounds: int) -> str:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return re.sub(r"rounds = \d+", f"rounds = {rounds}", text)


def test_the_code_on_the_page_is_the_file() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    source = (EXAMPLES / "own_loop.py").read_text()
    assert len(blocks) == 3
    assert all(block in source for block in blocks)


@pytest.mark.full
def test_the_loop_of_the_page_trains_in_a_simulation_and_its_buffers_are_averaged(
    tmp_path: Path, example: Task
) -> None:
    history = simulate(specification(rounds=2), home=tmp_path / "home", threads=1)
    assert history.rounds["accuracy/mean"].iloc[-1] > 0.5
    network = example.model()
    arrays = example.trainer(example, example.load(DataSource()), threads=1).arrays(history.model)  # type: ignore[operator]
    assert {*arrays} == set(network.state_dict())
    assert float(arrays["norm.num_batches_tracked"]) > 2  # the mean over members of the minibatches of two rounds
    assert np.all(arrays["norm.running_var"] != 1.0)


@pytest.mark.full
def test_with_two_members_the_default_step_of_fedmgda_zigzags_and_the_warning_names_a_rate_that_does_not(
    tmp_path: Path, example: Task
) -> None:
    """The small form is in `coordinator/rounds/runs/test_participation.py`: the warning, from numbers of rounds."""

    def trained(rate: float) -> tuple[list[float], str]:
        text = specification(rounds=8).replace('"fedavg"', '"fedmgda+"').replace("0.003", "0.001")
        two = text.replace("clients = 4", "clients = 2").replace('"dirichlet:0.5"', '"iid"')
        home = tmp_path / f"home-{rate}"
        history = simulate(f"{two}[server]\nlearning_rate = {rate}\n", home=home, threads=1)
        return list(history.rounds["accuracy/mean"]), " ".join(history.warnings)

    accuracies, warning = trained(1.0)
    assert max(accuracies) > 0.9
    assert min(accuracies[4:]) < 0.75
    (rate,) = re.findall(r"set server.learning_rate to about ([\d.]+) \(it is 1\)", warning)
    shorter, warning = trained(float(rate))
    assert min(shorter[4:]) > 0.9
    assert warning == ""


def test_the_loop_of_the_page_gives_the_same_bytes_for_the_same_plan(example: Task) -> None:
    trainer = example.trainer(example, example.load(DataSource(part=Part(0, 8))), threads=1)  # type: ignore[operator]
    base = trainer.module_vector(example.model())
    first, second = (train(trainer, base, SGD, measure=False).rows["loss"] for _ in range(2))
    assert first.tobytes() == second.tobytes()
    assert np.abs(first).max() > 0
    count = SGD.count(trainer.samples)
    steps = train(trainer, base, SGD.changed(epochs=0, steps=count), measure=False)
    assert steps.rows["loss"].tobytes() == first.tobytes()  # as many as in an epoch
    assert trainer.arrays(base - first)["norm.num_batches_tracked"] == count


def test_a_module_gets_the_parameters_and_buffers_of_a_model_and_gives_them_back(normed: TorchTrainer) -> None:
    source, target = Normed().model(), Normed().model()
    source.train()
    source(torch.randn(16, 64))
    model = normed.module_vector(source)
    assert model.shape == (normed.layout.size,)
    normed.load_module(target, model)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    assert target.state_dict()["norm.num_batches_tracked"] == 1
    before = model.copy()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(1.0)
    assert model.tobytes() == before.tobytes()  # a module never shares memory with a model
    part = normed.layout.size - 1  # the count of batches, after a mean over members
    model[part] = 2.6
    normed.load_module(target, model)
    assert target.state_dict()["norm.num_batches_tracked"] == 3


def test_a_module_with_other_tensors_is_refused_and_the_error_names_them_and_says_buffers(
    normed: TorchTrainer,
) -> None:
    model = normed.module_vector(Normed().model())
    plain, wide = Normed().model(), Normed().model()
    plain.add_module("norm", nn.Identity())
    wide.add_module("out", nn.Linear(8, 9))
    wide.add_module("more", nn.BatchNorm1d(9, affine=False))
    statistics = "norm.running_mean, norm.running_var, norm.num_batches_tracked"
    lacking = f"missing parameters: norm.weight, norm.bias; missing buffers: {statistics}"
    added = (
        f"buffers too many: {statistics.replace('norm', 'more')}; "
        "other shapes: out.weight [9, 8] instead of [10, 8], out.bias [9] instead of [10]"
    )
    for module, says in ((plain, lacking), (wide, added)):
        with pytest.raises(ValueError, match=f"{re.escape(says)}$"):
            normed.module_vector(module)
        with pytest.raises(ValueError, match=f"^the module has other tensors than the model: {re.escape(says)}$"):
            normed.load_module(module, model)
    parameters = dict(plain.named_parameters()) | {
        "norm.weight": torch.ones(8),
        "norm.bias": torch.zeros(8),
        "head": torch.ones(1),
    }
    with pytest.raises(ValueError, match=f"model: missing buffers: {statistics}; parameters too many: head$"):
        normed.vector({name: tensor.detach() for name, tensor in parameters.items()})


def test_a_trained_model_without_its_buffers_is_declined_and_the_decline_names_them() -> None:
    class Forgetful(TorchTrainer):
        def train(self, model: Vector, plan: Any) -> Vector:
            return super().train(model, plan)[: self._parameters]

    made = Normed()
    trainer = Forgetful(made, made.load(DataSource()))
    with pytest.raises(WorkError) as declined:
        train(trainer, trainer.module_vector(made.model()), SGD, measure=False)
    assert declined.value.reason == "trainer:result"
    assert str(declined.value).endswith(
        "train() of the trainer has the shape (626,); the model has 643 elements, 626 of parameters and 17 of buffers; "
        "missing buffers: norm.running_mean, norm.running_var, norm.num_batches_tracked"
    )


@pytest.mark.full
def test_members_train_by_the_loop_of_the_page_in_a_federation_and_the_model_is_loaded_again(
    tmp_path: Path, example: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPARETO_CODE", str(EXAMPLES))
    with federation(tmp_path) as running:
        running.serve()
        for place, name in enumerate(("ann", "ben"), start=1):
            running.join(name)
            running.work(name, "--task", "own_loop:Digits", "--set", f"part={place}/2", "--code", str(EXAMPLES))
        running.attending("ann", "ben")
        text = "task" + specification(rounds=6).partition("\ntask")[2].partition("[simulation]")[0]
        run = running.completed("own", f"{text}[selection]\nminimum = 2\nquorum = 1.0\n")
        item = running.admin("rounds", run)["rounds"][-1]
        assert item["metrics"]["accuracy/mean"] > 0.85, item
        file = tmp_path / "model.safetensors"
        running.admin("export", run, "--out", str(file))
    layout, vector = read_vector(file)
    trainer = example.trainer(example, example.load(DataSource()), threads=1)  # type: ignore[operator]
    assert layout == trainer.layout
    assert trainer.measure(np.array(vector), ("test",))["test/accuracy"] > 0.85
