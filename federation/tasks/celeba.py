"""`celeba` and `celeba-5`: forty attributes of faces, as forty objectives or as five.

Source: Z. Liu, P. Luo, X. Wang, X. Tang, Deep Learning Face Attributes in the Wild, 2015; models, groups and pixels as
in the code of FedCMOO (Askin et al. 2025).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from federation.tasks import DataError, Dataset, DataSource, Pool, Splits
from federation.tasks.partition import deal
from federation.tasks.published import Classification
from federation.tasks.published_files import BROKEN, lines

if TYPE_CHECKING:
    import torch

FOLDER = "celeba"
_NAMES = (
    "5_o_Clock_Shadow Arched_Eyebrows Attractive Bags_Under_Eyes Bald Bangs Big_Lips Big_Nose Black_Hair Blond_Hair "
    "Blurry Brown_Hair Bushy_Eyebrows Chubby Double_Chin Eyeglasses Goatee Gray_Hair Heavy_Makeup High_Cheekbones Male "
    "Mouth_Slightly_Open Mustache Narrow_Eyes No_Beard Oval_Face Pale_Skin Pointy_Nose Receding_Hairline Rosy_Cheeks "
    "Sideburns Smiling Straight_Hair Wavy_Hair Wearing_Earrings Wearing_Hat Wearing_Lipstick Wearing_Necklace "
    "Wearing_Necktie Young"
)
ATTRIBUTES = tuple(_NAMES.split())
GROUPS = {
    "group-1": (0, 9, 3, 15, 22, 33, 25, 29),
    "group-2": (1, 8, 7, 10, 16, 32, 26, 34),
    "group-3": (2, 11, 12, 14, 21, 28, 35, 39),
    "group-4": (4, 6, 13, 18, 19, 20, 30, 31),
    "group-5": (5, 17, 23, 24, 27, 36, 37, 38),
}
_DEALT_BY = (2, 20, 21)  # Attractive, Male, Mouth_Slightly_Open
_SIDE = 32
_PARTS = {"0": "train", "1": "validation", "2": "test"}


class _Faces(Classification):
    """Faces of 32 x 32 pixels. `--data DIR` reads DIR/celeba as torchvision lays it out, from the unpacked images."""

    files = "celeba/img_align_celeba, celeba/list_attr_celeba.txt and celeba/list_eval_partition.txt"
    evaluation_batch = 500

    def pool(self, source: DataSource) -> Pool:
        """Images as bytes, (n, 3, 32, 32), with all attributes, uint8 (n, 40): the official parts to train and test on.

        Shards and Dirichlet deal by the attributes Attractive, Male and Mouth_Slightly_Open: eight classes.
        """
        return _opened(*self._listed(source))

    def load(self, source: DataSource) -> Splits:
        """As of every task, but only this client's images are opened: all 162,770 take minutes."""
        folder, faces = self._listed(source)
        return Splits(*(Dataset(_images(folder, cut.x), cut.y) for cut in deal(faces, source.part)))

    def _listed(self, source: DataSource) -> tuple[Path, Pool]:
        """The folder of the images, and a pool with their numbers, (n,), in the place of them."""
        directory = self.directory(source)
        root = directory / FOLDER
        if source.download and not (root / "img_align_celeba").is_dir():
            _fetch(directory)
        return root / "img_align_celeba", _pool(root)


class CelebA(_Faces):
    """One objective for each of the forty attributes: does the face have it?"""

    network = "celeba_resnet"
    objectives = tuple(name.lower().replace("_", "-") for name in ATTRIBUTES)


class CelebA5(_Faces):
    """Five objectives of eight attributes each, grouped as in FedCMOO."""

    network = "celeba5_resnet"
    objectives = tuple(GROUPS)

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Binary cross-entropy, the mean of the eight of a group: logits (n, 8) by group, attributes (n, 40)."""
        from torch.nn.functional import binary_cross_entropy_with_logits  # noqa: PLC0415

        return {
            name: binary_cross_entropy_with_logits(output[name], y[:, group].float()) for name, group in GROUPS.items()
        }

    def correct(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Which share of the eight attributes of a group is right, float32 (n,): FedCMOO's accuracy is its mean."""
        return {name: ((output[name] > 0) == y[:, group]).float().mean(dim=1) for name, group in GROUPS.items()}


def _pool(root: Path) -> Pool:
    import torch  # noqa: PLC0415

    attributes = dict(_attributes(root / "list_attr_celeba.txt"))
    numbers: dict[str, list[int]] = {part: [] for part in _PARTS.values()}
    path = root / "list_eval_partition.txt"
    wanted = f"expected CelebA's `000001.jpg 0` on each line, its part 0, 1 or 2; {_wanted(root)}"
    for number, line in lines(path, wanted):
        fields = line.split()
        if not fields:
            continue
        face = _number(fields[0])
        if len(fields) != 2 or fields[1] not in _PARTS or face is None or face not in attributes:
            raise DataError(f"{path}, line {number}: {line[:80]!r}, or nothing known of that image; {wanted}")
        numbers[_PARTS[fields[1]]].append(face)
    if not numbers["train"]:
        raise DataError(f"{path} names no image to train on; {wanted}")

    def part(faces: list[int], test: Pool | None) -> Pool:
        bits = np.frombuffer(bytearray().join(attributes[face] for face in faces), np.uint8).reshape(-1, 40)
        labels = bits[:, _DEALT_BY].astype(np.int64) @ np.array([4, 2, 1])
        return Pool(torch.tensor(faces, dtype=torch.int64), torch.from_numpy(bits), labels=labels, test=test)

    return part(numbers["train"], part(numbers["test"], None))


def _attributes(path: Path) -> Iterator[tuple[int, bytes]]:
    """The number of each image with its forty attributes, 0 or 1."""
    wanted = f"expected CelebA's {len(ATTRIBUTES)} attributes, 1 or -1, after the name of an image on each line"
    rows = lines(path, f"{wanted}; {_wanted(path.parent)}")
    next(rows)  # how many there are
    if tuple(next(rows, (2, ""))[1].split()) != ATTRIBUTES:
        raise DataError(f"{path}, line 2: not the names of CelebA's attributes; {wanted}")
    for number, line in rows:
        name, *values = line.split() or [""]
        if not name:
            continue
        face = _number(name)
        if face is None or len(values) != len(ATTRIBUTES) or not {"1", "-1"}.issuperset(values):
            raise DataError(f"{path}, line {number}: {line[:80]!r}; {wanted}")
        yield face, bytes(value == "1" for value in values)


def _number(name: str) -> int | None:
    match = re.fullmatch(r"([0-9]{6})\.jpg", name, re.ASCII)
    return int(match[1]) if match else None


def _opened(folder: Path, faces: Pool) -> Pool:
    """A pool with the images themselves in the place of their numbers."""
    test = None if faces.test is None else _opened(folder, faces.test)
    return replace(faces, x=_images(folder, faces.x), test=test)


def _images(folder: Path, numbers: "torch.Tensor") -> "torch.Tensor":
    """Images by their numbers (n,), made smaller: uint8 (n, 3, 32, 32), red, green and blue."""
    import torch  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    pixels = np.empty((len(numbers), _SIDE, _SIDE, 3), np.uint8)
    for row, number in enumerate(numbers.tolist()):
        path = folder / f"{number:06}.jpg"
        try:
            with Image.open(path, formats=("JPEG",)) as image:
                small = image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
                pixels[row] = np.asarray(small)
        except (*BROKEN, SyntaxError) as error:
            raise DataError(f"cannot read {path} ({error}); {_wanted(folder.parent)}") from error
    return torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())


def _fetch(directory: Path) -> None:
    """Fetches CelebA by torchvision, which needs the package gdown."""
    from torchvision.datasets import CelebA as Published  # noqa: PLC0415

    try:
        Published(str(directory), download=True)
    except (RuntimeError, ImportError, *BROKEN) as error:
        raise DataError(f"cannot fetch CelebA into {directory} ({error}). {_wanted(directory / FOLDER)}") from error


def _wanted(root: Path) -> str:
    return (
        f"{root} is laid out as torchvision has it: img_align_celeba/000001.jpg and on, unpacked, list_attr_celeba.txt "
        "and list_eval_partition.txt; --download (a worker: download = true) fetches it there"
    )
