"""`fashion-mnist-3`, `cifar10-fedfv` and `mnist-fedfv...`: the experiments of FedFV as its published code ran them.

The code differs from the paper (Wang et al. 2021, section 5.1) in models, splits and loss, and the paper's numbers are
the code's. These tasks are there to reproduce them; learn with `fashion-mnist`, `cifar10` and `mnist`.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from federation.tasks import DataSource, Pool, Task
from federation.tasks.vision import Cifar10, FashionMnist, Mnist

if TYPE_CHECKING:
    import torch


class DoubleSoftmax(Task):
    """Takes the softmax of the output before the cross-entropy, which takes it again.

    The loss so bounded stays above log(1 + (C - 1)/e) for C outputs (1.461 for ten) and its gradients are flat.
    """

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Cross-entropy of the softmax of logits (n, C), as if that were logits, with labels (n,)."""
        return super().losses(output.softmax(dim=1), y)


class FashionMnist3(DoubleSoftmax, FashionMnist):
    """T-shirt, pullover or shirt: three owners, each with the 7000 images of one garment.

    FedFV table 3. The classes 0, 1, 2 are Fashion-MNIST's 0, 2, 6.
    """

    garments: ClassVar[dict[str, int]] = {"T-shirt": 0, "pullover": 2, "shirt": 6}
    network = "fedfv_linear"

    def pool(self, source: DataSource) -> Pool:
        """Standardised pixels, float32 (n, 784), with classes (n,): both official parts of the three garments.

        Every pixel has the mean of the official training part, all ten classes of it, subtracted and is divided by its
        standard deviation there (+ 0.001, of pixels from 0 to 255).
        """
        import torch  # noqa: PLC0415

        halves = self.images(source, "train"), self.images(source, "test")
        train = halves[0][0].reshape(-1, 784)
        mean = train.mean(axis=0)
        square = np.einsum("np,np->p", train, train, dtype=np.int64) / len(train)
        deviation = np.sqrt(square - mean**2)
        x = np.concatenate([images.reshape(-1, 784) for images, _ in halves])
        garment = np.concatenate([labels for _, labels in halves])
        chosen = np.flatnonzero(np.isin(garment, list(self.garments.values())))
        y = np.searchsorted(list(self.garments.values()), garment[chosen])
        standard = (x[chosen] - mean.astype(np.float32)) / (deviation + 0.001).astype(np.float32)
        return Pool(torch.from_numpy(standard), torch.from_numpy(y), owners=tuple(self.garments), owner=y)


class Cifar10FedFV(DoubleSoftmax, Cifar10):
    """FedFV tables 2 and 4: as `cifar10`, with another model and loss. Its 100 clients take scheme "shards:2"."""

    network = "fedfv_cifar_mlp"


class MnistFedFV(DoubleSoftmax, Mnist):
    """FedFV section 5, MNIST: as `mnist`, with another model and loss. Its 200 clients take scheme "shards:2"."""

    network = "fedfv_mnist_cnn"


class MnistFedFVStandardised(MnistFedFV):
    """`mnist-fedfv` with standardised pixels: which of the two scales the published records have is not known."""

    network = "fedfv_mnist_cnn_standardised"
