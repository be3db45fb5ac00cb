"""`two-digits`, `multi-mnist...`, `mnist-fashion` and `cifar10-mnist`: images made of two, with an objective for each.

They are composed from the published sets whenever they are loaded, with a fixed seed: the same at every member. The
part to train on is made of official training images alone, the test part of test images.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, DataSource, Pool
from federation.tasks.digits import Digits
from federation.tasks.published import Classification
from federation.tasks.vision import Cifar10, FashionMnist, Half, Images, Labels, Mnist, Vision

if TYPE_CHECKING:
    import torch

_SEED = 1
_DIGIT = 28  # side of an image of MNIST, and of Fashion-MNIST
_FEW = 3200  # images: 10 clients train on 256 each
_OPACITY = 156  # of a digit on a photograph, of 255

Indices = NDArray[np.int64]


class TwoDigits(Classification):
    """Classify two of scikit-learn's digits side by side: no download, and seconds of training.

    Every digit is once on the left and once on the right. So one that is kept back has not been seen on that side, and
    the model has no weights in common for the two. `--data DIR` reads DIR/digits.npz, as task `digits` does, and pairs
    what is in it.
    """

    objectives = ("left", "right")
    network = "two_digits_mlp"

    def pool(self, source: DataSource) -> Pool:
        """Pixels in [0, 1], float32 (n, 8, 16), with both digits (n, 2)."""
        import torch  # noqa: PLC0415

        single = Digits().pool(source)
        images = single.x.view(-1, 8, 8)
        other = _another(len(single))
        labels = single.y.numpy()
        return _pool(torch.cat([images, images[torch.from_numpy(other)]], dim=2), labels, labels[other])


class TwoDigitsScaled(TwoDigits):
    """`two-digits` with losses of two scales: the right one is a mean over the ten classes, so a tenth as large.

    Attributes:
        scales: of each objective: its loss is the cross-entropy times its scale.
    """

    scales: ClassVar[dict[str, float]] = {"left": 1.0, "right": 0.1}

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Cross-entropies times the objectives' scales."""
        return {name: loss * self.scales[name] for name, loss in super().losses(output, y).items()}


class _Composed(Classification):
    """Images of two published sets, one laid over the other."""

    evaluation_batch = 500

    def pool(self, source: DataSource) -> Pool:
        """Images as bytes, (n, channels, height, width), with both labels (n, 2); test images as the test part."""
        train, test = self._half(source, "train"), self._half(source, "test")
        return replace(train, test=test)

    def _half(self, source: DataSource, half: Half) -> Pool:
        import torch  # noqa: PLC0415

        images, first, second = self._compose(source, half, np.random.default_rng([_SEED, int(half == "test")]))
        return _pool(torch.from_numpy(images), first, second)

    @abstractmethod
    def _compose(self, source: DataSource, half: Half, random: np.random.Generator) -> tuple[Images, Labels, Labels]:
        """The images of one part, and the labels of either objective."""


class _GreyPairs(_Composed):
    """28 x 28 grey images, with the LeNet of FedCMOO."""

    network = "lenet"

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        """Each image of a training minibatch turned by up to 25 degrees either way; float32."""
        import torch  # noqa: PLC0415

        from federation.tasks.augmentation import rotated  # noqa: PLC0415
        from federation.tasks.networks import GREY_MEAN  # noqa: PLC0415

        return rotated(x, 50 * torch.rand(len(x), device=x.device) - 25, GREY_MEAN)


class MultiMnist(_GreyPairs):
    """Two digits that overlap, left above and right below: 60,000 and 10,000 for testing (Sener and Koltun 2018).

    Every digit is once on the left; the one on the right is drawn uniformly, so that some are there several times.
    """

    objectives = ("left", "right")

    def _compose(self, source: DataSource, half: Half, random: np.random.Generator) -> tuple[Images, Labels, Labels]:
        digits, labels = _read(Mnist(), source, half)
        right = random.integers(len(digits), size=len(digits))
        return overlaid(digits, digits[right], offset=6, side=36), labels, labels[right]


class MultiMnistL1(MultiMnist):
    """`multi-mnist` with losses of two scales: an l1 loss on the left, cross-entropy on the right (FedCMOO, table 2).

    In the table the first digit has a norm for a loss; which norm it is, and how it is averaged, is not known.
    """

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Left the l1 norm of the ten shares minus the label, 0 to 2; right as `multi-mnist`."""
        import torch  # noqa: PLC0415

        shares = output["left"].softmax(dim=1)
        classes = torch.arange(shares.shape[1], device=y.device)
        away = (shares - (y[:, :1] == classes).to(shares.dtype)).abs().sum(dim=1)
        return {**super().losses(output, y), "left": away.mean()}


class MultiMnistFmol(MultiMnist):
    """`multi-mnist` with a plain LeNet and without rotations: FMOL mentions neither rotations nor dropout.

    Shards and Dirichlet deal by the left digit alone: where a client has at most two labels, the published numbers of
    rounds move on the left and hardly on the right.
    """

    network = "plain_lenet"

    def pool(self, source: DataSource) -> Pool:
        whole = super().pool(source)
        return replace(whole, labels=whole.y[:, 0].numpy())

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        return x


class MultiMnistFmol256(MultiMnistFmol):
    """The first 3200 images of that: each of 10 clients trains on 256, as in FMOL's study of the batch size."""

    def pool(self, source: DataSource) -> Pool:
        whole = super().pool(source)
        labels = None if whole.labels is None else whole.labels[:_FEW]
        return replace(whole, x=whole.x[:_FEW], y=whole.y[:_FEW], labels=labels)


class MnistFashion(_GreyPairs):
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
    network = "cifar_mnist_cnn"

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        """Each image turned by up to 30 whole degrees either way; all mirrored with probability 0.4; float32."""
        import torch  # noqa: PLC0415

        from federation.tasks.augmentation import rotated  # noqa: PLC0415
        from federation.tasks.networks import CIFAR_MEAN  # noqa: PLC0415

        degrees = torch.randint(-30, 31, (len(x),), device=x.device)
        return rotated(x, degrees, CIFAR_MEAN, torch.rand((), device=x.device) < 0.4)

    def _compose(self, source: DataSource, half: Half, random: np.random.Generator) -> tuple[Images, Labels, Labels]:
        photographs, kind = _read(Cifar10(), source, half)
        digits, digit = _read(Mnist(), source, half)
        chosen = np.resize(np.arange(len(digits)), len(photographs))
        return blended(photographs, digits[chosen]), kind, digit[chosen]


def overlaid(first: Images, second: Images, *, offset: int, side: int) -> Images:
    """Two images (n, 1, 28, 28) on a canvas of this side, the second shifted by `offset` pixels right and down.

    The brighter pixel counts. Returns (n, 1, 28, 28): each pixel is the one of the canvas that its centre falls on.
    """
    canvas = np.zeros((len(first), 1, side, side), np.uint8)
    canvas[..., :_DIGIT, :_DIGIT] = first
    place = canvas[..., offset : offset + _DIGIT, offset : offset + _DIGIT]
    np.maximum(place, second, out=place)
    nearest = (2 * np.arange(_DIGIT) + 1) * side // (2 * _DIGIT)
    return np.ascontiguousarray(canvas[..., nearest[:, None], nearest])


def blended(photographs: Images, digits: Images) -> Images:
    """Digits (n, 1, 28, 28) in the middle of photographs (n, 3, 32, 32): 156/255 of each digit's ink."""
    result = photographs.copy()
    ink = digits[:, 0] > 0
    front = digits[:, 0].astype(np.uint16) * _OPACITY
    for channel in range(result.shape[1]):
        place = result[:, channel, 2 : 2 + _DIGIT, 2 : 2 + _DIGIT]
        mixed = (front + place.astype(np.uint16) * (255 - _OPACITY) + 127) // 255
        np.copyto(place, mixed.astype(np.uint8), where=ink)
    return result


def _another(count: int) -> Indices:
    """For each of `count` samples another one, each of them once: one circle through all, in random order."""
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
