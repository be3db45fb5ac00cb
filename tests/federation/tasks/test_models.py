"""The models of the built-in tasks: the papers' sizes, layers and losses, and training that gives the same bytes."""

import math
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, Splits, initial_model, task
from federation.tasks import parameters as flat
from federation.tasks.networks import CharacterLstm, LocalResponseNorm, cifar_cnn, fedfv_linear, fedfv_mnist_cnn
from federation.training.torch_trainer import TorchTrainer
from tests.federation.training.scene import DEVICES
from tests.trained import train

# Task, parameters, shape and element type of a sample, outputs, classes.
TASKS = [
    ("digits", 4810, (64,), torch.float32, 10, 10),
    ("mnist", 21_840, (1, 28, 28), torch.uint8, 10, 10),
    ("fashion-mnist", 21_840, (1, 28, 28), torch.uint8, 10, 10),
    ("cifar10", 797_962, (3, 32, 32), torch.uint8, 10, 10),
    ("emnist", 1_206_590, (1, 28, 28), torch.uint8, 62, 62),
    ("femnist", 1_206_590, (1, 28, 28), torch.uint8, 62, 62),
    ("adult", 200, (99,), torch.uint8, 2, 2),
    ("shakespeare", 819_920, (16,), torch.uint8, 80, 80),
    ("fashion-mnist-3", 2355, (784,), torch.float32, 3, 3),
    ("cifar10-fedfv", 656_810, (3, 32, 32), torch.uint8, 10, 10),
    ("mnist-fedfv", 608_702, (1, 28, 28), torch.uint8, 62, 10),
    ("mnist-fedfv-standardised", 608_702, (1, 28, 28), torch.uint8, 62, 10),
]


def samples(shape: tuple[int, ...], kind: torch.dtype, count: int, classes: int) -> Dataset:
    """Random samples; bytes below 80, which are symbols too."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.integers(0, 80, (count, *shape))).to(kind)
    return Dataset(x / 80 if kind == torch.float32 else x, torch.from_numpy(random.integers(0, classes, count)))


@pytest.mark.parametrize(("name", "parameters", "shape", "kind", "outputs", "classes"), TASKS)
def test_the_models_have_the_papers_sizes(
    name: str, parameters: int, shape: tuple[int, ...], kind: torch.dtype, outputs: int, classes: int
) -> None:
    layout, vector = initial_model(task(name), seed=0)
    assert layout.size == parameters
    assert vector.shape == (parameters,)
    assert vector.dtype == np.float32
    model = task(name).model()
    assert [tensor.name for tensor in layout.tensors] == [name for name, _ in model.named_parameters()]
    assert model(samples(shape, kind, 2, classes).x).shape == (2, outputs)


@pytest.mark.parametrize(
    ("name", "size", "encoder", "heads", "first"),
    [
        ("celeba", 11_209_872, 11_168_832, 40, "5-o-clock-shadow"),
        ("celeba-5", 11_189_352, 11_168_832, 5, "group-1"),
        ("river-flow", 2816, 2744, 8, "chsi2"),
        ("qm9", 617_675, 616_960, 11, "mu"),
    ],
)
def test_the_models_of_many_objectives_have_the_published_sizes_and_a_linear_head_for_each_after_the_encoder(
    name: str, size: int, encoder: int, heads: int, first: str
) -> None:
    with torch.device("meta"):  # shapes without numbers
        layout = flat.layout(task(name).model())
    shared = [tensor for tensor in layout.tensors if tensor.name.startswith("encoder.")]
    assert (layout.size, sum(tensor.size for tensor in shared)) == (size, encoder)
    objectives = task(name).objectives
    assert (len(objectives), objectives[0]) == (heads, first)
    names = [tensor.name for tensor in layout.tensors[len(shared) :]]
    assert names == [f"heads.{objective}.{kind}" for objective in objectives for kind in ("weight", "bias")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "parameters", "shape", "kind", "outputs", "classes"), TASKS[4:])
def test_the_built_in_tasks_train_to_the_same_bytes_twice(
    name: str, parameters: int, shape: tuple[int, ...], kind: torch.dtype, outputs: int, classes: int, device: str
) -> None:
    data = samples(shape, kind, 3, classes)
    work = LocalSgd(steps=2, batch_size=2, learning_rate=0.1)
    base = initial_model(task(name), seed=1)[1]
    trainer = TorchTrainer(task(name), Splits(data, data, data), device)
    one, two = (train(trainer, base, work, seed=0, round=3, client_id="c") for _ in range(2))
    assert one.rows["loss"].tobytes() == two.rows["loss"].tobytes()
    assert np.count_nonzero(one.rows["loss"])
    assert set(one.metrics) == {"train/samples", "train/loss", "train/accuracy"}


def test_the_layers_of_the_cifar_model_count_as_in_the_paper() -> None:
    counts = [sum(p.numel() for p in layer.parameters()) for layer in cifar_cnn().children()]
    assert [count for count in counts if count] == [4864, 102_464, 614_784, 73_920, 1930]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_our_local_response_norm_is_torchs(size: int) -> None:
    x = torch.randn(3, 7, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine, reference = LocalResponseNorm(size)(ours), nn.LocalResponseNorm(size)(theirs)
    torch.testing.assert_close(mine, reference)
    mine.square().sum().backward()
    reference.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_one_bias_for_each_gate_would_give_the_other_count_that_is_printed() -> None:
    model = CharacterLstm()
    total = sum(p.numel() for p in model.parameters())
    assert total - sum(p.numel() for name, p in model.named_parameters() if "bias_hh" in name) == 817_872


def test_a_character_is_told_from_those_before_it_and_their_order() -> None:
    torch.manual_seed(0)
    model = CharacterLstm(hidden=16)
    text = torch.arange(80, dtype=torch.uint8).repeat(12, 1)
    text[torch.arange(10), 79 - torch.arange(10)] = 0  # row i has another character, i places before the end
    text[10, [78, 79]] = text[10, [79, 78]]
    assert len(model(text).unique(dim=0)) == 12


@pytest.mark.parametrize(("name", "outputs"), [("fashion-mnist-3", 3), ("cifar10-fedfv", 10), ("mnist-fedfv", 62)])
def test_the_reproductions_of_fedfv_take_the_softmax_twice(name: str, outputs: int) -> None:
    logits = torch.tensor([[1000.0] + [0.0] * (outputs - 1)])
    best = task(name).losses(logits, torch.tensor([0]))["loss"]
    assert float(best) == pytest.approx(math.log(1 + (outputs - 1) / math.e), abs=1e-6)
    plain = functional.cross_entropy(torch.softmax(logits / 1000, dim=1), torch.tensor([1]))
    assert float(task(name).losses(logits / 1000, torch.tensor([1]))["loss"]) == pytest.approx(float(plain))
    assert task(name).correct(logits, torch.tensor([0])).all()  # type: ignore[union-attr]


def test_fedfvs_linear_model_starts_with_a_bias_of_zero_and_its_mnist_model_ends_with_relu() -> None:
    linear = cast(nn.Sequential, fedfv_linear())
    assert not linear.get_parameter("out.bias").any()
    assert linear.get_parameter("out.weight").any()
    assert (fedfv_mnist_cnn()(torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8)) >= 0).all()
