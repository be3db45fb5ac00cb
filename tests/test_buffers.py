"""Models that keep more than parameters, such as BatchNorm's statistics: local or frozen, as the run says."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import TESTS, Federation, Process, federation
from test_personal_parameters import GIVEN, SGD, Small, descend
from torchvision.models import resnet18

from federation.objectives import joint_target
from federation.run_sections import ParametersSpec
from federation.sharing import Sharing, SharingError
from federation.tasks import Dataset, DataSource, Splits, Task, initial_model
from federation.training.own import Own, compute, run_model
from federation.training.plans import TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.vectors import Vector, read_vector
from federation.work.computation import Descend, LocalSgd, Measure
from fedpareto.notebook import simulate
from simulation.simulate import Progress, Simulation


class Normed(Small):
    """As `Small`, with BatchNorm between body and head."""

    def model(self) -> torch.nn.Module:
        made = torch.nn.Sequential()
        made.add_module("body", torch.nn.Linear(3, 2))
        made.add_module("norm", torch.nn.BatchNorm1d(2))
        made.add_module("head", torch.nn.Linear(2, 2))
        return made


class ResNet(Small):
    """Torchvision's ResNet-18, from a state in a file."""

    state = Path()

    def model(self) -> torch.nn.Module:
        made = resnet18(num_classes=2)
        made.load_state_dict(torch.load(self.state, weights_only=True))
        return made

    def load(self, source: DataSource) -> Splits:
        torch.manual_seed(1)
        data = Dataset(torch.randn(4, 3, 32, 32), torch.arange(4) % 2)
        return Splits(data, data, data)


def with_buffers(made: Task, treatment: str) -> tuple[TorchTrainer, Own]:
    trained = TorchTrainer(made, made.load(DataSource()))
    layout, values = initial_model(made, 0)
    assert trained.layout == layout
    return trained, Own(Sharing.of(layout, (), (), made.buffers(), treatment), values)


def test_local_buffers_are_personal_and_a_measurement_uses_them() -> None:
    trained, chosen = with_buffers(Normed(), "local")
    base = chosen.sharing.shared_of(chosen.values)
    assert [tensor.name for tensor in chosen.sharing.personal.tensors] == [
        f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    result = compute(trained, base, descend(trained), chosen, **GIVEN)
    assert result.rows["loss"].shape == base.shape == (8 + 4 + 6,)
    assert result.personal is not None
    assert result.personal[-1] == SGD.steps  # batches that were counted
    again = compute(trained, base, descend(trained), chosen, **GIVEN)
    assert again.rows["loss"].tobytes() == result.rows["loss"].tobytes()
    mine = Own(chosen.sharing, chosen.sharing.with_personal(chosen.values, result.personal))
    tested = [compute(trained, base, Measure(splits=("test",)), one, **GIVEN).metrics for one in (mine, chosen)]
    assert tested[0]["test/loss"] != tested[1]["test/loss"]


def test_frozen_buffers_are_used_in_training_and_do_not_change() -> None:
    trained, chosen = with_buffers(Normed(), "frozen")
    values = chosen.values.copy()
    values[-5:-1] = [3.0, -3.0, 0.5, 2.0]  # the statistics of a pretrained model
    base, other = chosen.sharing.shared_of(values), Own(chosen.sharing, values)
    result = compute(trained, base, descend(trained), other, **GIVEN)
    assert result.personal is None
    assert np.abs(result.rows["loss"]).min() > 0
    assert trained.train(values, _plan(other)).tolist()[-5:] == [3.0, -3.0, 0.5, 2.0, 0.0]
    plain = compute(trained, base, descend(trained), chosen, **GIVEN)
    assert not np.allclose(plain.rows["loss"], result.rows["loss"])


def _plan(own_: Own) -> TrainingPlan:
    return TrainingPlan(sgd=SGD, weights={"loss": 1.0}, seed=0, samples=12, frozen=own_.sharing.frozen)


@pytest.mark.parametrize(
    ("made", "treatment", "says"),
    [
        (Normed(), "", "keeps 3 buffers, such as 'norm.num_batches_tracked': say what becomes of them, 'local' or"),
        (Small(), "local", "parameters.buffers: 'local', but the model keeps no buffers"),
    ],
)
def test_a_model_with_buffers_needs_a_run_that_says_what_becomes_of_them(made: Task, treatment: str, says: str) -> None:
    with pytest.raises(SharingError, match=says):
        run_model(made, 0, ParametersSpec(buffers=treatment))


@pytest.mark.full
@pytest.mark.parametrize("treatment", ["local", "frozen"])
def test_a_pretrained_resnet_with_batch_normalisation_trains(tmp_path: Path, treatment: str) -> None:
    made = ResNet()
    made.state = tmp_path / "resnet.pt"
    torch.manual_seed(3)
    torch.save(resnet18(num_classes=2).state_dict(), made.state)
    trained, chosen = with_buffers(made, treatment)
    work = Descend(sgd=LocalSgd(steps=2, learning_rate=0.001), targets=joint_target(trained.objectives))
    base = chosen.sharing.shared_of(chosen.values)
    result = compute(trained, base, work, chosen, **GIVEN)
    assert base.shape == (11_177_538,)
    after = base - result.rows["loss"]
    mine = chosen
    if result.personal is not None:
        mine = Own(chosen.sharing, chosen.sharing.with_personal(chosen.values, result.personal))
    measured = compute(trained, after, Measure(splits=("train",)), mine, **GIVEN).metrics
    assert np.isfinite(measured["train/loss"])
    if treatment == "frozen":
        assert measured["train/loss"] < result.losses["loss"]


# ---- runs

RUN = """
task = "normed_task:Normed"
rounds = 3
seed = 5
algorithm.name = "fedavg"
selection = { pool = "enrolled", minimum = 2, quorum = 1.0 }
train = { steps = 6, batch_size = 20, learning_rate = 0.2, momentum = 0.5 }
simulation = { clients = 2, partition = "shards:2" }
parameters.buffers = "TREATMENT"
"""
CLIENTS = ("client-000", "client-001")


def text(treatment: str) -> str:
    return RUN.replace("TREATMENT", treatment)


class Scene:
    """Two members, each with its own part of the digits."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed

    def work(self, client: str, crash: str = "") -> Process:
        part = f"{CLIENTS.index(client) + 1}/2"
        options = ("--part", part, "--partition", "shards:2", "--code", str(TESTS))
        return self.fed.work(client, *options, task="normed_task:Normed", crash=crash)

    def submit(self, name: str, treatment: str) -> str:
        return self.fed.submit(name, text(treatment), "--code", str(TESTS))

    def model(self, run: str) -> Vector:
        """The last model of a run, as soon as it is completed."""
        kind, _, value = self.fed.wait_completed(run).partition(":")
        return read_vector(self.fed.home / "blobs" / kind / value[:2] / value[2:])[1]

    def exported(self, client: str, run: str) -> bytes:
        path = self.fed.directory / f"{client}.safetensors"
        home = str(self.fed.directory / client)
        self.fed.fedpareto("worker", "export", run, "--out", str(path), "--home", home)
        return path.read_bytes()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with federation(tmp_path_factory.mktemp("buffers")) as fed:
        fed.serve()
        made = Scene(fed)
        for client in CLIENTS:
            fed.join(client)
        made.work(CLIENTS[1])
        yield made


def test_local_buffers_outlive_their_worker_and_a_simulation_makes_the_same(scene: Scene, tmp_path: Path) -> None:
    simulated = simulate(('name = "local"\n' + text("local")).encode(), home=tmp_path / "home", threads=1)
    dying = scene.work(CLIENTS[0], "spooled")
    scene.fed.attending(*CLIENTS)
    run = scene.submit("local", "local")
    for crash in ("before-receipt", ""):
        dying.wait_killed()
        dying = scene.work(CLIENTS[0], crash)
    assert scene.model(run).tobytes() == simulated.model.tobytes()
    for client in CLIENTS:
        kept = tmp_path / "home" / "personal" / client / "2.safetensors"
        assert scene.exported(client, run) == kept.read_bytes()
        assert read_vector(kept)[1][-1] == 18  # batches that were counted
    assert scene.fed.run_state(run)["measured"] == "personalised"


def test_a_simulation_with_local_buffers_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    document = ('name = "local"\n' + text("local")).encode()
    whole = simulate(document, home=tmp_path / "whole", threads=1)
    home = tmp_path / "halted"
    with Simulation(document, home, threads=1) as simulation:

        def stop(progress: Progress) -> None:
            if progress.done == 2:
                simulation.stop()

        simulation.run(stop)
    assert simulate(document, home=home, resume=True, threads=1).model.tobytes() == whole.model.tobytes()
    for client in CLIENTS:
        one, other = (place / "personal" / client / "2.safetensors" for place in (home, tmp_path / "whole"))
        assert one.read_bytes() == other.read_bytes()


def test_a_model_with_buffers_is_not_trained_stacked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be trained by the backend stacked with personal or frozen parameters"):
        Simulation(('name = "local"\n' + text("local")).encode(), tmp_path / "a", backend="stacked")
