"""The data sets that tasks read: the published files to the last sample, made ones, and what is said of broken ones."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from federation.tasks import DataError, DataSource, Part, Pool, task
from federation.tasks.river_flow import FILE as RIVERS
from federation.tasks.shakespeare import SYMBOLS, Shakespeare
from federation.tasks.splitting import split
from federation.tasks.vision import Vision
from tests.federation.tasks import scene
from tests.paths import PUBLIC_DATA


def owned(pool: Pool) -> dict[str, int]:
    """How many samples each natural owner has."""
    assert pool.owner is not None
    return dict(zip(pool.owners, np.bincount(pool.owner, minlength=len(pool.owners)).tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "there", "place"),
    [
        ("mnist", "", "MNIST/raw"),
        ("fashion-mnist", "", "FashionMNIST/raw"),
        ("fashion-mnist-3", "", "FashionMNIST/raw"),
        ("emnist", "", "EMNIST/raw"),
        ("cifar10", "", "cifar-10-batches-py"),
        ("femnist", "", "femnist/all_data"),
        ("adult", "", "adult/adult.test"),
        ("shakespeare", "", "shakespeare/mit_shakespeare_speeches.jsonl"),
        ("multi-mnist", "", "MNIST/raw/train-images-idx3-ubyte"),
        ("mnist-fashion", "MNIST", "FashionMNIST/raw/train-images-idx3-ubyte"),
        ("cifar10-mnist", "", "cifar-10-batches-py"),
        ("river-flow", "", RIVERS),
    ],
)
def test_a_missing_data_set_is_named_with_the_place_where_it_was_expected(
    tmp_path: Path, name: str, there: str, place: str
) -> None:
    if there:
        write_set(tmp_path, there)
    before = sorted(tmp_path.rglob("*"))
    assert str(tmp_path / place) in scene.refused(name, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(DataError, match="--data DIR"):
        task(name).pool(DataSource())


# ---- idx files


def write_set(root: Path, dataset: str, *, packed: bool = True, count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """A tiny data set in the published format."""
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for half in ("emnist-byclass-train", "emnist-byclass-test") if dataset == "EMNIST" else ("train", "t10k"):
        scene.write_idx(root / dataset / "raw" / half, images, labels, packed=packed)
    return images, labels


@scene.packed_or_not
@pytest.mark.parametrize(("name", "dataset"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read_packed_or_not_and_nothing_is_written(
    tmp_path: Path, name: str, dataset: str, packed: bool
) -> None:
    images, labels = write_set(tmp_path, dataset, packed=packed)
    before = sorted(tmp_path.rglob("*"))
    splits = task(name).load(DataSource(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before
    train = split(len(labels))[0]
    assert np.array_equal(splits.train.x.numpy(), images[train][:, None])
    assert np.array_equal(splits.train.y.numpy(), labels[train])


@scene.packed_or_not
def test_the_characters_of_emnist_are_put_upright(tmp_path: Path, packed: bool) -> None:
    images, labels = write_set(tmp_path, "EMNIST", packed=packed)
    pool = task("emnist").pool(DataSource(tmp_path))
    assert np.array_equal(pool.x.numpy()[:, 0], images.transpose(0, 2, 1))
    assert np.array_equal(pool.y.numpy(), labels)
    assert pool.owners == ()


def test_a_data_set_that_is_there_is_not_fetched(tmp_path: Path) -> None:
    write_set(tmp_path, "MNIST")
    assert len(task("mnist").pool(DataSource(tmp_path, download=True)).y) == 40


@pytest.mark.parametrize("damage", ["cut", "length", "kind", "not gzip", "size"])
def test_a_damaged_idx_file_is_refused_with_its_path(tmp_path: Path, damage: str) -> None:
    write_set(tmp_path, "MNIST")
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    content = gzip.decompress(file.read_bytes())
    file.write_bytes(
        {
            "cut": gzip.compress(content)[:-400],
            "length": gzip.compress(content[:-1]),
            "kind": gzip.compress(b"\0\0\x0d\x03" + content[4:]),
            "not gzip": content,
            "size": gzip.compress(content[:8] + np.array([56, 14], ">u4").tobytes() + content[16:]),
        }[damage]
    )
    assert str(file).removesuffix(".gz") in scene.refused("mnist", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dataset", "first"),
    [
        ("mnist", "MNIST", [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]),
        ("fashion-mnist", "FashionMNIST", [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
    ],
)
def test_the_published_images_are_read(name: str, dataset: str, first: list[int]) -> None:
    source = scene.published(dataset)
    pool = task(name).pool(source)
    assert pool.x.shape == (60000, 1, 28, 28)
    assert pool.x.dtype == torch.uint8
    assert pool.y[:10].tolist() == first
    pixels: Any = task(name).model().get_submodule("pixels")
    x = pool.x.numpy()
    assert float(x.mean() / 255) == pytest.approx(float(pixels.mean), abs=1e-4)
    assert float(x.std(dtype=np.float32) / 255) == pytest.approx(float(1 / pixels.scale), abs=1e-4)
    own = task(name).load(DataSource(PUBLIC_DATA, Part(99, 100, "shards:5")))
    assert [len(cut) for cut in (own.train, own.validation, own.test)] == [480, 60, 60]


# ---- CIFAR-10


def test_colour_images_come_channels_first(tmp_path: Path) -> None:
    write_jpegs(tmp_path)
    pool = task("cifar10").pool(DataSource(tmp_path))
    assert pool.x.shape == (3, 3, 32, 32)
    assert pool.x.dtype == torch.uint8
    # Red, green, blue: what a JPEG file leaves of a plain colour is near it.
    wanted = torch.eye(3) * 255
    assert (pool.x.float().mean(dim=(2, 3)) - wanted).abs().max() < 5
    assert pool.y.tolist() == [1, 4, 7]
    vision = task("cifar10")
    assert isinstance(vision, Vision)
    x, y = vision.images(DataSource(tmp_path), "test")
    assert (x.shape, y.tolist()) == ((1, 3, 32, 32), [9])


def write_jpegs(root: Path, **replaced: object) -> Path:
    """Four plain images: red, green and blue to train on, a white one for testing."""
    colours = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255))
    parts = {"labels": np.array([1, 4, 7, 9], np.uint8), "is_test": np.array([0, 0, 0, 1], np.uint8)}
    return scene.write_copies(root, [*map(scene.picture, colours)], **{**parts, **replaced})


def test_that_the_copies_are_lossy_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jpegs(tmp_path)
    with caplog.at_level(logging.WARNING):
        task("cifar10").pool(DataSource(tmp_path))
    assert f"{path} holds lossy JPEG copies" in caplog.text


def test_the_original_files_go_before_the_copies(tmp_path: Path) -> None:
    write_jpegs(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    scene.refused("cifar10", tmp_path, "cifar-10-batches-py")


@pytest.mark.parametrize(
    "replaced",
    [
        {"jpeg": np.zeros(5000, np.uint8)},
        {"jpeg": np.zeros(5000)},
        {"offsets": np.array([0, 1, 2])},
        {"offsets": np.array([0, 10**9, 10**9 + 1, 10**9 + 2, 10**9 + 3])},
        {"offsets": np.array([-4, 1, 2, 3, 4])},
        {"offsets": np.array([4, 3, 2, 1, 0])},
        {"labels": np.array([1, 4, 7, 10], np.uint8)},
        {"labels": np.array([], np.uint8)},
        {"is_test": np.array([0], np.uint8)},
        {"labels": np.array([None] * 4)},
    ],
    ids=str,
)
def test_copies_that_do_not_hold_the_images_are_refused_with_the_path(
    tmp_path: Path, replaced: dict[str, object]
) -> None:
    path = write_jpegs(tmp_path, **replaced)
    assert str(path) in scene.refused("cifar10", tmp_path, r"expected an \.npz with JPEG images")


@pytest.mark.parametrize(("kind", "size"), [("PNG", (32, 32)), ("JPEG", (64, 32))])
def test_an_image_of_another_kind_or_size_is_refused(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    scene.write_copies(tmp_path, [scene.picture(kind=kind, size=size)], *np.zeros((2, 1), np.uint8))
    scene.refused("cifar10", tmp_path, r"cifar10_jpeg\.npz")


def test_the_published_copies_of_cifar10_are_images(tmp_path: Path) -> None:
    scene.copy_few(tmp_path, 2, by_class=True)
    pool = task("cifar10-fedfv").pool(DataSource(tmp_path))
    assert pool.x.shape == (20, 3, 32, 32)
    assert pool.y.tolist() == np.repeat(np.arange(10), 2).tolist()
    assert 90 < float(pool.x.float().mean()) < 150


# ---- FEMNIST


def leaf(writers: dict[str, int]) -> str:
    """What LEAF writes: a number of images of each writer; the first image is white."""
    random = np.random.default_rng(0)
    data = {
        name: {
            "x": (np.vstack([np.full((1, 784), 255), random.integers(0, 256, (count - 1, 784))]) / 255).tolist(),
            "y": [61, *range(count - 1)],
        }
        for name, count in writers.items()
    }
    return json.dumps({"users": list(writers), "num_samples": list(writers.values()), "user_data": data})


def test_femnist_belongs_to_its_writers(tmp_path: Path) -> None:
    scene.write(tmp_path / "femnist" / "all_data" / "all_data_0.json", leaf({"f0000_14": 2, "f0002_01": 3}))
    scene.write(tmp_path / "femnist" / "all_data" / "all_data_1.json", leaf({"f0001_41": 4}))
    pool = task("femnist").pool(DataSource(tmp_path))
    assert owned(pool) == {"f0000_14": 2, "f0001_41": 4, "f0002_01": 3}
    assert pool.x.shape == (9, 1, 28, 28)
    assert pool.x.dtype == torch.uint8
    assert (pool.x[0] == 255).all()
    # From bytes to shares of 255 and back: nothing is lost.
    wanted = np.random.default_rng(0).integers(0, 256, (1, 784))
    assert np.array_equal(pool.x[1].flatten().numpy(), wanted[0])
    assert pool.y.tolist() == [61, 0, 61, 0, 1, 2, 61, 0, 1]
    assert pool.test is None


def test_the_test_part_of_leaf_goes_to_the_same_writers(tmp_path: Path) -> None:
    scene.write(tmp_path / "femnist" / "train" / "all_data_0_train_9.json", leaf({"b": 9, "a": 4, "c": 2}))
    scene.write(tmp_path / "femnist" / "test" / "all_data_0_test_9.json", leaf({"b": 1, "c": 2}))
    pool = task("femnist").pool(DataSource(tmp_path))
    assert pool.test is not None
    assert (owned(pool), owned(pool.test)) == ({"a": 4, "b": 9, "c": 2}, {"a": 0, "b": 1, "c": 2})
    scene.write(tmp_path / "femnist" / "test" / "all_data_1_test_9.json", leaf({"d": 1}))
    scene.refused("femnist", tmp_path, "'d'")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"user_data": {"a": {"x": [[0.5]], "y": [1]}}}',
        '{"user_data": {"a": {"x": [], "y": [1]}}}',
        '{"user_data": {"a": {"y": [1]}}}',
        json.dumps({"user_data": {"a": {"x": [[0.5] * 784], "y": [62]}}}),
        json.dumps({"user_data": {"a": {"x": [[1.5] * 784], "y": [6]}}}),
        json.dumps({"user_data": {"a": {"x": [[float("nan")] * 784], "y": [6]}}}),
    ],
)
def test_a_malformed_file_of_femnist_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = scene.write(tmp_path / "femnist" / "all_data" / "all_data_0.json", content)
    assert str(path) in scene.refused("femnist", tmp_path, "expected LEAF's FEMNIST")


def test_a_writer_has_one_file(tmp_path: Path) -> None:
    for number in range(2):
        scene.write(tmp_path / "femnist" / "all_data" / f"all_data_{number}.json", leaf({"f0": 2}))
    scene.refused("femnist", tmp_path, "'f0' is in another file")


# ---- Adult

PERSON = "39, State-gov, 77516, Bachelors, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K"
DOCTOR = "50, Private, 83311, Doctorate, 16, Divorced, Sales, Husband, Black, Female, 0, 0, 13, United-States, >50K"


@scene.packed_or_not
def test_adult_is_99_binary_features_and_two_owners(tmp_path: Path, packed: bool) -> None:
    scene.write(tmp_path / "adult" / "adult.data", f"{PERSON}\n{DOCTOR}\n{PERSON}\n\n", packed=packed)
    scene.write(tmp_path / "adult" / "adult.test", f"|1x3 Cross validator\n{DOCTOR}.\n\n", packed=packed)
    pool = task("adult").pool(DataSource(tmp_path))
    assert pool.x.shape == (3, 99)
    assert pool.x.dtype == torch.uint8
    assert pool.x[1].nonzero().flatten().tolist() == [0, 8 + 13, 24 + 1, 31 + 3, 45 + 2, 51 + 4, 56 + 0, 58 + 0]
    assert pool.x.sum(dim=1).tolist() == [7, 8, 7]  # an unknown occupation is none
    assert pool.y.tolist() == [0, 1, 0]
    assert pool.test is not None
    assert (owned(pool), owned(pool.test)) == ({"non-phd": 2, "phd": 1}, {"non-phd": 0, "phd": 1})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds nobody"),
        ("\n|1x3 Cross validator\n", "holds nobody"),
        ("1, 2, 3\n", "line 1"),
        (f"{PERSON}\n{PERSON.replace('Male', 'male')}\n", "line 2: field 10 cannot be 'male'"),
        (PERSON.replace("<=50K", "50K"), "line 1"),
        (b"\xff\xfe", "no text"),
    ],
)
def test_a_malformed_file_of_adult_is_refused_with_its_path(tmp_path: Path, content: str | bytes, says: str) -> None:
    scene.write(tmp_path / "adult" / "adult.test", PERSON)
    path = scene.write(tmp_path / "adult" / "adult.data", content)
    assert str(path) in scene.refused("adult", tmp_path, says)


def test_the_published_rows_of_adult_are_read() -> None:
    pool = task("adult").pool(scene.published("adult"))
    assert pool.test is not None
    assert (pool.x.shape, pool.test.x.shape) == ((32561, 99), (16281, 99))
    assert (pool.y.bincount().tolist(), pool.test.y.bincount().tolist()) == ([24720, 7841], [12435, 3846])
    assert owned(pool) == {"non-phd": 32148, "phd": 413}
    assert owned(pool.test) == {"non-phd": 16100, "phd": 181}
    doctorate = 21
    assert np.array_equal(pool.x[:, doctorate].numpy(), np.asarray(pool.owner))
    male, female = 57, 56
    assert pool.x[:, [female, male]].sum(dim=0).tolist() == [10771, 21790]
    assert int((pool.x.sum(dim=1) < 8).sum()) == 2399
    assert (pool.x.sum(dim=0) + pool.test.x.sum(dim=0) > 0).all()


# ---- Shakespeare


def decoded(row: torch.Tensor) -> str:
    return "".join(SYMBOLS[code] for code in row.tolist())


@scene.packed_or_not
def test_windows_of_a_role_are_cut_from_its_speeches_in_order(tmp_path: Path, packed: bool) -> None:
    speeches = [
        {"play": "z", "speaker": "B", "text": "x" * 200},
        {"play": "a", "speaker": "B", "text": "To be, or not; " * 10},
        {"play": "a", "speaker": "A", "text": "too short"},
        {"play": "a", "speaker": "B", "text": "é$~" + "that " * 10},
    ]
    lines = "".join(json.dumps(speech) + "\n" for speech in speeches)
    scene.write(tmp_path / "shakespeare" / "mit_shakespeare_speeches.jsonl", lines, packed=packed)
    pool = task("shakespeare").pool(DataSource(tmp_path))
    assert pool.test is not None
    text = "To be, or not; " * 10 + "\n   " + "that " * 10
    windows = len(text) - 80
    held = round(windows / 5)
    assert owned(pool) == {"a/B": windows - held, "z/B": 96}
    assert owned(pool.test) == {"a/B": held, "z/B": 24}
    assert pool.x.dtype == torch.uint8
    for number in range(windows - held):
        assert decoded(pool.x[number]) == text[number : number + 80]
    for number in range(held):
        assert decoded(pool.test.x[number]) == text[windows - held + number :][:80]
    assert decoded(torch.cat([pool.y[: windows - held], pool.test.y[:held]])) == text[80:]


def test_a_long_role_is_cut_short(tmp_path: Path) -> None:
    line = json.dumps({"play": "a", "speaker": "B", "text": "abc" * 2000})
    scene.write(tmp_path / "shakespeare" / "mit_shakespeare_speeches.jsonl", line)
    pool = task("shakespeare").pool(DataSource(tmp_path))
    assert pool.test is not None
    assert (len(pool.y), len(pool.test.y)) == (3200, 800)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("mit_shakespeare_speeches.jsonl", "{}\n", "line 1"),
        ("mit_shakespeare_speeches.jsonl", "\n[1]\n", "line 2"),
        ("mit_shakespeare_speeches.jsonl", '{"play": 1, "speaker": "A", "text": "B"}', "line 1"),
        ("mit_shakespeare_speeches.jsonl", "no json", "line 1"),
        ("mit_shakespeare_speeches.jsonl", "", "no role"),
        ("tinyshakespeare.txt", "Nobody says this.\n", "line 1.*has no speaker"),
        ("tinyshakespeare.txt", "A:\nshort\n", "no role"),
        ("tinyshakespeare.txt.gz", "not packed", "tinyshakespeare"),
    ],
)
def test_a_malformed_text_is_refused_with_its_path(tmp_path: Path, name: str, content: str, says: str) -> None:
    path = scene.write(tmp_path / "shakespeare" / name, content)
    assert str(path if says.startswith("line") else path.parent) in scene.refused("shakespeare", tmp_path, says)


@pytest.mark.full
def test_the_published_plays_are_read() -> None:
    source = scene.published("shakespeare")
    pool = Shakespeare().pool(source)
    assert pool.test is not None
    roles = owned(pool)
    assert len(roles) == 1070
    assert len(pool.y) + len(pool.test.y) == 2_049_677
    assert roles["1henryiv/KING HENRY IV"] == 3200
    assert (
        decoded(pool.x[int(np.flatnonzero(pool.owner == pool.owners.index("1henryiv/KING HENRY IV"))[0])])
        == ("So shaken as we are, so wan with care,\nFind we a time for frighted peace to pant,\n"[:80])
    )


def test_the_tiny_selection_is_read(tmp_path: Path) -> None:
    source = scene.published("shakespeare")
    assert source.directory is not None
    name = "shakespeare/tinyshakespeare.txt"
    scene.write(tmp_path / name, gzip.decompress((source.directory / f"{name}.gz").read_bytes()))
    pool = task("shakespeare").pool(DataSource(tmp_path))
    assert decoded(pool.x[0])
    assert len(pool.owners) > 200


# ---- FedFV's three garments


def test_three_owners_have_a_garment_each_of_both_official_parts(tmp_path: Path) -> None:
    images, labels = write_set(tmp_path, "FashionMNIST", count=50)
    pool = task("fashion-mnist-3").pool(DataSource(tmp_path))
    assert owned(pool) == {"T-shirt": 10, "pullover": 10, "shirt": 10}
    assert np.array_equal(pool.y.numpy(), np.asarray(pool.owner))
    pixels = images.reshape(50, 784).astype(np.float64)
    wanted = (pixels - pixels.mean(axis=0)) / (pixels.std(axis=0) + 0.001)
    wanted = wanted[np.isin(labels, [0, 2, 6])]
    np.testing.assert_allclose(pool.x.numpy(), np.concatenate([wanted, wanted]), atol=1e-5)
    assert pool.y[:3].tolist() == [0, 1, 2]


@pytest.mark.full
def test_the_published_garments_of_fedfv_are_dealt_by_kind() -> None:
    scene.published("FashionMNIST")
    pool = task("fashion-mnist-3").pool(DataSource(PUBLIC_DATA))
    assert owned(pool) == {"T-shirt": 7000, "pullover": 7000, "shirt": 7000}
    assert pool.x.shape == (21000, 784)
    assert pool.x.dtype == torch.float32
    assert bool(pool.x.isfinite().all())
    own = task("fashion-mnist-3").load(DataSource(PUBLIC_DATA, Part(2, 3, "natural")))
    assert [len(cut) for cut in (own.train, own.validation, own.test)] == [5600, 700, 700]
    assert set(own.train.y.tolist()) == {2}
