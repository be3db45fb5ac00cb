"""MultiMNIST in the forms of two experiments: `multi-mnist-l1`, and FMOL's `multi-mnist-fmol` and its small sibling."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from federation.tasks import DataSource, Pool
from federation.tasks.pairs import MultiMnist

if TYPE_CHECKING:
    import torch
    from torch import nn

_FEW = 3200  # images: 10 clients train on 256 each


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

    def model(self) -> "nn.Module":
        """Two 5 x 5 convolutions, no dropout, one linear layer for each objective; 22,350 parameters."""
        from federation.tasks.multi import plain_lenet  # noqa: PLC0415

        return plain_lenet(*self.mean, *self.deviation, self.objectives)

    def pool(self, source: DataSource) -> Pool:
        """As `multi-mnist`, dealt by the left digit.

        Raises:
            DataError: as `multi-mnist`.
        """
        whole = super().pool(source)
        return replace(whole, labels=whole.y[:, 0].numpy())

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        """The minibatch as it is."""
        return x


class MultiMnistFmol256(MultiMnistFmol):
    """The first 3200 images of that: each of 10 clients trains on 256, as in FMOL's study of the batch size."""

    def pool(self, source: DataSource) -> Pool:
        """As `multi-mnist`, the first 3200 images.

        Raises:
            DataError: as `multi-mnist`.
        """
        whole = super().pool(source)
        labels = None if whole.labels is None else whole.labels[:_FEW]
        return replace(whole, x=whole.x[:_FEW], y=whole.y[:_FEW], labels=labels)
