"""The options of local training: each against a plain loop of PyTorch, in every backend, or refused with the reason."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from coordinator.rounds.runs.specification import cautions, parse_run
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import Asked
from federation.spec.computation import PrivateSgd
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.schedules import Schedule
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Splits, Task, initial_model, task
from federation.tasks import parameters as flat
from federation.training.sgd import minibatches
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import training_seed
from federation.v1.common_pb2 import TrainWork
from federation.vectors import Vector
from federation.work.base import Shape, WorkError
from federation.work.train import wire
from federation.work.train.work import Train
from fedpareto.face.simulated import simulate
from fedpareto.simulation.simulate import Simulation
from tests.federation.training.scene import DEVICES
from tests.few import few
from tests.trained import jacobian, train

RUN = 'name = "options"\ntask = "digits"\nrounds = 3\nseed = 3\nsimulation = { clients = 3 }\n'


class Curve(Task):
    """A small network on 23 samples. It remembers how many samples passed through it at a time."""

    evaluation_batch = 64

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def load(self, source: DataSource) -> Splits:
        random = torch.Generator().manual_seed(0)
        whole = Dataset(torch.randn(23, 6, generator=random), torch.randn(23, generator=random))
        return Splits(whole, whole, whole)

    def losses(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        if output.requires_grad:
            self.sizes.append(len(y))
        return {"loss": functional.mse_loss(output[:, 0], y)}

    def correct(self, output: Tensor, y: Tensor) -> None:
        return None


def curve(device: str = "cpu") -> tuple[Curve, Vector, TorchTrainer]:
    """The task, its initial model, and its trainer."""
    learned = Curve()
    return learned, initial_model(learned, 0)[1], TorchTrainer(learned, learned.load(DataSource()), device, 1)


def sgd(**changed: Any) -> LocalSgd:
    return LocalSgd(**({"epochs": 3, "batch_size": 10, "learning_rate": 0.05} | changed))


def by_hand(
    work: LocalSgd,
    optimizer: Callable[..., torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    device: str = "cpu",
) -> Vector:
    """What a plain loop makes of the initial model."""
    learned = Curve()
    base = initial_model(learned, 0)[1]
    model = flat.build(learned).to(device)
    vector_to_parameters(torch.from_numpy(base.copy()).to(device), model.parameters())
    data = learned.load(DataSource()).train
    moves = optimizer(model.parameters(), lr=work.learning_rate)
    rates = schedule(moves) if schedule else None
    batches = minibatches(data, work.batch_size, training_seed(0, 0, "a"), work.count(len(data)))
    scaler = torch.amp.GradScaler(device, enabled=work.precision == "fp16")
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for _ in range(work.count(len(data))):
        x, y = (part.to(device) for part in next(batches))
        moves.zero_grad()
        with torch.autocast(device, types.get(work.precision), enabled=work.precision in types):
            loss = functional.mse_loss(model(x)[:, 0], y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if work.clip_norm:
            scaler.unscale_(moves)
            nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        scaler.step(moves)
        scaler.update()
        if rates:
            rates.step()
    return np.concatenate([part.ravel() for part in flat.values(model).values()])


def trained(work: LocalSgd, device: str = "cpu", **given: Any) -> Vector:
    """What the built-in trainer makes of the initial model."""
    _, base, trainer = curve(device)
    return base - train(trainer, base, work, **given).rows["loss"]


def same(found: Vector, expected: Vector) -> None:
    """Equal but for the last bits, which depend on where tensors lie in memory, and on base - (base - w)."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-7)


# ---- against a plain loop


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "made", "options"),
    [
        ("adam", torch.optim.Adam, {}),
        ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
        ("adam", torch.optim.Adam, {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    ],
)
def test_an_optimiser_makes_the_steps_of_torchs(name: str, made: Any, options: dict[str, float], device: str) -> None:
    def of_torch(parameters: Any, lr: float) -> torch.optim.Optimizer:
        given: dict[str, Any] = {key: value for key, value in options.items() if not key.startswith(("beta", "eps"))}
        if "beta1" in options:
            given |= {"betas": (options["beta1"], options["beta2"]), "eps": options["epsilon"]}
        found: torch.optim.Optimizer = made(parameters, lr=lr, **({"weight_decay": 0.0} | given))
        return found

    work = sgd(optimizer=name, **options)
    same(trained(work, device), by_hand(work, of_torch, device=device))


def test_adam_starts_afresh_in_every_training() -> None:
    _, base, trainer = curve()
    first, second = (train(trainer, base, sgd(optimizer="adam")).rows["loss"].tobytes() for _ in range(2))
    assert first == second


def test_adam_adds_the_proximal_term_and_leaves_frozen_columns_alone() -> None:
    _, base, trainer = curve()
    free, near = (trained(sgd(optimizer="adam", proximal_mu=mu)) for mu in (0.0, 100.0))
    assert np.linalg.norm(near - base) < np.linalg.norm(free - base) / 1.5
    work = sgd(optimizer="adamw", weight_decay=0.1)
    update = train(trainer, base, work, frozen=(slice(0, 96),)).rows["loss"]
    assert not update[:96].any()
    assert update[96:].all()


@pytest.mark.parametrize(
    ("options", "of_torch"),
    [
        ({"step_schedule": "cosine"}, lambda moves: torch.optim.lr_scheduler.CosineAnnealingLR(moves, T_max=9)),
        (
            {"step_schedule": "decay", "step_decay": 0.5, "step_decay_every": 2},
            lambda moves: torch.optim.lr_scheduler.StepLR(moves, 2, 0.5),
        ),
        ({"step_warm_up": 4}, lambda moves: torch.optim.lr_scheduler.LinearLR(moves, start_factor=0.2, total_iters=4)),
    ],
)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_schedule_over_the_steps_is_that_of_torch(options: dict[str, Any], of_torch: Any, name: str) -> None:
    work = sgd(optimizer=name, **options)
    assert work.count(23) == 9
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    same(trained(work), by_hand(work, optimizer, of_torch))
    assert np.abs(trained(work) - trained(sgd(optimizer=name))).max() > 1e-3


def test_a_warm_up_comes_before_the_rest_of_a_schedule() -> None:
    cosine = Schedule(shape="cosine", warm_up=2)
    expected = [1 / 3, 2 / 3, *((1 + math.cos(math.pi * place / 4)) / 2 for place in range(4))]
    assert [cosine.factor(place, 6) for place in range(6)] == pytest.approx(expected)
    decay = Schedule(shape="decay", warm_up=1, decay=0.1, decay_every=2)
    assert [decay.factor(place, 6) for place in range(6)] == pytest.approx([0.5, 1, 1, 0.1, 0.1, 0.01])
    assert [Schedule(warm_up=9).factor(place, 2) for place in range(2)] == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_clipped_as_torch_clips_them(device: str) -> None:
    work = sgd(clip_norm=0.05, momentum=0.5)
    found = trained(work, device)
    same(found, by_hand(work, lambda parameters, lr: torch.optim.SGD(parameters, lr, 0.5), device=device))
    assert np.linalg.norm(found - trained(sgd(momentum=0.5), device)) > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_torchs_autocast_and_measures_in_float32(device: str) -> None:
    work = sgd(precision="bf16")
    same(trained(work, device), by_hand(work, torch.optim.SGD, device=device))
    difference = np.abs(trained(work, device) - trained(sgd(), device)).max()
    assert 1e-5 < difference < 1e-2
    _, base, trainer = curve(device)
    assert train(trainer, base, work).losses == train(trainer, base, sgd()).losses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_fp16_is_torchs_autocast_with_a_scaled_loss(clip: float) -> None:
    work = sgd(epochs=8, precision="fp16", clip_norm=clip)
    same(trained(work, "cuda"), by_hand(work, torch.optim.SGD, device="cuda"))
    assert np.abs(trained(work, "cuda") - trained(sgd(epochs=8, clip_norm=clip), "cuda")).max() > 1e-6


def test_micro_batches_change_nothing_but_memory_and_rounding() -> None:
    learned, base, trainer = curve()
    whole = train(trainer, base, sgd(epochs=1)).rows["loss"]
    assert learned.sizes == [1, 10, 10, 3]  # a single sample is tried once
    learned.sizes.clear()
    parts = train(trainer, base, sgd(epochs=1, micro_batch=4)).rows["loss"]
    assert learned.sizes == [4, 4, 2, 4, 4, 2, 3]
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)
    assert train(trainer, base, sgd(epochs=1, micro_batch=10)).rows["loss"].tobytes() == whole.tobytes()


def test_a_first_step_made_of_gradients_is_a_step_of_adam_too() -> None:
    _, base, trainer = curve()
    work = sgd(optimizer="adam", clip_norm=0.05, step_schedule="cosine")
    plain = train(trainer, base, work).rows["loss"]
    jacobian(trainer, base, work.batch_size)
    np.testing.assert_allclose(train(trainer, base, work, from_jacobian=True).rows["loss"], plain, rtol=0, atol=1e-6)


# ---- on the way to the client


def test_an_option_travels_and_one_that_is_not_there_keeps_its_default() -> None:
    shape = Shape(initial_model(Curve(), 0)[0], ("loss",), ("loss",))
    full = sgd(
        optimizer="adam", beta1=0.0, beta2=0.5, epsilon=1e-4, clip_norm=2.0, micro_batch=2, precision="bf16",
        step_schedule="decay", step_warm_up=3, step_decay=0.7, step_decay_every=4,
    )  # fmt: skip
    for work in (sgd(), full):
        sent = wire.to_proto(Train(sgd=work, targets={"loss": {"loss": 1.0}}))
        message = TrainWork.FromString(sent.SerializeToString())
        assert wire.from_proto(message, shape).sgd == work
    bare = TrainWork(epochs=3, batch_size=10, learning_rate=0.05)
    assert wire.from_proto(bare, shape).sgd == sgd()
    for key, value in (("optimizer", "lamb"), ("precision", "int8"), ("step_schedule", "zigzag"), ("step_decay", 2.0)):
        with pytest.raises(WorkError, match=str(value)):
            wire.from_proto(TrainWork(epochs=3, learning_rate=0.05, **dict[str, Any]({key: value})), shape)


def test_the_rate_of_a_round_follows_its_schedule_at_client_and_coordinator() -> None:
    spec = RunSpec.parse(RUN + "train = { learning_rate = 0.4, round_schedule = 'cosine', round_warm_up = 1 }\n")
    rates = [TrainingPhase().work(Asked("a", ("loss",), spec, number)).sgd.learning_rate for number in range(3)]
    assert rates == pytest.approx([0.2, 0.4, 0.2])
    assert rates == [spec.train.rate(number, 3) for number in range(3)]


def test_updates_shrink_with_the_rate_of_their_round() -> None:
    train = "{ steps = 1, batch_size = 0, learning_rate = 0.01, round_schedule = 'decay', round_decay = 0.1 }"
    history = simulate(f"{RUN}train = {train}\nalgorithm.name = 'fedavg'\n")
    norms = history.replies.groupby("round")["norm"].mean().tolist()
    assert norms[1] / norms[0] == pytest.approx(0.1, rel=0.1)
    assert norms[2] / norms[1] == pytest.approx(0.1, rel=0.1)


# ---- in simulations


@few("optimizer = 'adamw', step_schedule = 'cosine', step_warm_up = 2")
@pytest.mark.parametrize(
    "options",
    ["optimizer = 'adam', weight_decay = 0.01", "optimizer = 'adamw', step_schedule = 'cosine', step_warm_up = 2"],
)
@pytest.mark.full
def test_stacked_clients_train_with_these_options_as_single_ones_do(options: str) -> None:
    text = f"{RUN}train = {{ batch_size = 40, learning_rate = 0.002, {options} }}\n"
    one, together = (simulate(text, backend=backend) for backend in ("loop", "stacked"))
    np.testing.assert_allclose(together.model, one.model, rtol=0, atol=2e-4 * float(np.abs(one.model).max()))


@pytest.mark.parametrize(
    ("options", "stacks"),
    [
        ("clip_norm = 1.0", False),
        ("micro_batch = 5", False),
        ("precision = 'bf16'", False),
        ("optimizer = 'adam'", True),
        ("step_schedule = 'cosine'", True),
    ],
)
def test_a_backend_that_cannot_do_an_option_is_refused_and_auto_takes_another(
    options: str, stacks: bool, tmp_path: Path
) -> None:
    text = f"{RUN}train = {{ steps = 1, {options} }}\n"
    with Simulation(text.encode(), tmp_path / "auto") as simulation:
        assert simulation.backend.name == ("stacked" if stacks else "loop")
    if not stacks:
        with pytest.raises(
            ValueError, match=r"train\.clip_norm, micro_batch and precision are for one client at a time"
        ):
            simulate(text, backend="stacked")
    with pytest.raises(ValueError, match="only plain SGD can be"):
        simulate(text, backend="compiled")


def test_fp16_without_a_gpu_is_refused_with_the_reason() -> None:
    _, base, trainer = curve()
    with pytest.raises(WorkError, match=r'train\.precision = "fp16" needs a CUDA device') as caught:
        train(trainer, base, sgd(precision="fp16"))
    assert caught.value.reason == "precision"
    with pytest.raises(ValueError, match=r'train\.precision = "fp16" needs a CUDA device'):
        simulate(f"{RUN}train.precision = 'fp16'\n", device="cpu")
    assert any("decline" in words for words in cautions(*parse_run(f"{RUN}train.precision = 'fp16'\n")))


# ---- refused when a run is submitted


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("train.optimizer = 'lamb'", "train.optimizer: Input should be 'sgd', 'adam' or 'adamw'; got 'lamb'"),
        ("train.precision = 'fp8'", "train.precision: Input should be 'float32', 'bf16' or 'fp16'; got 'fp8'"),
        ("train.clip_norm = -1.0", "train.clip_norm: Input should be greater than or equal to 0; got -1.0"),
        ("train.micro_batch = -1", "train.micro_batch: Input should be greater than or equal to 0; got -1"),
        ("train.beta1 = 0.9", 'train: beta1 is for optimizer = adam or adamw, not for "sgd"'),
        ("train = { optimizer = 'adam', momentum = 0.9 }", 'train: momentum is for optimizer = sgd, not for "adam"'),
        ("train = { optimizer = 'adam', epsilon = 0 }", "train.epsilon: Input should be greater than 0; got 0"),
        ("train.step_decay = 0.5", 'train: step_decay is for step_schedule = decay, not for "constant"'),
        ("train = { round_schedule = 'decay', round_decay = 0 }", "train.round_decay: Input should be greater than 0"),
        ("train.round_schedule = 'linear'", "train.round_schedule: Input should be 'constant', 'decay' or 'cosine'"),
        (
            "train.clip_norm = 1.0\nprivacy.sample_noise = 1.0",
            "train.clip_norm: the gradient of each sample is clipped already; leave it out (privacy.sample_noise)",
        ),
        ("train.micro_batch = 1\nprivacy.sample_noise = 1.0", "train.micro_batch: gradients are made sample by sample"),
        ("train.precision = 'bf16'\nprivacy.sample_noise = 1.0", 'gradients that get noise are made in "float32"'),
        (
            "train.optimizer = 'adam'\nalgorithm.name = 'q-fedavg'",
            "train.optimizer: q-fedavg as it is set up divides updates by train.learning_rate",
        ),
        ("train.step_warm_up = 2\nalgorithm = { name = 'fsmgda', sums = true }", "train.step_warm_up: fsmgda as it is"),
        ("train.step_schedule = 'cosine'\nalgorithm.name = 'fedmdfg'", "train.step_schedule: fedmdfg as it is set up"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(keys: str, message: str) -> None:
    with pytest.raises(SpecError, check=lambda error: message in str(error)):
        parse_run(f"{RUN}{keys}\n")


@pytest.mark.parametrize(
    "keys",
    [
        "train.optimizer = 'adam'\nalgorithm = { name = 'q-fedavg', lipschitz = 10.0 }",
        "train.optimizer = 'adam'\nalgorithm.name = 'fsmgda'",
        "train = { optimizer = 'adam', step_schedule = 'cosine' }\nprivacy.sample_noise = 1.0",
        "train.round_schedule = 'cosine'\nalgorithm.name = 'fedmdfg'",
    ],
)
def test_what_can_work_is_accepted(keys: str) -> None:
    assert parse_run(f"{RUN}{keys}\n")


def test_a_large_rate_for_adam_is_pointed_out() -> None:
    assert any("large for adam" in words for words in cautions(*parse_run(f"{RUN}train.optimizer = 'adam'\n")))
    text = f"{RUN}train = {{ optimizer = 'adam', learning_rate = 0.001 }}\n"
    assert not any("large" in words for words in cautions(*parse_run(text)))


def test_private_training_takes_steps_of_adam() -> None:
    pytest.importorskip("opacus", reason="needs fedpareto[dp]")
    digits = task("digits")
    trainer = TorchTrainer(digits, digits.load(DataSource()), "cpu", 1)
    base = initial_model(digits, 0)[1]
    work = LocalSgd(steps=1, batch_size=50, learning_rate=0.01, optimizer="adam")
    rows = train(trainer, base, work, private=PrivateSgd(noise=1.0, clip=1.0), measure=False).rows
    moved = np.abs(rows["loss"])
    assert moved.max() == pytest.approx(0.01, rel=1e-3)  # the first step of Adam: the rate in each coordinate
