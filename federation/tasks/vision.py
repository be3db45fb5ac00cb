"""`mnist`, `fashion-mnist` and `cifar10`: torchvision's data sets, with the papers' models.

Clients share the official training part, as the papers' per-client numbers do (FedMGDA+ section 6.1, FedFV section
5.1); each keeps back a tenth of its own for validation and a tenth for testing.
"""

import gzip
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Splits, Task
from federation.tasks.partition import deal

if TYPE_CHECKING:
    from torch import nn

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


class _Vision(Task):
    """A data set of labelled images that torchvision knows by its class's name."""

    dataset: str
    files: str  # what torchvision wants to find in the directory
    evaluation_batch = 500

    def load(self, source: DataSource) -> Splits:
        """Images as bytes, (n, channels, height, width), with labels (n,), cut 80/10/10; only the client's own part.

        Raises:
            DataError: no directory, or the data set is not in it.
        """
        import torch  # noqa: PLC0415

        if source.directory is None:
            raise DataError(
                f"{self.name or self.dataset} needs a directory: --data DIR, with {self.files} in it, "
                "or --data DIR --download to fetch it there"
            )
        x, y = self._pool(source.directory, source.download)
        return deal(torch.from_numpy(x), torch.from_numpy(y), source.part)

    def _pool(self, root: Path, download: bool) -> tuple[Images, Labels]:
        """The official training part: images (n, channels, height, width), labels (n,)."""
        from torchvision import datasets  # noqa: PLC0415

        try:
            found = getattr(datasets, self.dataset)(str(root), train=True, download=download)
        except (RuntimeError, OSError, ValueError, EOFError, zlib.error) as error:
            raise self._missing(root, error) from error
        return self._arrays(found.data, found.targets)

    def _arrays(self, images: Any, labels: Any) -> tuple[Images, Labels]:
        """From what torchvision keeps in memory: grey images as a tensor (n, h, w), colour as an array (n, h, w, 3)."""
        pixels = np.asarray(images, dtype=np.uint8)
        pixels = pixels[:, None] if pixels.ndim == 3 else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        return pixels, np.asarray(labels, dtype=np.int64)

    def _missing(self, root: Path, error: Exception) -> DataError:
        return DataError(
            f"cannot read {self.dataset} from {root} ({error}). Expected {root / self.files}, as torchvision lays it "
            "out; --download fetches it there, and torchvision.datasets names the places to get it by hand"
        )


class _Grey(_Vision):
    """28 x 28 grey images in idx files, unpacked or as they are published (.gz)."""

    mean: float
    deviation: float

    def model(self) -> "nn.Module":
        """FedMGDA+ table 3; 21,840 parameters."""
        from federation.tasks.models import grey_cnn  # noqa: PLC0415

        return grey_cnn(self.mean, self.deviation)

    def _pool(self, root: Path, download: bool) -> tuple[Images, Labels]:
        images = root / self.dataset / "raw" / "train-images-idx3-ubyte"
        labels = root / self.dataset / "raw" / "train-labels-idx1-ubyte"
        packed = [path.with_name(path.name + ".gz") for path in (images, labels)]
        if images.is_file() or not all(path.is_file() for path in packed):
            return super()._pool(root, download)
        # torchvision would unpack these beside themselves; an owner's data directory may be read-only.
        try:
            return self._arrays(_read_idx(packed[0], 3), _read_idx(packed[1], 1))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise self._missing(root, error) from error


class Mnist(_Grey):
    """Handwritten digits (LeCun, Cortes, Burges): 60,000 images of 28 x 28, ten classes."""

    dataset = "MNIST"
    files = "MNIST/raw/train-images-idx3-ubyte"
    mean, deviation = 0.1307, 0.3081


class FashionMnist(_Grey):
    """Garments (Xiao, Rasul, Vollgraf 2017): 60,000 images of 28 x 28, ten classes."""

    dataset = "FashionMNIST"
    files = "FashionMNIST/raw/train-images-idx3-ubyte"
    mean, deviation = 0.2860, 0.3530


class Cifar10(_Vision):
    """Photographs (Krizhevsky 2009): 50,000 images of 32 x 32 in colour, ten classes."""

    dataset = "CIFAR10"
    files = "cifar-10-batches-py"

    def model(self) -> "nn.Module":
        """FedMGDA+ table 2; 797,962 parameters."""
        from federation.tasks.models import cifar_cnn  # noqa: PLC0415

        return cifar_cnn()


def _read_idx(path: Path, axes: int) -> Images:
    """Reads a packed idx file of bytes: two zeros, type 8, the number of axes, big-endian sizes, the data.

    Raises:
        ValueError: not such a file.
    """
    with gzip.open(path) as file:
        content = file.read()
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < 4 + 4 * axes:
        raise ValueError(f"{path} is no idx file of bytes with {axes} axes")
    shape = np.frombuffer(content, ">u4", count=axes, offset=4).astype(np.int64)
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if len(data) != shape.prod():
        raise ValueError(f"{path} announces {'x'.join(map(str, shape))} bytes and holds {len(data)}")
    return data.reshape(shape).copy()
