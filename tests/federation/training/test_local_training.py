"""Local training: what an update is, what is measured, and that the same work gives the same bytes."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from federation.spec.objective_names import joint_target, separate_targets
from federation.spec.train_section import LocalSgd
from federation.tasks import DataSource, Part, Task, TaskError, initial_model, task
from federation.tasks import parameters as flat
from federation.tasks.digits import Digits
from federation.training import TrainingStopped
from federation.training.torch_trainer import TorchTrainer
from fedpareto.processes.forked import completed
from tests.federation.training.scene import BASE, DEVICES, SGD, Both, Line, Noisy, _train, _trainer
from tests.few import few
from tests.trained import jacobian

# ---- what an update is


def test_subtracting_the_update_descends() -> None:
    digits = task("digits")
    trainer = _trainer(digits)
    _, base = initial_model(digits, 0)
    result = _train(trainer, base, LocalSgd(epochs=5, batch_size=10, learning_rate=0.1))
    after = trainer.measure(base - result.rows["loss"])
    assert after["train/loss"] < result.losses["loss"] / 4
    assert after["test/accuracy"] > 0.8


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_full_batch_steps_follow_sgd_with_momentum_decay_and_the_proximal_term(
    mu: float, momentum: float, decay: float
) -> None:
    line = Line()
    work = LocalSgd(steps=4, batch_size=0, learning_rate=0.1, proximal_mu=mu, momentum=momentum, weight_decay=decay)
    start = BASE.astype(np.float64)
    w, velocity = start.copy(), np.zeros(4)
    for _ in range(4):
        velocity = momentum * velocity + line.gradient(w) + mu * (w - start) + decay * w
        w = w - 0.1 * velocity
    np.testing.assert_allclose(_train(_trainer(line), BASE, work).rows["loss"], start - w, rtol=1e-4)


def test_a_zero_batch_size_is_the_whole_split() -> None:
    trainer = _trainer(Line())
    whole, same, larger = (
        _train(trainer, BASE, LocalSgd(epochs=2, batch_size=size, learning_rate=0.1)).rows["loss"]
        for size in (0, 23, 99)
    )
    assert whole.tobytes() == same.tobytes() == larger.tobytes()


class Watched(Line):
    """Remembers which targets each training batch held."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        if output.requires_grad:
            self.seen.append(y.tolist())
        return super().losses(output, y)


def test_every_pass_is_reshuffled_and_keeps_its_last_short_batch() -> None:
    watched = Watched()
    _train(_trainer(watched), BASE, LocalSgd(epochs=2, batch_size=10, learning_rate=0.01))
    tried, *seen = watched.seen
    assert [len(batch) for batch in (tried, *seen)] == [1, 10, 10, 3, 10, 10, 3]
    first, second = (list(chain(*seen[begin : begin + 3])) for begin in (0, 3))
    assert sorted(first) == sorted(second) == sorted(watched.y.tolist())
    assert first != second


def test_steps_count_across_passes() -> None:
    watched = Watched()
    _train(_trainer(watched), BASE, LocalSgd(steps=5, batch_size=10, learning_rate=0.01))
    assert [len(batch) for batch in watched.seen[1:]] == [10, 10, 3, 10, 10]


def test_each_round_and_each_client_shuffles_in_its_own_way() -> None:
    trainer = _trainer(Line())
    made = [
        _train(trainer, BASE, SGD, **changed).rows["loss"].tobytes()
        for changed in ({}, {"round": 1}, {"seed": 1}, {"client_id": "b"}, {"round": 1, "client_id": "b"})
    ]
    assert len(set(made)) == len(made)


def test_each_objective_gives_a_row_that_starts_at_the_base_model() -> None:
    alone, both = _trainer(Line()), _trainer(Both())
    result = _train(both, BASE, targets=separate_targets(both.objectives))
    assert list(result.rows) == ["fit", "size"]
    assert result.rows["fit"].tobytes() == _train(alone, BASE).rows["loss"].tobytes()
    assert not np.allclose(result.rows["fit"], result.rows["size"])
    assert set(result.losses) == {"fit", "size", "loss"}
    assert result.metrics["train/loss"] == result.losses["loss"]
    assert result.losses["loss"] == pytest.approx((result.losses["fit"] + result.losses["size"]) / 2)
    assert result.metrics["train/loss/fit"] == result.losses["fit"]


class Twins(Noisy):
    """Two objectives that are the same, on a model with dropout."""

    objectives = ("left", "right")

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = functional.cross_entropy(output, y)
        return {"left": loss, "right": loss}


def test_the_rows_of_a_client_differ_by_the_objective_alone() -> None:
    twins = Twins()
    rows = _train(_trainer(twins), initial_model(twins, 0)[1], targets=separate_targets(twins.objectives)).rows
    assert rows["left"].tobytes() == rows["right"].tobytes()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_first_step_made_of_the_gradients_is_the_step_that_training_makes(momentum: float) -> None:
    digits = task("two-digits")
    splits = digits.load(DataSource(part=Part(0, 20)))
    base = initial_model(digits, 0)[1]
    work = LocalSgd(steps=4, batch_size=16, learning_rate=0.1, momentum=momentum, weight_decay=0.01, proximal_mu=0.1)
    targets = {"loss": {"left": 0.3, "right": 0.9}}
    trainer = TorchTrainer(digits, splits)
    plain = _train(trainer, base, work, targets=targets).rows["loss"]
    again = TorchTrainer(digits, splits)
    gradients = jacobian(again, base, work.batch_size).rows
    first = _train(again, base, work.changed(steps=1, weight_decay=0, proximal_mu=0), targets=targets).rows["loss"]
    np.testing.assert_allclose(first, 0.1 * (0.3 * gradients["left"] + 0.9 * gradients["right"]), atol=1e-7)
    made = _train(again, base, work, targets=targets, from_jacobian=True).rows["loss"]
    np.testing.assert_allclose(made, plain, rtol=0, atol=2e-6 * float(np.abs(plain).max()))


def test_a_trainer_that_has_forgotten_the_gradients_makes_them_again_to_the_same_bytes() -> None:
    twins = Twins()  # with dropout: the numbers drawn must be the same ones, too
    base = initial_model(twins, 0)[1]
    work = LocalSgd(steps=3, batch_size=10, learning_rate=0.1)
    changed = {"targets": {"loss": {"left": 0.25, "right": 0.75}}, "from_jacobian": True}
    trainer = _trainer(twins)
    gradients = jacobian(trainer, base, work.batch_size).rows
    kept = _train(trainer, base, work, **changed).rows["loss"]
    assert _train(_trainer(twins), base, work, **changed).rows["loss"].tobytes() == kept.tobytes()
    anew = jacobian(_trainer(twins), base, work.batch_size, measure=False).rows
    assert {name: row.tobytes() for name, row in anew.items()} == {n: row.tobytes() for n, row in gradients.items()}
    # Those of another round, client or model are not taken for these.
    for other in ({"round": 1}, {"client_id": "b"}, {"seed": 1}):
        jacobian(trainer, base, work.batch_size, **other)
        assert _train(trainer, base, work, **changed).rows["loss"].tobytes() == kept.tobytes()
    jacobian(trainer, base + 1, work.batch_size)
    assert _train(trainer, base, work, **changed).rows["loss"].tobytes() == kept.tobytes()


def test_a_client_trains_for_objectives_that_it_serves_alone() -> None:
    both = Both()
    one = TorchTrainer(both, both.load(DataSource()), objectives=("size",))
    assert set(_train(one, BASE).losses) == {"size", "loss"}
    assert list(jacobian(one, BASE, SGD.batch_size).rows) == ["size"]
    with pytest.raises(ValueError, match="does not serve fit"):
        _train(one, BASE, targets=joint_target(("fit", "size")))
    with pytest.raises(TaskError, match="cannot serve speed"):
        TorchTrainer(both, both.load(DataSource()), objectives=("speed",))


def test_dropout_is_on_in_training_and_other_in_every_round() -> None:
    made = Noisy()
    trainer, base = _trainer(made), initial_model(made, 0)[1]
    work = LocalSgd(steps=1, batch_size=0, learning_rate=0.1)
    rows = [_train(trainer, base, work, round=round_).rows["loss"].tobytes() for round_ in (0, 1)]
    assert rows[0] != rows[1]


# ---- what is measured


def test_losses_are_those_of_the_base_model_on_the_whole_training_split() -> None:
    line = Line()
    result = _train(_trainer(line), BASE)
    residual = line.x.astype(np.float64) @ BASE[:3] + BASE[3] - line.y
    assert result.losses["loss"] == pytest.approx(float(np.mean(residual**2)), rel=1e-6)
    assert result.metrics == {"train/loss": result.losses["loss"], "train/samples": 23}
    assert result.samples == 23
    assert result.seconds > 0


def test_the_reported_loss_is_measured_without_dropout() -> None:
    made = Noisy()
    trainer = _trainer(made)
    _, base = initial_model(made, 0)
    result = _train(trainer, base)
    assert result.metrics == {name: v for name, v in trainer.measure(base).items() if name.startswith("train/")}


def test_an_empty_split_has_samples_and_nothing_else() -> None:
    assert _trainer(Line()).measure(BASE, ("validation", "test")).keys() == {
        "validation/samples",
        "validation/loss",
        "test/samples",
    }
    assert _trainer(Line()).measure(BASE, ("test",)) == {"test/samples": 0}


def test_accuracy_is_the_share_of_right_answers() -> None:
    digits = task("digits")
    trainer = _trainer(digits)
    _, base = initial_model(digits, 0)
    model = flat.build(digits)
    vector_to_parameters(torch.from_numpy(base.copy()), model.parameters())
    test = digits.load(DataSource()).test
    with torch.no_grad():
        right = (model(test.x).argmax(1) == test.y).double().mean().item()
    assert trainer.measure(base, ("test",))["test/accuracy"] == pytest.approx(right)


def test_a_loss_that_is_not_finite_is_left_out_of_an_evaluation() -> None:
    assert _trainer(Line()).measure(np.full(4, 1e30, dtype=np.float32), ("train",)) == {"train/samples": 23}


# ---- the same bytes


@few("fashion-mnist")
@pytest.mark.parametrize("channels", [1, 3], ids=["fashion-mnist", "cifar10"])
@pytest.mark.parametrize("device", DEVICES)
def test_work_done_twice_is_the_same_bytes_whatever_was_done_between(device: str, channels: int) -> None:
    made = Noisy(channels)
    trainer = _trainer(made, device)
    _, base = initial_model(made, 0)
    work = LocalSgd(epochs=2, batch_size=5, learning_rate=0.05, momentum=0.9)
    first = _train(trainer, base, work)
    _train(trainer, base, LocalSgd(epochs=1, batch_size=7, learning_rate=0.2), round=1, client_id="b")
    trainer.measure(base + first.rows["loss"])
    torch.rand(17)
    again = _train(trainer, base, work)
    fresh = _train(_trainer(made, device), base, work)
    assert np.abs(first.rows["loss"]).max() > 0
    assert first.rows["loss"].tobytes() == again.rows["loss"].tobytes() == fresh.rows["loss"].tobytes()
    assert first.losses == again.losses == fresh.losses
    assert first.metrics == again.metrics == fresh.metrics


def test_a_model_that_draws_at_random_when_it_is_measured_draws_alike_every_time() -> None:
    class Sampling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 1)

    class Sampled(Line):
        def model(self) -> nn.Module:
            return Sampling(3, 1)

    trainer = _trainer(Sampled())
    first, measured = _train(trainer, BASE), trainer.measure(BASE)
    torch.rand(17)
    again = _train(trainer, BASE)
    assert first.losses == again.losses
    assert first.rows["loss"].tobytes() == again.rows["loss"].tobytes()
    assert measured == trainer.measure(BASE)


_ELSEWHERE = """
import sys
from federation.digests import digest
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.spec.computation import Descend
from federation.spec.train_section import LocalSgd
made = task("digits")
trainer = TorchTrainer(made, made.load(DataSource(part=Part(1, 8, "shards:2", 0))), "cpu", 1)
_, base = initial_model(made, 4)
work = Descend(sgd=LocalSgd(epochs=2, batch_size=10, learning_rate=0.1), targets={"loss": {"loss": 1.0}})
for round in map(int, sys.argv[1:]):
    result = trainer.compute(base, work, seed=9, round=round, client_id="c")
print(digest(result.rows["loss"].tobytes()), result.losses)
"""


@pytest.mark.full
def test_a_new_process_gives_the_same_bytes_as_one_that_did_other_rounds_first() -> None:
    said = [completed(["-c", _ELSEWHERE, *rounds]) for rounds in (["5"], ["0", "3", "5"])]
    assert said[0].stdout.startswith("blake3:")
    assert said[0].stdout == said[1].stdout


@pytest.mark.parametrize("end", ["well", "stopped"])
def test_torchs_global_state_is_left_as_it_was(end: str) -> None:
    trainer = _trainer(Line())
    torch.manual_seed(3)

    def state() -> tuple[Any, ...]:
        cudnn = torch.backends.cudnn
        return (
            torch.get_rng_state().tolist(),
            torch.get_deterministic_debug_mode(),
            cudnn.deterministic,
            cudnn.benchmark,
            cudnn.allow_tf32,
        )

    before = state()
    if end == "well":
        _train(trainer, BASE)
    else:
        with pytest.raises(TrainingStopped):
            _train(trainer, BASE, stopped=lambda: True)
    assert state() == before


def test_the_base_model_is_not_touched_and_may_be_read_only(tmp_path: Path) -> None:
    np.save(tmp_path / "base.npy", BASE)
    base = np.load(tmp_path / "base.npy", mmap_mode="r")
    assert np.abs(_train(_trainer(Line()), base).rows["loss"]).max() > 0
    assert np.array_equal(base, BASE)


def test_frozen_random_parts_are_the_same_at_every_member() -> None:
    class Features(Line):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(3, 50).requires_grad_(False), nn.Tanh(), nn.Linear(50, 1))

    torch.manual_seed(1)
    one = _trainer(Features())
    torch.manual_seed(2)
    other = _trainer(Features())
    _, base = initial_model(Features(), 7)
    assert len(base) == 51
    assert one.measure(base) == other.measure(base)
    assert _train(one, base).rows["loss"].tobytes() == _train(other, base).rows["loss"].tobytes()


@pytest.mark.parametrize("made", [Digits(), Noisy(3)], ids=["linear", "convolutional"])
def test_cpu_and_gpu_agree_up_to_rounding_in_float32(made: Task) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    _, base = initial_model(made, 0)
    cpu, gpu = (_train(_trainer(made, device), base).rows["loss"] for device in ("cpu", "cuda"))
    assert np.linalg.norm(gpu - cpu) < 1e-3 * np.linalg.norm(cpu)


def test_no_layer_is_rounded_to_tf32_unless_the_owners_code_has_chosen() -> None:
    cudnn, seen = torch.backends.cudnn, set()

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(cudnn.allow_tf32)
            return super().forward(x)

    class Watched(Line):
        def model(self) -> nn.Module:
            return Seen(3, 1)

    trainer = _trainer(Watched())
    assert cudnn.allow_tf32, "PyTorch's default"
    _train(trainer, BASE)
    assert seen == {False}
    if not hasattr(cudnn, "conv"):
        pytest.skip("this PyTorch has no newer switches")
    newer: Any = cudnn.conv
    newer.fp32_precision = "ieee"
    try:
        _train(_trainer(Line()), BASE)
        assert newer.fp32_precision == "ieee"
    finally:
        newer.fp32_precision = "tf32"
