"""CelebA: forty objectives or five, from made files in torchvision's layout."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from federation.tasks import DataError, Dataset, DataSource, Part, task
from federation.tasks.celeba import ATTRIBUTES, GROUPS
from federation.tasks.splitting import split
from tests.federation.tasks.scene import descended, refused, write

SIZE = (178, 218)  # of the published images
COUNT = 34
TESTED = (4, 9, 14)  # images of the official test part
VALIDATED = (5, 10)
NAMES = " ".join(ATTRIBUTES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small CelebA: images of one colour each, with random attributes."""
    root = tmp_path_factory.mktemp("data") / "celeba"
    (root / "img_align_celeba").mkdir(parents=True)
    rows, parts = [], []
    for number, (colour, bits) in enumerate(zip(colours(), attributes(), strict=True), start=1):
        name = f"{number:06}.jpg"
        Image.new("RGB", SIZE, tuple(map(int, colour))).save(root / "img_align_celeba" / name, quality=95)
        rows.append(f"{name} " + " ".join(" 1" if bit else "-1" for bit in bits))
        parts.append(f"{name} {2 if number in TESTED else 1 if number in VALIDATED else 0}")
    write(root / "list_attr_celeba.txt", f"{COUNT}\n{NAMES} \n" + "\n".join(rows) + "\n")
    write(root / "list_eval_partition.txt", "\n".join(parts) + "\n")
    return root.parent


def colours() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (COUNT, 3))


def attributes() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 2, (COUNT, 40))


TRAINED = [number for number in range(1, COUNT + 1) if number not in (*TESTED, *VALIDATED)]


@pytest.mark.parametrize("name", ["celeba", "celeba-5"])
def test_the_official_parts_are_read_with_all_attributes(made: Path, name: str) -> None:
    pool = task(name).pool(DataSource(made))
    assert pool.test is not None
    for part, numbers in ((pool, TRAINED), (pool.test, list(TESTED))):
        rows = np.array(numbers) - 1
        assert part.x.shape == (len(rows), 3, 32, 32)
        assert part.x.dtype == torch.uint8
        assert np.abs(part.x.float().mean(dim=(2, 3)).numpy() - colours()[rows]).max() < 5
        assert np.array_equal(part.y.numpy(), attributes()[rows])
    attractive, male, mouth = attributes()[np.array(TRAINED) - 1][:, [2, 20, 21]].T
    assert pool.labels is not None
    assert pool.labels.tolist() == (4 * attractive + 2 * male + mouth).tolist()
    assert (ATTRIBUTES[2], ATTRIBUTES[20], ATTRIBUTES[21]) == ("Attractive", "Male", "Mouth_Slightly_Open")


def test_a_client_opens_its_own_images_alone(made: Path, tmp_path: Path) -> None:
    source = DataSource(made, Part(1, 3, "dirichlet:0.3", 7))
    own = task("celeba").load(source)
    whole = task("celeba").pool(DataSource(made))
    assert len(own.train) + len(own.validation) + len(own.test) in (9, 10)
    held = torch.cat([own.train.x, own.validation.x, own.test.x])
    kept = {number for number in TRAINED for image in held if torch.equal(image, whole.x[TRAINED.index(number)])}
    shutil.copytree(made, tmp_path / "own")
    for path in (tmp_path / "own" / "celeba" / "img_align_celeba").iterdir():
        if int(path.stem) not in kept:
            path.unlink()
    again = task("celeba").load(DataSource(tmp_path / "own", source.part))
    assert torch.equal(again.train.x, own.train.x)


def test_without_a_part_the_official_test_part_is_the_test_part(made: Path) -> None:
    own = task("celeba-5").load(DataSource(made))
    train, validation, _ = split(len(TRAINED), test=False)
    assert (len(own.train), len(own.validation), len(own.test)) == (len(train), len(validation), len(TESTED))


def test_an_image_is_made_smaller_with_a_bilinear_filter(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "celeba", tmp_path / "celeba")
    ramp = np.broadcast_to(np.linspace(0, 255, SIZE[0], dtype=np.uint8)[None, :, None], (SIZE[1], SIZE[0], 3))
    Image.fromarray(ramp.copy()).save(tmp_path / "celeba" / "img_align_celeba" / "000001.jpg", quality=95)
    image = task("celeba").pool(DataSource(tmp_path)).x[0].float()
    wanted = torch.linspace(0, 255, 33)[:-1] + 255 / 64
    assert (image - wanted).abs().max() < 4


def test_pixels_lose_the_means_in_the_order_of_fedcmoo() -> None:
    pixels: Any = task("celeba").model().get_submodule("encoder.pixels")
    grey = pixels(torch.full((1, 3, 1, 1), 100, dtype=torch.uint8)).flatten() * 255
    assert grey.tolist() == pytest.approx([100 - 72.392, 100 - 82.909, 100 - 73.158], abs=1e-3)


def test_the_last_row_and_column_of_the_last_map_do_not_count() -> None:
    resnet: Any = task("celeba-5").model().get_submodule("encoder.resnet")
    seen: list[torch.Tensor] = []
    resnet.layer4.register_forward_hook(lambda module, given, output: seen.append(output))
    code = resnet(torch.randn(2, 3, 32, 32))
    assert seen[0].shape == (2, 512, 4, 4)
    torch.testing.assert_close(code, seen[0][:, :, :3, :3].mean(dim=(2, 3)))


def test_forty_objectives_are_cross_entropies_of_two_classes() -> None:
    faces = task("celeba")
    y = torch.from_numpy(attributes()[:6].astype(np.uint8))
    output = {name: torch.stack([1 - y[:, k], y[:, k]], dim=1) * 4.0 for k, name in enumerate(faces.objectives)}
    output["male"] = -output["male"]
    losses, right = faces.losses(output, y), faces.correct(output, y)
    assert isinstance(right, dict)
    assert tuple(losses) == tuple(right) == faces.objectives
    for name, loss in losses.items():
        assert loss.item() == pytest.approx(np.log1p(np.exp(4 if name == "male" else -4)), rel=1e-5)
        assert right[name].tolist() == [name != "male"] * 6


def test_five_objectives_are_groups_of_eight_attributes() -> None:
    assert sorted(sum(GROUPS.values(), ())) == list(range(40))
    faces = task("celeba-5")
    y = torch.from_numpy(attributes()[:6].astype(np.uint8))
    output = {name: (y[:, group].float() * 2 - 1) * 4.0 for name, group in GROUPS.items()}
    output["group-3"][:, :2] *= -1
    losses, right = faces.losses(output, y), faces.correct(output, y)
    assert isinstance(right, dict)
    assert tuple(losses) == tuple(right) == faces.objectives
    good, bad = np.log1p(np.exp(-4)), np.log1p(np.exp(4))
    assert losses["group-1"].item() == pytest.approx(good, rel=1e-5)
    assert losses["group-3"].item() == pytest.approx((6 * good + 2 * bad) / 8, rel=1e-5)
    assert right["group-1"].tolist() == [1.0] * 6
    assert right["group-3"].tolist() == [0.75] * 6


@pytest.mark.full
def test_a_step_of_training_lowers_the_losses_of_both(made: Path) -> None:
    for name in ("celeba", "celeba-5"):
        faces = task(name)
        pool = faces.pool(DataSource(made))
        torch.manual_seed(0)
        model = faces.model()
        descent = torch.optim.SGD(model.parameters(), lr=0.05)
        means = descended(faces, model, [Dataset(pool.x[:8], pool.y[:8])] * 3, descent)
        assert means[2] < means[0]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("list_attr_celeba.txt", "", "line 2"),
        ("list_attr_celeba.txt", f"2\n{NAMES.lower()}\n", "line 2"),
        ("list_attr_celeba.txt", f"1\n{NAMES}\n000001.jpg {'1 ' * 39}", "line 3"),
        ("list_attr_celeba.txt", f"1\n{NAMES}\n000001.jpg {'1 ' * 39}0", "line 3"),
        ("list_attr_celeba.txt", f"1\n{NAMES}\n../1.jpg {'1 ' * 40}", "line 3"),
        ("list_attr_celeba.txt", f"1\n{NAMES}\n", "nothing known"),
        ("list_eval_partition.txt", "", "no image to train on"),
        ("list_eval_partition.txt", "000001.jpg 1\n", "no image to train on"),
        ("list_eval_partition.txt", "000001.jpg 3\n", "line 1"),
        ("list_eval_partition.txt", "000001.jpg\n", "line 1"),
        ("list_eval_partition.txt", "\n000099.jpg 0\n", "line 2"),
        ("img_align_celeba/000003.jpg", "no image", "cannot read"),
    ],
)
def test_a_malformed_file_is_refused_with_its_path(
    made: Path, tmp_path: Path, file: str, content: str, says: str
) -> None:
    shutil.copytree(made / "celeba", tmp_path / "celeba")
    path = write(tmp_path / "celeba" / file, content)
    wanted = "list_eval_partition.txt" if says == "nothing known" else str(path)
    assert wanted in refused("celeba", tmp_path, says)


def test_a_missing_file_is_named_with_the_layout(made: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "celeba" / "list_attr_celeba.txt") in refused("celeba", tmp_path, "--download")
    shutil.copytree(made / "celeba", tmp_path / "celeba")
    (tmp_path / "celeba" / "img_align_celeba" / "000002.jpg").unlink()
    refused("celeba-5", tmp_path, r"img_align_celeba/000002\.jpg")
    with pytest.raises(DataError, match="--data DIR"):
        task("celeba-5").pool(DataSource())


def test_images_that_are_there_are_not_fetched(made: Path) -> None:
    assert len(task("celeba").pool(DataSource(made, download=True))) == len(TRAINED)
