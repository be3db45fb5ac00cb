"""`mnist`, `fashion-mnist`, `cifar10` and `emnist`: images in torchvision's layout, with the papers' models.

Clients share the official training part, as the papers' per-client numbers do (FedMGDA+ section 6.1, FedFV section
5.1); each keeps back a tenth of its own for validation and a tenth for testing.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.published import Published
from federation.tasks.published_files import BROKEN, found, read_idx

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Half = Literal["train", "test"]


class Vision(Published):
    """A published set of labelled images.

    Attributes:
        dataset: torchvision's class.
    """

    dataset: ClassVar[str]
    hint = ", or --data DIR and --download (a worker: download = true) to fetch it there"
    evaluation_batch = 500

    def pool(self, source: DataSource) -> Pool:
        """The official training part: images as bytes, (n, channels, height, width), with labels (n,)."""
        import torch  # noqa: PLC0415

        x, y = self.images(source, "train")
        return Pool(torch.from_numpy(x), torch.from_numpy(y))

    def images(self, source: DataSource, half: Half) -> tuple[Images, Labels]:
        """One official part: images (n, channels, height, width), labels (n,). Raises DataError."""
        return self._read(self.directory(source), half, source.download)

    @abstractmethod
    def _read(self, root: Path, half: Half, download: bool) -> tuple[Images, Labels]:
        """Reads the result of `images` from a directory."""

    def _fetched(self, root: Path, half: Half, download: bool, **options: str) -> Any:
        """The data set as torchvision has it, fetched into the directory where that is allowed."""
        from torchvision import datasets  # noqa: PLC0415

        try:
            return getattr(datasets, self.dataset)(str(root), train=half == "train", download=download, **options)
        except (RuntimeError, *BROKEN) as error:
            raise DataError(f"cannot read {self.dataset} from {root} ({error}). {self._wanted(root)}") from error

    def _wanted(self, root: Path) -> str:
        return (
            f"Expected {root / self.files}, as torchvision lays it out; --download (a worker: download = true) fetches "
            "it there, and torchvision.datasets names the places to get it by hand"
        )


class _Grey(Vision):
    """28 x 28 grey images in idx files, unpacked or as they are published (.gz), which are only read."""

    stems: ClassVar[dict[Half, str]] = {"train": "train", "test": "t10k"}
    axes: ClassVar[tuple[int, int]] = (1, 2)  # the rows and the columns
    options: ClassVar[dict[str, str]] = {}

    def _read(self, root: Path, half: Half, download: bool) -> tuple[Images, Labels]:
        stem = root / self.dataset / "raw" / self.stems[half]
        images, labels = (Path(f"{stem}-{name}-ubyte") for name in ("images-idx3", "labels-idx1"))
        if download and not (found(images) and found(labels)):
            self._fetched(root, half, download, **self.options)
        x, y = read_idx(images, 3, self._wanted(root)), read_idx(labels, 1, self._wanted(root))
        if x.shape[1:] != (28, 28):
            raise DataError(f"{images} holds images of {x.shape[1]} x {x.shape[2]}, not 28 x 28")
        return x.transpose(0, *self.axes)[:, None].copy(), y.astype(np.int64)


class Mnist(_Grey):
    """Handwritten digits (LeCun, Cortes, Burges): 60,000 images of 28 x 28, ten classes."""

    dataset = "MNIST"
    files = "MNIST/raw/train-images-idx3-ubyte"
    network = "mnist_cnn"


class FashionMnist(_Grey):
    """Garments (Xiao, Rasul, Vollgraf 2017): 60,000 images of 28 x 28, ten classes."""

    dataset = "FashionMNIST"
    files = "FashionMNIST/raw/train-images-idx3-ubyte"
    network = "fashion_mnist_cnn"


class Emnist(_Grey):
    """Handwritten digits and letters (Cohen et al. 2017), split "byclass": 697,932 images of 28 x 28, 62 classes.

    The same characters as FEMNIST's, without their writers: the published files do not name them, so that there are no
    natural owners here. Task `femnist` has them.
    """

    dataset = "EMNIST"
    files = "EMNIST/raw/emnist-byclass-train-images-idx3-ubyte"
    options: ClassVar[dict[str, str]] = {"split": "byclass"}
    network = "femnist_cnn"
    stems: ClassVar[dict[Half, str]] = {"train": "emnist-byclass-train", "test": "emnist-byclass-test"}
    axes = (2, 1)  # the published images lie on their side


class Cifar10(Vision):
    """Photographs (Krizhevsky 2009): 50,000 images of 32 x 32 in colour, ten classes.

    If the original files are missing, DIR/cifar10_jpeg/cifar10_jpeg.npz is read in their place. It holds lossy JPEG
    copies of the same images: results on them are not strictly comparable with results on the originals.
    """

    dataset = "CIFAR10"
    files = "cifar-10-batches-py"
    network = "cifar_cnn"

    def _read(self, root: Path, half: Half, download: bool) -> tuple[Images, Labels]:
        from federation.tasks import jpegs  # noqa: PLC0415

        copies = root / jpegs.FILE
        if copies.is_file() and not download and not (root / self.files).is_dir():
            return jpegs.read(copies, test=half == "test")
        original = self._fetched(root, half, download)
        pixels = np.asarray(original.data, dtype=np.uint8).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(pixels), np.asarray(original.targets, dtype=np.int64)
