"""`two-digits`, `multi-mnist`, `mnist-fashion` and `cifar10-mnist`: images made of two, with an objective for each.

They are composed from the published sets whenever they are loaded, with a fixed seed: the same at every member. The
part to train on is made of official training images alone, the test part of test images.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool, Task
from federation.tasks.digits import Digits
from federation.tasks.vision import Cifar10, FashionMnist, Half, Images, Labels, Mnist, Vision

if TYPE_CHECKING:
    import torch
    from torch import nn

_SEED = 1
_DIGIT = 28  # side of an image of MNIST, and of Fashion-MNIST
_OPACITY = 156  # of a digit on a photograph, of 255

Indices = NDArray[np.int64]


class TwoLabels(Task):
    """Two of ten classes for each sample: y is (n, 2), and the model returns {objective: logits (n, 10)}."""

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """The cross-entropy of each objective's logits with its column of y."""
        from torch.nn.functional import cross_entropy  # noqa: PLC0415

        return {name: cross_entropy(output[name], y[:, column]) for column, name in enumerate(self.objectives)}

    def correct(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Which samples each objective has right, (n,) of bool."""
        return {name: output[name].argmax(dim=1) == y[:, column] for column, name in enumerate(self.objectives)}


class TwoDigits(TwoLabels):
    """Classify two of scikit-learn's digits side by side: no download, and seconds of training.

    Every digit is once on the left and once on the right. So one that is kept back has not been seen on that side, and
    the model has no weights in common for the two. `--data DIR` reads DIR/digits.npz, as task `digits` does, and pairs
    what is in it.
    """

    objectives = ("left", "right")

    def model(self) -> "nn.Module":
        """One hidden layer of 32 and two linear heads; 4788 parameters."""
        from federation.tasks.multi import two_digits_mlp  # noqa: PLC0415

        return two_digits_mlp(self.objectives)

    def pool(self, source: DataSource) -> Pool:
        """Pixels in [0, 1], float32 (n, 8, 16), with both digits (n, 2).

        Raises:
            DataError: as task `digits`.
        """
        import torch  # noqa: PLC0415

        single = Digits().pool(source)
        images = single.x.view(-1, 8, 8)
        other = _another(len(single))
        labels = single.y.numpy()
        return _pool(torch.cat([images, images[torch.from_numpy(other)]], dim=2), labels, labels[other])


class _Composed(TwoLabels):
    """Images of two published sets, one laid over the other."""

    mean: ClassVar[tuple[float, ...]]  # of each channel, as the model standardises pixels scaled to [0, 1]
    deviation: ClassVar[tuple[float, ...]]
    evaluation_batch = 500

    def pool(self, source: DataSource) -> Pool:
        """Images as bytes, (n, channels, height, width), with both labels (n, 2); test images as the test part.

        Raises:
            DataError: no directory, or a data set is not in it.
        """
        train, test = self._half(source, "train"), self._half(source, "test")
        return replace(train, test=test)

    def _half(self, source: DataSource, half: Half) -> Pool:
        import torch  # noqa: PLC0415

        images, first, second = self._compose(source, half, np.random.default_rng([_SEED, int(half == "test")]))
        return _pool(torch.from_numpy(images), first, second)

    @abstractmethod
    def _compose(self, source: DataSource, half: Half, random: np.random.Generator) -> tuple[Images, Labels, Labels]:
        """The images of one part, and the labels of either objective."""


class _Grey(_Composed):
    """28 x 28 grey images, with the LeNet of FedCMOO."""

    mean = (0.1307,)
    deviation = (0.3081,)

    def model(self) -> "nn.Module":
        """FedCMOO's LeNet; 34,635 parameters."""
        from federation.tasks.multi import lenet  # noqa: PLC0415

        return lenet(*self.mean, *self.deviation, self.objectives)

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        """Each image of a training minibatch turned by up to 25 degrees either way; float32."""
        import torch  # noqa: PLC0415

        from federation.tasks.augmentation import rotated  # noqa: PLC0415

        return rotated(x, 50 * torch.rand(len(x), device=x.device) - 25, self.mean)


class MultiMnist(_Grey):
    """Two digits that overlap, left above and right below: 60,000 and 10,000 for testing (Sener and Koltun 2018).

    Every digit is once on the left; the one on the right is drawn uniformly, so that some are there several times.
    """

    objectives = ("left", "right")

    def _compose(self, source: DataSource, half: Half, random: np.random.Generator) -> tuple[Images, Labels, Labels]:
        digits, labels = _read(Mnist(), source, half)
        right = random.integers(len(digits), size=len(digits))
        return overlaid(digits, digits[right], offset=6, side=36), labels, labels[right]


class MnistFashion(_Grey):
    """A digit and a garment that overlap, each of them once: 60,000 and 10,000 for testing (FedCMOO)."""

    objectives = ("digit", "garment")

    def _compose(self, source: DataSource, half: Half, random: np.random.Generator) -> tuple[Images, Labels, Labels]:
        digits, digit = _read(Mnist(), source, half)
        garments, garment = _read(FashionMnist(), source, half)
        chosen = np.resize(random.permutation(len(garments)), len(digits))
        return overlaid(digits, garments[chosen], offset=14, side=42), digit, garment[chosen]


class Cifar10Mnist(_Composed):
    """A digit on a photograph: 50,000 and 10,000 for testing (FedCMOO, by its code).

    CIFAR-10 is read as task `cifar10` does. Photograph and digit have the same number in the published order; JPEG
    copies come in another order, and so get other digits.
    """

    objectives = ("object", "digit")
    mean = (0.4914, 0.4822, 0.4465)
    deviation = (0.2470, 0.2435, 0.2616)

    def model(self) -> "nn.Module":
        """Two convolutions, and heads of two linear layers; 1,726,508 parameters."""
        from federation.tasks.multi import cifar_mnist_cnn  # noqa: PLC0415

        return cifar_mnist_cnn(self.mean, self.deviation, self.objectives)

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        """Each image turned by up to 30 whole degrees either way; all mirrored with probability 0.4; float32."""
        import torch  # noqa: PLC0415

        from federation.tasks.augmentation import rotated  # noqa: PLC0415

        degrees = torch.randint(-30, 31, (len(x),), device=x.device)
        return rotated(x, degrees, self.mean, torch.rand((), device=x.device) < 0.4)

    def _compose(self, source: DataSource, half: Half, random: np.random.Generator) -> tuple[Images, Labels, Labels]:
        photographs, kind = _read(Cifar10(), source, half)
        digits, digit = _read(Mnist(), source, half)
        chosen = np.resize(np.arange(len(digits)), len(photographs))
        return blended(photographs, digits[chosen]), kind, digit[chosen]


def overlaid(first: Images, second: Images, *, offset: int, side: int) -> Images:
    """Two images on a canvas, one shifted right and down; the brighter pixel counts.

    Args:
        first: (n, 1, 28, 28), in the upper left corner.
        second: (n, 1, 28, 28).
        offset: by how many pixels the second is shifted both ways.
        side: of the canvas.

    Returns:
        (n, 1, 28, 28): the canvas made smaller; each pixel is the one of the canvas that its centre falls on.
    """
    canvas = np.zeros((len(first), 1, side, side), np.uint8)
    canvas[..., :_DIGIT, :_DIGIT] = first
    place = canvas[..., offset : offset + _DIGIT, offset : offset + _DIGIT]
    np.maximum(place, second, out=place)
    nearest = (2 * np.arange(_DIGIT) + 1) * side // (2 * _DIGIT)
    return np.ascontiguousarray(canvas[..., nearest[:, None], nearest])


def blended(photographs: Images, digits: Images) -> Images:
    """Digits in the middle of photographs: where a digit has ink, 156/255 of it and the rest of what is behind.

    Args:
        photographs: (n, 3, 32, 32).
        digits: (n, 1, 28, 28).

    Returns:
        (n, 3, 32, 32).
    """
    result = photographs.copy()
    ink = digits[:, 0] > 0
    front = digits[:, 0].astype(np.uint16) * _OPACITY
    for channel in range(result.shape[1]):
        place = result[:, channel, 2 : 2 + _DIGIT, 2 : 2 + _DIGIT]
        mixed = (front + place.astype(np.uint16) * (255 - _OPACITY) + 127) // 255
        np.copyto(place, mixed.astype(np.uint8), where=ink)
    return result


def _another(count: int) -> Indices:
    """For each of so many samples another one, each of them once: one circle through all, in random order."""
    order = np.random.default_rng(_SEED).permutation(count)
    other = np.empty_like(order)
    other[order] = np.roll(order, -1)
    return other


def _read(task: Vision, source: DataSource, half: Half) -> tuple[Images, Labels]:
    """One official part of a published set, as `Vision.images` gives it, with a label for each image."""
    images, labels = task.images(source, half)
    if not 0 < len(images) == len(labels):
        raise DataError(f"{source.directory}: {task.dataset} has {len(images)} images and {len(labels)} labels")
    return images, labels


def _pool(x: "torch.Tensor", first: Labels, second: Labels) -> Pool:
    """Samples with two labels; Dirichlet and shards deal by both, as one number from 0 to 99."""
    import torch  # noqa: PLC0415

    return Pool(x, torch.from_numpy(np.stack([first, second], axis=1)), labels=10 * first + second)
