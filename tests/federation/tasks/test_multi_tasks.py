"""Images made of two: composed from their sets, with two labels, the papers' models, and rotations in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from federation.spec.train_section import LocalSgd
from federation.tasks import DataError, DataSource, Part, Pool, Task, initial_model, task
from federation.tasks.augmentation import rotated
from federation.tasks.digits import write_parts
from federation.tasks.pairs import blended, overlaid
from federation.tasks.partition import partition
from federation.tasks.vision import Half, Vision
from federation.training.determinism import deterministic
from federation.training.torch_trainer import TorchTrainer
from tests.federation.tasks.scene import copy_few, picture, published, refused, write_copies, write_idx
from tests.paths import PUBLIC_DATA
from tests.trained import train

CPU = torch.device("cpu")
COLOUR = (0.4914, 0.4822, 0.4465)

# Task, objectives, parameters of the encoder and of one head, shape of a sample.
TASKS = [
    ("two-digits", ("left", "right"), 4128, 330, (8, 16)),
    ("multi-mnist", ("left", "right"), 28_515, 3060, (1, 28, 28)),
    ("mnist-fashion", ("digit", "garment"), 28_515, 3060, (1, 28, 28)),
    ("cifar10-mnist", ("object", "digit"), 1_685_888, 20_310, (3, 32, 32)),
]
# FMOL's form of multi-mnist has the images of multi-mnist and another network.
PLAIN_LENET = ("multi-mnist-fmol", ("left", "right"), 21_330, 510, (1, 28, 28))
every_task = pytest.mark.parametrize("name", [name for name, *_ in TASKS])
every_composed_task = pytest.mark.parametrize("name", [name for name, *_ in TASKS[1:]])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DataSource:
    """Small sets as they are published. No two images are alike, and each has one colour.

    Digits: 40 of brightness 1 to 40, 20 for testing from 101 on. Garments: likewise from 51 and 151 on. Photographs: 30
    and, for testing, 25.
    """
    root, random = tmp_path_factory.mktemp("made"), np.random.default_rng(0)
    for dataset, first in (("MNIST", 1), ("FashionMNIST", 51)):
        for half, start, count in (("train", first, 40), ("t10k", first + 100, 20)):
            images = np.broadcast_to(np.arange(start, start + count)[:, None, None], (count, 28, 28))
            write_idx(root / dataset / "raw" / half, images, random.integers(0, 10, count))
    files = [picture((number, 255 - number, 90)) for number in range(55)]
    write_copies(root, files, random.integers(0, 10, 55, np.uint8), np.repeat(np.arange(2, dtype=np.uint8), (30, 25)))
    return DataSource(root)


def of(name: str, made: DataSource) -> tuple[Task, DataSource]:
    return task(name), DataSource() if name == "two-digits" else made


def halves(pool: Pool) -> list[tuple[Half, Pool]]:
    assert pool.test is not None
    return [("train", pool), ("test", pool.test)]


def images_of(name: str, source: DataSource, half: Half) -> tuple[np.ndarray, np.ndarray]:
    vision = task(name)
    assert isinstance(vision, Vision)
    return vision.images(source, half)


# ---- what is composed


def test_two_digits_stand_side_by_side_each_of_them_once_on_either_side() -> None:
    single, pool = task("digits").pool(DataSource()), task("two-digits").pool(DataSource())
    assert pool.x.shape == (1797, 8, 16)
    left, right = (pool.x[:, :, side].reshape(-1, 64) for side in (slice(8), slice(8, 16)))
    assert torch.equal(left, single.x)
    assert torch.equal(pool.y[:, 0], single.y)
    number = {row.tobytes(): index for index, row in enumerate(single.x.numpy())}
    other = [number[row.tobytes()] for row in right.numpy()]
    assert sorted(other) == list(range(1797))
    assert all(index != partner for index, partner in enumerate(other))
    assert torch.equal(pool.y[:, 1], single.y[other])


def test_a_member_pairs_the_digits_of_its_own_file(tmp_path: Path) -> None:
    directories = [tmp_path / str(index) for index in range(4)]
    write_parts(directories, scheme="shards:2", seed=3)
    for directory in directories:
        single, pool = (task(name).pool(DataSource(directory)) for name in ("digits", "two-digits"))
        for column in range(2):
            assert torch.equal(pool.y[:, column].bincount(minlength=10), single.y.bincount(minlength=10))
    with pytest.raises(DataError, match="write_parts"):
        task("two-digits").pool(DataSource(tmp_path))


@pytest.mark.parametrize(
    ("name", "second", "darkest", "offset", "side"),
    [("multi-mnist", "mnist", 1, 6, 36), ("mnist-fashion", "fashion-mnist", 51, 14, 42)],
)
def test_two_images_of_the_same_half_overlap_and_each_has_its_label(
    made: DataSource, name: str, second: str, darkest: int, offset: int, side: int
) -> None:
    for half, pool in halves(task(name).pool(made)):
        images, labels = images_of("mnist", made, half)
        others, other_labels = images_of(second, made, half)
        brightness = pool.x[:, 0, 24, 24].numpy().astype(int)  # where the first image does not reach
        number = brightness - darkest - (100 if half == "test" else 0)
        assert np.array_equal(pool.x.numpy(), overlaid(images, others[number], offset=offset, side=side))
        assert np.array_equal(pool.y.numpy(), np.stack([labels, other_labels[number]], axis=1))
        once = sorted(number) == list(range(len(others)))
        assert once == (name == "mnist-fashion")


def test_the_forms_of_multi_mnist_have_an_l1_loss_of_at_most_two_or_images_that_stay_as_they_are(
    made: DataSource,
) -> None:
    pool = task("multi-mnist").pool(made)
    for name in ("multi-mnist-l1", "multi-mnist-fmol", "multi-mnist-fmol-256"):
        form = task(name).pool(made)
        assert torch.equal(form.x, pool.x)
        assert torch.equal(form.y, pool.y)
    plain = task("multi-mnist-fmol")
    labels = plain.pool(made).labels
    assert labels is not None
    assert labels.tolist() == pool.y[:, 0].tolist()  # dealt by the left digit alone
    assert torch.equal(plain.augment(pool.x[:4]), pool.x[:4])
    logits = {side: torch.randn(40, 10, generator=torch.Generator().manual_seed(1)) for side in ("left", "right")}
    losses = task("multi-mnist-l1").losses(logits, pool.y)  # the first digit has the l1 loss
    assert tuple(losses) == ("left", "right")
    assert torch.equal(losses["right"], plain.losses(logits, pool.y)["right"])
    truth = torch.nn.functional.one_hot(pool.y[:, 0], 10)
    assert torch.allclose(losses["left"], 10 * torch.nn.functional.l1_loss(logits["left"].softmax(1), truth.float()))
    assert 0 < losses["left"] < 2


def test_a_photograph_bears_the_digit_of_its_own_number(made: DataSource) -> None:
    for half, pool in halves(task("cifar10-mnist").pool(made)):
        photographs, kinds = images_of("cifar10", made, half)
        digits, labels = images_of("mnist", made, half)
        chosen = np.arange(len(photographs)) % len(digits)  # 25 photographs to test on, but 20 digits
        assert np.array_equal(pool.x.numpy(), blended(photographs, digits[chosen]))
        assert np.array_equal(pool.y.numpy(), np.stack([kinds, labels[chosen]], axis=1))


@pytest.mark.parametrize(("offset", "side"), [(6, 36), (14, 42)])
def test_the_canvas_is_made_smaller_as_pillow_does(offset: int, side: int) -> None:
    first, second = np.random.default_rng(1).integers(0, 256, (2, 3, 1, 28, 28), dtype=np.uint8)
    result = overlaid(first, second, offset=offset, side=side)
    assert result.shape == (3, 1, 28, 28)
    for number in range(3):
        canvas = np.zeros((2, side, side), np.uint8)
        canvas[0, :28, :28] = first[number, 0]
        canvas[1, offset : offset + 28, offset : offset + 28] = second[number, 0]
        smaller = Image.fromarray(canvas.max(axis=0)).resize((28, 28), Image.Resampling.NEAREST)
        assert np.array_equal(result[number, 0], np.asarray(smaller))


def test_a_digit_covers_the_middle_of_a_photograph_where_it_has_ink_as_pillow_does() -> None:
    random = np.random.default_rng(1)
    photographs = random.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    digits = random.integers(0, 256, (3, 1, 28, 28), dtype=np.uint8) * random.integers(0, 2, (3, 1, 28, 28), np.uint8)
    before = photographs.copy()
    result = blended(photographs, digits)
    assert np.array_equal(photographs, before)
    for number in range(3):
        wanted, digit = Image.fromarray(photographs[number].transpose(1, 2, 0)), Image.fromarray(digits[number, 0])
        wanted.paste(digit.convert("RGB"), (2, 2), digit.point([0] + 255 * [156]))
        assert np.array_equal(result[number].transpose(1, 2, 0), np.asarray(wanted))


@every_task
def test_whoever_composes_gets_the_same_and_nothing_is_written(made: DataSource, name: str) -> None:
    loaded, source = of(name, made)
    assert made.directory is not None
    before = sorted(made.directory.rglob("*"))
    one, two = (loaded.pool(source) for _ in range(2))
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.y, two.y)
    assert sorted(made.directory.rglob("*")) == before


@every_task
def test_dirichlet_deals_by_both_labels_as_one(made: DataSource, name: str) -> None:
    loaded, source = of(name, made)
    pool = loaded.pool(source)
    assert pool.labels is not None
    assert np.array_equal(pool.labels, pool.y.numpy() @ [10, 1])
    dealt = partition(pool, Part(0, 5, "dirichlet:0.3"))
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(len(pool)))
    own = loaded.load(DataSource(source.directory, Part(1, 5, "dirichlet:0.3")))
    assert len(own.train) + len(own.validation) + len(own.test) == len(dealt[1])


@pytest.mark.parametrize(("images", "labels"), [(3, 2), (2, 3), (0, 0)])
def test_images_without_labels_are_not_composed(tmp_path: Path, images: int, labels: int) -> None:
    write_idx(tmp_path / "MNIST" / "raw" / "train", np.zeros((images, 28, 28)), np.arange(labels))
    assert str(tmp_path) in refused("multi-mnist", tmp_path, f"MNIST has {images} images and {labels} labels")


# ---- the published files


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "folders"),
    [("multi-mnist", ["MNIST"]), ("mnist-fashion", ["MNIST", "FashionMNIST"])],
)
def test_the_published_grey_images_are_composed(name: str, folders: list[str]) -> None:
    pool = task(name).pool(published(*folders))
    for (_, part), samples in zip(halves(pool), (60_000, 10_000), strict=True):
        assert part.x.shape == (samples, 1, 28, 28)
        assert part.x.dtype == torch.uint8
        assert part.labels is not None
        # The labels of a pair have nothing to do with each other: no pair is much rarer or more frequent than others.
        shares = np.bincount(part.labels, minlength=100) / (samples / 100)
        assert len(shares) == 100
        assert 0.6 < shares.min() < shares.max() < 1.6
    assert pool.y[:10, 0].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


def test_digits_are_put_on_the_published_jpeg_copies(tmp_path: Path) -> None:
    published("MNIST", "cifar10_jpeg")
    (tmp_path / "MNIST").symlink_to(PUBLIC_DATA / "MNIST")
    copy_few(tmp_path, 10, by_class=False)
    pool = task("cifar10-mnist").pool(DataSource(tmp_path))
    assert pool.x.shape == (10, 3, 32, 32)
    assert pool.y.tolist() == [[0, digit] for digit in (5, 0, 4, 1, 9, 2, 1, 3, 1, 4)]
    plain = task("cifar10").pool(DataSource(tmp_path)).x
    covered = (pool.x != plain).any(dim=1).float().mean(dim=(1, 2))
    assert 0.05 < float(covered.min()) < float(covered.max()) < 0.4


# ---- models


@pytest.mark.parametrize(("name", "objectives", "encoder", "head", "size"), [*TASKS, PLAIN_LENET])
def test_the_models_have_the_papers_sizes_and_heads_named_after_the_objectives(
    name: str, objectives: tuple[str, ...], encoder: int, head: int, size: tuple[int, ...]
) -> None:
    loaded = task(name)
    assert loaded.objectives == objectives
    layout, vector = initial_model(loaded, seed=0)
    assert len(vector) == encoder + 2 * head
    owners = [tensor.name.split(".")[1] if tensor.name.startswith("heads.") else "" for tensor in layout.tensors]
    assert owners == sorted(owners, key=("", *objectives).index)
    sizes = dict.fromkeys(owners, 0)
    for owner, tensor in zip(owners, layout.tensors, strict=True):
        sizes[owner] += tensor.size
    assert sizes == {"": encoder, objectives[0]: head, objectives[1]: head}
    x = torch.rand(3, *size) if name == "two-digits" else torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    output = loaded.model()(x)
    assert list(output) == list(objectives)
    for logits in output.values():
        assert logits.shape == (3, 10)
        assert (logits < 0).any()  # no softmax, nor another activation, is in the model


def test_the_plain_lenet_of_fmol_has_no_dropout_and_one_linear_layer_for_each_objective(made: DataSource) -> None:
    for name in ("multi-mnist-fmol", "multi-mnist-fmol-256"):
        model, x = task(name).model().train(), task(name).pool(made).x[:4]
        first, second = model(x), model(x)
        assert all(torch.equal(first[side], second[side]) for side in ("left", "right"))
        assert [type(head) for head in model.get_submodule("heads").children()] == [torch.nn.Linear] * 2
        assert {layer.kernel_size for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)} == {(5, 5)}


@every_task
def test_each_objective_has_its_own_loss_and_its_own_accuracy(name: str) -> None:
    loaded = task(name)
    one, two = loaded.objectives
    output = {one: 9 * torch.eye(10)[[1, 2, 3]], two: 9 * torch.eye(10)[[4, 5, 6]]}
    y = torch.tensor([[1, 4], [2, 0], [0, 0]])
    losses = loaded.losses(output, y)
    assert {key: float(value) for key, value in losses.items()} == pytest.approx(
        {key: float(cross_entropy(output[key], y[:, column])) for column, key in enumerate((one, two))}
    )
    correct = loaded.correct(output, y)
    assert isinstance(correct, dict)
    assert {key: value.tolist() for key, value in correct.items()} == {
        one: [True, True, False],
        two: [True, False, False],
    }


@pytest.mark.full
def test_two_digits_are_learned_together_in_seconds() -> None:
    loaded = task("two-digits")
    trainer = TorchTrainer(loaded, loaded.load(DataSource()))
    base = initial_model(loaded, seed=1)[1]
    result = train(trainer, base, LocalSgd(epochs=20, batch_size=16, learning_rate=0.1), seed=0, round=0, client_id="c")
    metrics = trainer.measure(base - result.rows["loss"], ("test",))
    assert metrics["test/accuracy/left"] > 0.9
    assert metrics["test/accuracy/right"] > 0.9


@every_composed_task
def test_the_composed_tasks_train_to_the_same_bytes_twice(made: DataSource, name: str) -> None:
    loaded = task(name)
    trainer = TorchTrainer(loaded, loaded.load(made))
    base = initial_model(loaded, seed=1)[1]
    work = LocalSgd(steps=2, batch_size=4, learning_rate=0.1)
    one, two = (train(trainer, base, work, seed=0, round=3, client_id="c").rows["loss"] for _ in range(2))
    assert one.tobytes() == two.tobytes()
    assert np.isfinite(one).all()
    assert np.count_nonzero(one)


# ---- rotations


@pytest.mark.full
def test_images_are_turned_as_torchvision_does_and_have_the_mean_outside() -> None:
    from torchvision.transforms import InterpolationMode  # takes two CPU seconds
    from torchvision.transforms import functional as torchvision

    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    degrees = torch.tensor([0.0, 10, -25, 90, 3.7])
    mean = 255 * torch.tensor(COLOUR).view(-1, 1, 1)
    turned = rotated(images, degrees, COLOUR)
    for image, degree, result in zip(images, degrees.tolist(), turned, strict=True):
        wanted = torchvision.rotate(image.float() - mean, degree, InterpolationMode.BILINEAR) + mean
        torch.testing.assert_close(result, wanted, atol=1e-2, rtol=0)
    torch.testing.assert_close(turned[0], images[0].float())
    torch.testing.assert_close(turned[2][:, 0, 0], mean.flatten())
    torch.testing.assert_close(rotated(images, degrees, COLOUR, torch.tensor(True)), turned.flip(-1))
    some = rotated(images, degrees, COLOUR, torch.tensor([True, False, False, True, False]))
    torch.testing.assert_close(some[[0, 3]], turned[[0, 3]].flip(-1))
    torch.testing.assert_close(some[[1, 2, 4]], turned[[1, 2, 4]])


def white(name: str, count: int = 400) -> torch.Tensor:
    """Images with one white pixel, right of the middle: where it goes tells how far they were turned, and mirrored."""
    size = next(shape for known, _, _, _, shape in TASKS if known == name)
    images = torch.zeros(count, *size, dtype=torch.uint8)
    images[:, :, size[1] // 2 - 1 : size[1] // 2 + 1, size[2] - 5 : size[2] - 3] = 255
    return images


def turns(images: torch.Tensor) -> torch.Tensor:
    """(n,) degrees, counter-clockwise, from the right, at which the brightest part of each image is."""
    light = images[:, 0] - images[:, 0].median()
    light = light.clamp(min=0.2 * float(light.max())) - 0.2 * float(light.max())
    place = torch.arange(images.shape[-1]) - (images.shape[-1] - 1) / 2
    x, y = (light * place).sum(dim=(1, 2)), (light * place[:, None]).sum(dim=(1, 2))
    return torch.rad2deg(torch.atan2(-y, x))


@pytest.mark.parametrize("name", ["multi-mnist", "mnist-fashion"])
def test_grey_images_are_turned_by_up_to_25_degrees_each_by_another_angle(name: str) -> None:
    with deterministic(CPU, 5):
        result = task(name).augment(white(name))
    assert result.shape == white(name).shape
    found = turns(result)
    assert -26 < float(found.min()) < -23
    assert 23 < float(found.max()) < 26
    assert abs(float(found.mean())) < 3
    assert float(found.std()) == pytest.approx(50 / 12**0.5, abs=1.5)


def test_photographs_are_turned_by_whole_degrees_and_a_minibatch_is_mirrored_as_a_whole_or_not() -> None:
    images, mirrored, angles = white("cifar10-mnist", 40), 0, []
    for seed in range(50):
        with deterministic(CPU, seed):
            found = turns(task("cifar10-mnist").augment(images))
        flips = found.abs() > 90
        assert flips.all() or not flips.any()
        mirrored += bool(flips.all())
        angles.append((180 - found.abs()) * found.sign() if flips.all() else found)
    assert 10 < mirrored < 30
    assert -31.5 < float(torch.cat(angles).min()) < -28.5
    assert 28.5 < float(torch.cat(angles).max()) < 31.5


@every_composed_task
def test_what_is_drawn_comes_from_torchs_generator_alone(name: str) -> None:
    images = white(name, 8)
    results: list[Any] = []
    for seed in (1, 1, 2):
        np.random.seed(seed + len(results))  # which plays no role
        with deterministic(CPU, seed):
            results.append(task(name).augment(images))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_two_digits_are_not_turned() -> None:
    x = torch.rand(4, 8, 16)
    assert task("two-digits").augment(x) is x
