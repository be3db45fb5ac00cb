"""MultiMNIST in the forms of two experiments: `multi-mnist-l1`, and FMOL's `multi-mnist-fmol` and its small sibling."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from federation.tasks import DataSource, Pool
from federation.tasks.pairs import MultiMnist

if TYPE_CHECKING:
    import torch

_FEW = 3200  # images: 10 clients train on 256 each


class MultiMnistL1(MultiMnist):
    """`multi-mnist` with losses of two scales: cross-entropy on the left, an l1 loss on the right (FedCMOO, table 2).

    The table's second loss is called a norm; which one it is, and how it is averaged, is not known.
    """

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """Left as `multi-mnist`; right the l1 norm of the ten shares minus the label, 0 to 2."""
        import torch  # noqa: PLC0415

        shares = output["right"].softmax(dim=1)
        classes = torch.arange(shares.shape[1], device=y.device)
        away = (shares - (y[:, 1:] == classes).to(shares.dtype)).abs().sum(dim=1)
        return {**super().losses(output, y), "right": away.mean()}


class MultiMnistFmol(MultiMnist):
    """`multi-mnist` without rotations, which FMOL does not mention."""

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
