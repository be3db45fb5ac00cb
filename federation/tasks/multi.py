"""Models with several objectives: one encoder, and a head for each objective on what it returns."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from federation.tasks.models import Pixels


class ManyHeads(nn.Module):
    """An encoder that all objectives share, and a head for each; (n, ...) -> {objective: (n, outputs)}.

    The parameters of a head are called `heads.<objective>.<...>` and follow the encoder's.
    """

    def __init__(self, encoder: nn.Module, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """What each head makes of the encoder's features."""
        features = self.encoder(x)
        return {objective: head(features) for objective, head in self.heads.items()}


def two_digits_mlp(objectives: Sequence[str]) -> nn.Module:
    """8 x 16 digits, (n, 8, 16) -> (n, 10) each: one hidden layer of 32 for both; 4128 + 2 x 330 = 4788 parameters.

    The hidden layer is narrow, so that the objectives compete for it. Ours.
    """
    encoder = nn.Sequential(OrderedDict(flat=nn.Flatten(), hidden=nn.Linear(128, 32), relu=nn.ReLU()))
    return ManyHeads(encoder, {name: nn.Linear(32, 10) for name in objectives})


def lenet(mean: float, deviation: float, objectives: Sequence[str]) -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 10) each: FedCMOO; 28,515 + 2 x 3060 = 34,635 parameters.

    Args:
        mean: that pixels, scaled to [0, 1], are standardised with.
        deviation: likewise.
        objectives: their names.
    """
    encoder = nn.Sequential(
        OrderedDict(
            pixels=Pixels((mean,), (deviation,)),
            conv1=nn.Conv2d(1, 10, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 15, 3),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flat=nn.Flatten(),
            hidden=nn.Linear(540, 50),
            relu3=nn.ReLU(),
            drop3=nn.Dropout(0.5),
        )
    )

    def head() -> nn.Module:
        return nn.Sequential(
            OrderedDict(hidden=nn.Linear(50, 50), relu=nn.ReLU(), drop=nn.Dropout(0.5), out=nn.Linear(50, 10))
        )

    return ManyHeads(encoder, {name: head() for name in objectives})


def plain_lenet(mean: float, deviation: float, objectives: Sequence[str]) -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 10) each; 21,330 + 2 x 510 = 22,350 parameters.

    The LeNet of the multi-task literature (Sener and Koltun 2018) without dropout and with one linear layer for a head.
    FMOL does not state its network; with this one, its numbers of rounds with i.i.d. clients come out.

    Args:
        mean: that pixels, scaled to [0, 1], are standardised with.
        deviation: likewise.
        objectives: their names.
    """
    encoder = nn.Sequential(
        OrderedDict(
            pixels=Pixels((mean,), (deviation,)),
            conv1=nn.Conv2d(1, 10, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, 5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flat=nn.Flatten(),
            hidden=nn.Linear(320, 50),
            relu3=nn.ReLU(),
        )
    )
    return ManyHeads(encoder, {name: nn.Linear(50, 10) for name in objectives})


def cifar_mnist_cnn(mean: tuple[float, ...], deviation: tuple[float, ...], objectives: Sequence[str]) -> nn.Module:
    """32 x 32 colour images, uint8 (n, 3, 32, 32) -> (n, 10) each; 1,685,888 + 2 x 20,310 = 1,726,508 parameters.

    The code of FedCMOO: two linear layers in a head, with nothing in between. One, as the paper has it, would make
    1,689,748 parameters.

    Args:
        mean: of each channel, that pixels, scaled to [0, 1], are standardised with.
        deviation: likewise.
        objectives: their names.
    """
    encoder = nn.Sequential(
        OrderedDict(
            pixels=Pixels(mean, deviation),
            conv1=nn.Conv2d(3, 64, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            hidden1=nn.Linear(4096, 384),
            relu3=nn.ReLU(),
            drop3=nn.Dropout(0.5),
            hidden2=nn.Linear(384, 192),
            relu4=nn.ReLU(),
            drop4=nn.Dropout(0.5),
        )
    )

    def head() -> nn.Module:
        return nn.Sequential(OrderedDict(hidden=nn.Linear(192, 100), out=nn.Linear(100, 10)))

    return ManyHeads(encoder, {name: head() for name in objectives})
