"""DP-SGD: clipped gradients of samples, Poisson samples, noise that no seed leads to, and its accounting."""

import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coordinator.rounds.runs.specification import parse_run
from federation.spec.accounting import COARSE, DELTA, Mechanism, epsilon, gaussian_epsilon
from federation.spec.computation import Ability, PrivateSgd
from federation.spec.noise import Noise
from federation.spec.run_spec import SpecError
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Part, Task, initial_model, task
from federation.tasks import parameters as flat
from federation.training.dp_sgd import PrivateGradients, check_suits
from federation.training.torch_trainer import TorchTrainer
from federation.v1.common_pb2 import TrainWork
from federation.vectors import Vector
from federation.work.base import WorkError
from federation.work.train import wire
from federation.work.train.work import Train
from fedpareto.face.simulated import simulate
from tests.few import few
from tests.interrupted import interrupted_after_each_phase
from tests.trained import train

pytestmark = pytest.mark.skipif(
    find_spec("dp_accounting") is None or find_spec("opacus") is None, reason="needs fedpareto[dp]"
)

PRIVATE = PrivateSgd(noise=1.0, clip=0.5)
SGD = LocalSgd(steps=3, batch_size=10, learning_rate=0.1)
LOSS = {"loss": 1.0}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def digits() -> Task:
    return task("digits")


@pytest.fixture(scope="module")
def data(digits: Task) -> Dataset:
    data: Dataset = digits.load(DataSource(part=Part(0, 40))).train
    return data


class Chosen(Noise):
    """Noise of zeros, and draws that a test chooses: every sample for 0, none for 1."""

    def __init__(self, drawn: float = 0.0) -> None:
        super().__init__()
        self._drawn = drawn

    def uniform(self, count: int) -> NDArray[np.float64]:
        return np.full(count, self._drawn)

    def gaussian(self, count: int) -> NDArray[np.float64]:
        return np.zeros(count)


def gradient(of: Task, data: Dataset, sgd: LocalSgd = SGD, noise: Noise | None = None) -> Vector:
    """The gradient of a fresh model, (d,); without noise, of every sample, unless `noise` says otherwise."""
    source = PrivateGradients(flat.build(of).train(), of, data, sgd, PRIVATE, noise or Chosen())
    return torch.cat([part.reshape(-1) for part in source.next(LOSS)]).numpy()


def alone(of: Task, data: Dataset) -> list[NDArray[np.float64]]:
    """The gradient of each sample, (d,), by itself."""
    model, found = flat.build(of).train(), []
    for x, y in zip(data.x, data.y, strict=True):
        model.zero_grad()
        of.losses(model(x[None]), y[None])["loss"].backward()  # type: ignore[no-untyped-call]
        rows = [part.grad.reshape(-1) for part in model.parameters() if part.grad is not None]
        found.append(torch.cat(rows).double().numpy())
    return found


# --- gradients


def test_the_sum_is_that_of_each_samples_own_gradient_clipped_and_divided_by_the_expected_number(
    digits: Task, data: Dataset
) -> None:
    expected = sum(row * min(1.0, PRIVATE.clip / float(np.linalg.norm(row))) for row in alone(digits, data)) / 10
    np.testing.assert_allclose(gradient(digits, data), expected, rtol=0, atol=1e-6)


def test_the_gradients_of_samples_are_those_of_opacus(digits: Task, data: Dataset) -> None:
    import opacus

    model = opacus.GradSampleModule(flat.build(digits).train(), loss_reduction="mean")
    digits.losses(model(data.x.clone().requires_grad_()), data.y)["loss"].backward()  # type: ignore[no-untyped-call]  # Opacus warns otherwise
    rows = torch.cat([part.grad_sample.flatten(1) for part in model.parameters()], dim=1).double()
    rows *= (PRIVATE.clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    np.testing.assert_allclose(gradient(digits, data), (rows.sum(dim=0) / 10).numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [1e4, math.nan, math.inf])
def test_no_sample_moves_the_sum_further_than_the_clip(digits: Task, data: Dataset, value: float) -> None:
    changed = Dataset(data.x.clone(), data.y)
    changed.x[3] = value
    without = Dataset(torch.cat([data.x[:3], data.x[4:]]), torch.cat([data.y[:3], data.y[4:]]))
    moved = gradient(digits, changed) - gradient(digits, without)
    assert np.linalg.norm(10 * moved) <= PRIVATE.clip * (1 + 1e-5)


def test_a_loss_that_is_no_mean_over_samples_is_still_taken_one_sample_at_a_time(digits: Task, data: Dataset) -> None:
    class Coupled(type(digits)):  # type: ignore[misc]
        def losses(self, output: Any, y: Any) -> dict[str, Any]:
            return {"loss": super().losses(output - output.mean(dim=0) * 0.5, y)["loss"]}

    changed = Dataset(data.x.clone(), data.y)
    changed.x[3] += 1
    moved = gradient(Coupled(), changed) - gradient(Coupled(), data)
    assert np.linalg.norm(10 * moved) <= 2 * PRIVATE.clip


def test_an_empty_sample_gives_noise_alone(digits: Task, data: Dataset) -> None:
    assert not gradient(digits, data, noise=Chosen(1.0)).any()

    class Nobody(Noise):
        def uniform(self, count: int) -> NDArray[np.float64]:
            return np.ones(count) if count == len(data) else super().uniform(count)

    assert gradient(digits, data, noise=Nobody()).std() == pytest.approx(PRIVATE.noise * PRIVATE.clip / 10, rel=0.1)


def test_a_batch_of_the_whole_split_draws_every_sample(digits: Task, data: Dataset) -> None:
    whole = LocalSgd(steps=1, batch_size=0, learning_rate=0.1)
    assert PRIVATE.mechanism(whole, len(data), 1) == Mechanism(1.0, 1.0, 1)
    every = gradient(digits, data, whole, Chosen(1.0)) * len(data)
    np.testing.assert_allclose(every, gradient(digits, data) * 10, atol=1e-6)


def test_samples_are_drawn_independently_with_the_rate_of_the_batch(digits: Task, data: Dataset) -> None:
    source = PrivateGradients(flat.build(digits).train(), digits, data, SGD, PRIVATE, Noise())
    sizes, rate = [len(source._draw()) for _ in range(400)], 10 / len(data)
    assert np.mean(sizes) == pytest.approx(10, abs=0.6)
    assert np.var(sizes) == pytest.approx(len(data) * rate * (1 - rate), rel=0.4)


def test_epochs_and_rows_count_as_steps() -> None:
    sgd = LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
    assert PRIVATE.mechanism(sgd, 25, rows=3) == Mechanism(1.0, 0.4, 2 * 3 * 3)


def test_the_stricter_of_two_is_more_noise_and_the_smaller_clip() -> None:
    assert PRIVATE.with_floor(PrivateSgd(noise=2.0, clip=3.0)) == PrivateSgd(noise=2.0, clip=0.5)


# --- noise


def test_noise_is_standard_normal_and_samples_come_with_their_probability() -> None:
    from scipy import stats

    noise = Noise()
    drawn, uniform = noise.gaussian(100_001), noise.uniform(100_001)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert stats.kstest(uniform, "uniform").pvalue > 1e-6
    assert 0 < uniform.min() <= uniform.max() <= 1
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


@pytest.fixture
def update(digits: Task) -> Callable[[PrivateSgd | None], Vector]:
    """Makes the same update again, with this noise."""
    trainer = TorchTrainer(digits, digits.load(DataSource(part=Part(0, 40))), "cpu", 1)
    base = initial_model(digits, 3)[1]

    def made(private: PrivateSgd | None) -> Vector:
        torch.manual_seed(0)
        np.random.seed(0)
        return np.asarray(train(trainer, base, SGD, measure=False, private=private, seed=5).rows["loss"])

    return made


def test_no_seed_leads_to_the_noise(update: Callable[[PrivateSgd | None], Vector]) -> None:
    # Three steps of rate 0.1, each with noise of standard deviation 0.5 / 10: independent in both.
    assert (update(PRIVATE) - update(PRIVATE)).std() == pytest.approx(math.sqrt(2 * 3) * 0.1 * 0.05, rel=0.2)


def test_without_noise_training_is_as_it_was(update: Callable[[PrivateSgd | None], Vector]) -> None:
    before = update(None)
    update(PRIVATE)
    assert np.array_equal(update(None), before)


# --- models and specifications that do not suit


class WithBatchNorm(Task):
    name = "with-batch-norm"
    objectives = ("loss",)

    def model(self) -> torch.nn.Module:
        norm = torch.nn.BatchNorm1d(4, track_running_stats=False)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), norm, torch.nn.Linear(4, 2))

    def load(self, source: DataSource) -> Any:
        raise NotImplementedError

    def losses(self, output: Any, y: Any) -> dict[str, Any]:
        return {"loss": torch.nn.functional.cross_entropy(output, y)}

    def correct(self, output: Any, y: Any) -> Any:
        return None


def test_a_model_that_mixes_samples_is_refused_before_it_is_trained(digits: Task) -> None:
    made = WithBatchNorm()
    with pytest.raises(WorkError, match="BatchNorm", check=lambda error: error.reason == "dp-model"):
        check_suits(flat.build(made), made, Dataset(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)))


@pytest.mark.parametrize("package", ["opacus", "dp_accounting"])
def test_a_package_that_is_not_installed_is_named_with_the_way_to_install_it(
    digits: Task, data: Dataset, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as Python sees one that is not there
    with pytest.raises(WorkError, match=r"pip install 'fedpareto\[dp\]'") as refused:
        check_suits(flat.build(digits), digits, data)
    assert refused.value.reason == "dp-missing"


SPEC = 'name = "a"\ntask = "digits"\nrounds = 2\n[train]\nbatch_size = 20\n'


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("[privacy]\nsample_noise = 0.1", "privacy.sample_noise: noise below 0.3 protects nothing"),
        ("[privacy]\nsample_clip = 0.0", "privacy.sample_clip"),
        ('[privacy]\nsample_noise = 1.0\n[algorithm]\nname = "afl"', "afl asks clients for losses"),
        ('[privacy]\nsample_noise = 1.0\n[algorithm]\nname = "fedcmoo"', "fedcmoo asks clients for losses"),
        (
            '[privacy]\nsample_noise = 1.0\n[algorithm]\nname = "fsmgda"\nexact_stationarity = true',
            "fsmgda asks clients for losses",
        ),
    ],
)
def test_a_specification_whose_noise_would_not_protect_is_refused(more: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_run(SPEC + more)


def test_a_run_with_noise_measures_no_training_split() -> None:
    spec, _ = parse_run(SPEC + "[privacy]\nsample_noise = 1.0\n")
    assert spec.evaluated == ("validation", "test")


def test_noise_travels_in_the_work() -> None:
    asked = Train(sgd=SGD, targets={"loss": LOSS}, measure=False, private=PRIVATE)
    message = TrainWork.FromString(wire.to_proto(asked).SerializeToString())
    shape: Any = None
    assert wire.from_proto(message, shape) == asked
    message.sample_noise = 0.2
    with pytest.raises(WorkError, match=r"sigma = 0\.2"):
        wire.from_proto(message, shape)


# --- accounting

MANY = [Mechanism(4.0, 0.1, 40), Mechanism(3.0, 0.05, 30), Mechanism(4.0, 0.1, 60)]


def event(one: Mechanism) -> Any:
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(one.noise)
    return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(one.rate, gaussian), one.steps)


def test_several_runs_spend_what_dp_accounting_says_of_them_one_after_the_other() -> None:
    from dp_accounting import pld, rdp

    accountants = pld.PLDAccountant(), rdp.RdpAccountant()
    for one in MANY:
        for accountant in accountants:
            accountant.compose(event(one))
    value, bound = (accountant.get_epsilon(DELTA) for accountant in accountants)
    found = epsilon(MANY, DELTA, COARSE)
    assert value <= found.value <= value * 1.01
    assert bound <= found.bound <= bound * 1.02  # fewer orders


@pytest.mark.full
def test_what_is_spent_is_what_opacus_says() -> None:
    from opacus import accountants

    ours = epsilon([Mechanism(1.0, 0.1, 100)], DELTA)
    for kind, value in ((accountants.RDPAccountant, ours.bound), (accountants.PRVAccountant, ours.value)):
        accountant = kind()
        accountant.history = [(1.0, 0.1, 100)]
        assert accountant.get_epsilon(DELTA) == pytest.approx(value, rel=0.02)


@few(5.0, 30.0)
@pytest.mark.parametrize(("noise", "times"), [(1.0, 1), (1.0, 10), (5.0, 100), (30.0, 3)])
def test_the_closed_form_is_that_of_a_gaussian_which_samples_nothing(noise: float, times: int) -> None:
    from scipy import stats

    found = gaussian_epsilon(noise, times, DELTA)
    assert found == pytest.approx(epsilon([Mechanism(noise, 1.0, times)], DELTA).value, rel=2e-3)
    mu = math.sqrt(times) / noise
    delta = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found) * stats.norm.cdf(-mu / 2 - found / mu)
    assert delta == pytest.approx(DELTA, rel=1e-6)


def test_nothing_spends_nothing_and_hopeless_noise_is_bounded_at_once() -> None:
    assert epsilon([], DELTA).value == gaussian_epsilon(1.0, 0, DELTA) == 0
    lost = epsilon([Mechanism(0.3, 0.5, 10_000)], DELTA)
    assert lost.value == lost.bound > 100


# --- simulation


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    """A simulation, and another one whose clients meet an operation that has no deterministic kernel."""
    text = SPEC + "[privacy]\nsample_noise = 2.0\n[simulation]\nclients = 2\n[algorithm]\nname = 'fedavg'\n"
    undecided = text.replace('"digits"', '"tests.owners_code.unpooled_task:Undecided"')
    return [simulate(each, threads=1, progress=lambda _: None) for each in (text, undecided)]


@pytest.mark.full
def test_a_simulation_with_noise_cannot_be_repeated(runs: list[Any]) -> None:
    assert not np.allclose(runs[0].model, runs[1].model, atol=1e-3)


def test_a_simulation_shows_what_each_client_spent(runs: list[Any]) -> None:
    samples = {record["client"]: record["samples"] for record in runs[0].reply_records}
    for record in runs[0].reply_records:
        count = samples[record["client"]]
        steps = (record["round"] + 1) * -(-count // 20)
        expected = epsilon([Mechanism(2.0, 20 / count, steps)], DELTA, COARSE).value
        assert record["epsilon"] == pytest.approx(expected)
        assert record["loss"] is None
    last = runs[0].round_records[-1]
    assert last["epsilon/samples"] == max(r["epsilon"] for r in runs[0].reply_records if r["round"] == 1)
    assert "loss/train" not in last


def test_a_training_that_begins_again_for_want_of_a_deterministic_kernel_is_spent_once(runs: list[Any]) -> None:
    one, other = ([(record["client"], record["epsilon"]) for record in told.reply_records] for told in runs)
    assert one == other


def test_such_an_operation_is_found_before_the_noise_and_does_not_make_the_model_unsuitable() -> None:
    learned = task("tests.owners_code.unpooled_task:Undecided")
    trainer = TorchTrainer(learned, learned.load(DataSource(part=Part(0, 40))), "cpu", 1)
    trainer.check_private()
    assert trainer.abilities == set(Ability) - {Ability.REPEATABLE}


def test_only_the_loop_trains_with_noise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be trained stacked with noise"):
        simulate(SPEC + "[privacy]\nsample_noise = 2.0\n", backend="stacked", progress=lambda _: None)


DIVERGING = """\
name = "noisy"
task = "digits"
rounds = 3
algorithm.name = "fedavg"

[train]
steps = 1
batch_size = 20
learning_rate = 3e38
round_schedule = "decay"
round_decay = 1e-39
round_decay_every = 2

[privacy]
sample_noise = 1.0
sample_clip = 100.0

[evaluate]
every = 0

[simulation]
clients = 1
"""


@pytest.mark.full
def test_the_epsilon_of_an_interrupted_simulation_counts_each_training_once_also_those_that_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = simulate(DIVERGING, threads=1, progress=lambda _: None)
    assert [round_["state"] for round_ in whole.round_records] == ["SKIPPED", "SKIPPED", "COMPLETED"]
    history = interrupted_after_each_phase(monkeypatch, DIVERGING, tmp_path / "home")
    spent, expected = ([record["epsilon"] for record in told.reply_records] for told in (history, whole))
    assert spent == expected
    assert expected[-1] is not None
