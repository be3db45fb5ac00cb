"""Files of data sets: published ones, made ones, packed or not, and what is said of those that cannot be used."""

import gzip
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.optim import Optimizer

from federation.tasks import DataError, Dataset, DataSource, Task, task
from tests.paths import PUBLIC_DATA

packed_or_not = pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])


def published(*folders: str) -> DataSource:
    """The published files; skips where they are not at hand."""
    for folder in folders:
        if not (PUBLIC_DATA / folder).is_dir():
            pytest.skip(f"no published {folder} files beside the project, in {PUBLIC_DATA}")
    return DataSource(PUBLIC_DATA)


def refused(name: str, root: Path, says: str = "") -> str:
    """Why the data of a task is refused, in words that match `says`."""
    with pytest.raises(DataError, match=says or None) as caught:
        task(name).pool(DataSource(root))
    return str(caught.value)


def descended(learned: Task, model: nn.Module, batches: Iterable[Dataset], descent: Optimizer) -> list[float]:
    """The means of the losses on minibatches, each before a step on it."""
    means = []
    for batch in batches:
        loss = torch.stack(list(learned.losses(model(batch.x), batch.y).values())).mean()
        means.append(loss.item())
        descent.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        descent.step()
    return means


def write(path: Path, content: bytes | str, *, packed: bool = False) -> Path:
    """A file in its folder; as .gz where it is to be packed."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(path.name + ".gz") if packed else path
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


def write_idx(path: Path, images: np.ndarray, labels: np.ndarray, *, packed: bool = True) -> None:
    """One part of a set of grey images as it is published; `path` is how its files begin."""
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        write(path.with_name(f"{path.name}-{name}-ubyte"), content + array.astype(np.uint8).tobytes(), packed=packed)


def picture(colour: tuple[int, int, int] = (0, 0, 0), kind: str = "JPEG", size: tuple[int, int] = (32, 32)) -> bytes:
    """A file of an image of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind, quality=95)
    return file.getvalue()


def write_copies(root: Path, files: Sequence[bytes], labels: object, is_test: object, **replaced: object) -> Path:
    """JPEG copies of CIFAR-10 as they are published; `replaced` are arrays of the file."""
    path = root / "cifar10_jpeg" / "cifar10_jpeg.npz"
    path.parent.mkdir(exist_ok=True)
    arrays: dict[str, object] = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": labels,
        "is_test": is_test,
    }
    np.savez(path, allow_pickle=True, **{name: np.asarray(array) for name, array in (arrays | replaced).items()})
    return path


def copy_few(root: Path, count: int, *, by_class: bool) -> None:
    """The first published copies of each part, or of each class and part: all of them would take seconds."""
    with np.load((published("cifar10_jpeg").directory or root) / "cifar10_jpeg" / "cifar10_jpeg.npz") as arrays:
        joined, offsets, labels, is_test = (arrays[name] for name in ("jpeg", "offsets", "labels", "is_test"))
    assert np.bincount(10 * is_test + labels).tolist() == [5000] * 10 + [1000] * 10
    kinds = 10 * is_test + labels if by_class else is_test
    few = np.concatenate([np.flatnonzero(kinds == kind)[:count] for kind in np.unique(kinds)])
    files = [joined[offsets[number] : offsets[number + 1]].tobytes() for number in few]
    write_copies(root, files, labels[few], is_test[few])
