"""Data, models and losses as people have them: a simulation trains with them, or refuses them before it begins."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedpareto
from federation.attacks.base import Attack
from federation.spec.run_spec import RunSpec
from federation.spec.train_section import LocalSgd
from federation.tasks import DataError, Dataset, DataSource, Pool, Splits, Task, TaskError
from fedpareto.simulation import SimulationError
from fedpareto.simulation.history import History
from fedpareto.simulation.population import populate
from fedpareto.simulation.stacked import why_not_stacked
from tests.command_lines import failure
from tests.paths import DOCS, EXAMPLES

SPEC = """
name = "kinds"
task = "{task}"
rounds = 2
algorithm.name = "fedavg"
train.batch_size = 8
evaluate.splits = ["test"]

[simulation]
clients = 3
"""
X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()


class Numbers(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def given(self) -> Any:
        return Pool(X, Y)

    def pool(self, source: DataSource) -> Pool:
        pool: Pool = self.given()
        return pool


class Arrays(Numbers):
    def given(self) -> Any:
        return Pool(X.numpy().astype(np.float64), Y.numpy().astype(np.int32))


class Truths(Numbers):
    def given(self) -> Any:
        return Pool(X, Y > 0)


class Doubles(Numbers):
    def given(self) -> Any:
        return Pool(X.double(), Y)


class OneHot(Numbers):
    def given(self) -> Any:
        return Pool(X, nn.functional.one_hot(Y))


class FromOne(Numbers):
    def given(self) -> Any:
        return Pool(X, Y + 1)


class Pairs(Numbers):
    def given(self) -> Any:
        return X, Y


class Hole(Numbers):
    """One value that is not a number, which may be dealt into the test split of any client."""

    def given(self) -> Any:
        x = X.clone()
        x[41, 2] = torch.nan
        return Pool(x, Y)


class Bare(Numbers):
    def losses(self, output: Tensor, y: Tensor) -> Any:
        return nn.functional.cross_entropy(output, y)


class Each(Numbers):
    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(output, y, reduction="none")}


class Share(Numbers):
    def correct(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(dim=1) == y).float().mean()


class Alone(Numbers):
    """A task that loads one client's data; that of the last client has a hole in its test split."""

    def load(self, source: DataSource) -> Splits:
        assert source.part is not None
        own = slice(30 * source.part.index, 30 * source.part.index + 30)
        x, y = X[own].numpy().copy(), Y[own].numpy()
        if source.part.index == 2:
            x[29] = np.nan
        return Splits(*(Dataset(x[part], y[part]) for part in (slice(20), slice(20, 25), slice(25, 30))))


Alone.pool = Task.pool  # type: ignore[method-assign]


class Later(Numbers):
    """Passes the trials, also that of the smallest minibatch, and fails when a client trains."""

    minibatches = 0

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.minibatches += torch.is_grad_enabled() and len(y) == 8
        if self.minibatches > 1:
            raise KeyError("site")
        return super().losses(output, y)


class Scalar(Numbers):
    """Returns a loss for the whole batch, so clients cannot be stacked."""

    def model(self) -> nn.Module:
        class Made(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 1)

            def forward(self, x: Tensor) -> Tensor:
                loss: Tensor = self.linear(x).square().mean()
                return loss

        return Made()

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": output}

    def correct(self, output: Tensor, y: Tensor) -> None:
        return None


class Overflow(Numbers):
    """Its first model is zero. What it learns is too large for one sample, 41."""

    def model(self) -> nn.Module:
        linear = nn.Linear(4, 2)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return linear

    def given(self) -> Any:
        x, y = X.clone(), Y.clone()
        x[41], y[41] = torch.finfo(torch.float32).max, 0
        return Pool(x, y)

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": super().losses(output, y)["loss"] ** 4}


class Careless(Attack):
    def on_update(self, own: Any, **more: Any) -> Any:
        return own[0, 0]


def run(task: type[Task], *, more: str = "", home: Path | None = None, backend: str = "auto") -> History:
    document = SPEC.format(task=f"{__name__}:{task.__name__}") + more
    return fedpareto.simulate(document, threads=1, home=home, backend=backend, progress=lambda _: None)


@pytest.mark.full
def test_arrays_and_labels_of_any_integers_train_the_model_of_the_same_tensors() -> None:
    expected = run(Numbers).model
    for kind in (Arrays, Truths):
        np.testing.assert_array_equal(run(kind).model, expected)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Doubles, TaskError, r"x of float64, while the model's parameters are float32: \.float\(\) converts them"),
        (OneHot, TaskError, r"needs labels that are classes, .*: of one-hot labels y\.argmax\(1\)"),
        (FromOne, TaskError, r"the label 2 is none of the classes 0 to 1"),
        (Pairs, TaskError, r"pool\(\) returned a tuple of a Tensor"),
        (Hole, DataError, r"1 of its 90 samples have features that are not finite \(the first is sample 41,"),
        (Alone, DataError, r"client-002: .* on the test split is nan: 1 of its 5 samples have features"),
        (Bare, TaskError, r"losses\(\) returned a Tensor \(\) of float32; needed: the mean loss of each objective"),
        (Each, TaskError, r"losses\(\)\['loss'\] is a Tensor \(\d+,\) of float32; needed: the mean over the batch"),
        (Share, TaskError, r"correct\(\) returned a Tensor \(\) of float32 for \d+ samples; needed: a tensor \("),
    ],
)
def test_what_does_not_fit_is_refused_in_words_before_anything_is_recorded(
    kind: type[Task], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        run(kind, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


class Draws(Numbers):
    """Draws from the global generators, as code that is not the federation's does."""

    def augment(self, x: Tensor) -> Tensor:
        drawn()
        return x


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_the_trial_leaves_random_generators_as_they_were() -> None:
    seed()
    expected = drawn()
    seed()
    populate(Draws(), RunSpec.parse(SPEC.format(task="draws")), DataSource())
    assert drawn() == expected


@pytest.mark.parametrize(
    ("backend", "names"),
    [("loop", "client-000, in round 0: "), ("stacked", r"client-000 to client-002, stacked .*, in round 0: ")],
)
def test_a_later_error_names_the_clients_the_round_and_the_line_of_its_owner(backend: str, names: str) -> None:
    with pytest.raises(
        SimulationError, match=rf"^{names}KeyError: 'site'\n.*test_data_kinds\.py, line \d+, in losses\n"
    ):
        run(Later, backend=backend)


def test_a_client_that_the_means_lack_because_its_loss_is_not_finite_is_named(caplog: pytest.LogCaptureFixture) -> None:
    # This seed deals the sample to a test split.
    run(Overflow, more="partition_seed = 7")
    words = "client-002: test/loss is not finite in round 0, so the means over the clients lack it"
    assert words in caplog.text


def test_an_error_of_an_attack_names_its_client() -> None:
    with pytest.raises(
        SimulationError,
        match=r"^client-002, in round 0: attack .*: on_update failed: IndexError: .*\n.*, in on_update\n",
    ):
        run(Numbers, more=f'attackers = 1\nattack = "{__name__}:Careless"')


def test_a_model_whose_output_has_no_row_for_each_sample_is_trained_client_by_client() -> None:
    document = SPEC.format(task=f"{__name__}:Scalar")
    population = populate(Scalar(), RunSpec.parse(document), DataSource())
    sgd = LocalSgd(steps=1, batch_size=0, learning_rate=0.1)
    why = why_not_stacked(Scalar(), population.splits, "cpu", sgd)
    assert why == "the model's output in an evaluation has no row for each sample"
    assert run(Scalar).state == "COMPLETED"


def test_the_command_shows_an_error_of_own_code_without_a_traceback_and_goes_on_after_the_repair(
    tmp_path: Path,
) -> None:
    (tmp_path / "later.toml").write_text(SPEC.format(task=f"{__name__}:Later"))
    arguments = ("simulate", str(tmp_path / "later.toml"), "--home", str(tmp_path / "home"), "--threads", "1")
    assert failure(*arguments).message.endswith("\nOnce that is repaired, the same command with --resume goes on")
    assert "in round 0: KeyError: 'site'\n" in failure(*arguments, "--resume").message
    rehearsal = failure(
        "worker", "run", "--rehearse", "--task", f"{__name__}:Later", "--set", f"spec={tmp_path / 'later.toml'}"
    )
    assert rehearsal.message.startswith(f"task '{__name__}:Later': the rehearsed round failed: KeyError: 'site'\n")


@pytest.mark.parametrize("example", ["Patients", "Boxes", "Helped", "Forces", "Points"])
def test_the_examples_of_models_and_data_of_another_form_are_those_of_the_page_and_learn(
    example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, source = (DOCS / "start/models-of-another-form.md").read_text(), (EXAMPLES / "unusual.py").read_text()
    shown = re.findall(r"^```python\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert any(f"class {example}(Task)" in block for block in shown)
    assert all(block in source for block in shown)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    history = fedpareto.simulate(SPEC.format(task=f"unusual:{example}"), threads=1, progress=lambda _: None)
    first, last = (record["loss/test"] for record in history.round_records)
    assert last < first
