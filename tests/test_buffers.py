"""Models that keep more than parameters, such as BatchNorm's statistics: local or frozen, as the run says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_personal_parameters import GIVEN, SGD, Small, descend
from torchvision.models import resnet18

from federation.objectives import joint_target
from federation.run_sections import ParametersSpec
from federation.sharing import Sharing, SharingError
from federation.tasks import Dataset, DataSource, Splits, Task, initial_model
from federation.training.own import Own, compute, run_model
from federation.training.plans import TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.work.computation import Descend, LocalSgd, Measure


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
