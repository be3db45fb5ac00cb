"""The models of the built-in tasks, with the number of parameters that each comes to."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from federation.tasks.molecules import MessagePassing

# Of the pixels of each channel, scaled to [0, 1].
GREY_MEAN, GREY_DEVIATION = (0.1307,), (0.3081,)
CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Pixels(nn.Module):
    """From bytes (n, channels, height, width) to standardised float32: images stay in memory as they are on disk."""

    def __init__(self, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        super().__init__()
        # Constants, not state: they follow the model to its device and stay out of its state dict.
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("scale", 1 / torch.tensor(deviation).view(-1, 1, 1), persistent=False)
        self.mean: Tensor
        self.scale: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """Scales to [0, 1], subtracts the mean and divides by the standard deviation of each channel."""
        return (images.float() / 255 - self.mean) * self.scale


class LocalResponseNorm(nn.Module):
    """Divides by (1 + alpha/size * sum of squares over `size` neighbouring channels)^beta; float (n, channels, h, w).

    The same function as `torch.nn.LocalResponseNorm`, whose gradient on CUDA has no deterministic version.
    """

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75) -> None:
        super().__init__()
        self.size, self.alpha, self.beta = size, alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        """The normalised activations, of the shape of `x`."""
        squares = functional.pad(x * x, (0, 0, 0, 0, self.size // 2, (self.size - 1) // 2))
        total = squares.narrow(1, 0, x.shape[1])
        for shift in range(1, self.size):
            total = total + squares.narrow(1, shift, x.shape[1])
        return x / (1 + self.alpha / self.size * total) ** self.beta


class RealFeatures(nn.Module):
    """From features of any element type to float32, as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers, of the same shape."""
        return x.float()


class ManyHeads(nn.Module):
    """An encoder that all objectives share, and a head for each; (n, ...) -> {objective: (n, outputs)}.

    The parameters of a head are called `heads.<objective>.<...>` and follow the encoder's.
    """

    def __init__(self, encoder: nn.Module, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The output of each head for the encoder's features."""
        features = self.encoder(x)
        return {objective: head(features) for objective, head in self.heads.items()}


class CharacterLstm(nn.Module):
    """The next character of a text, bytes (n, length) -> (n, symbols): an embedding, two LSTM layers, a linear layer.

    Source: LEAF (Caldas et al. 2018) and FedMGDA+ section 6.3. With 80 symbols, an embedding of 8 and 256 hidden units
    819,920 parameters: torch, as cuDNN, has two biases for each gate. With one bias it would be 817,872.
    """

    def __init__(self, symbols: int = 80, embedded: int = 8, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedded)
        self.lstm = nn.LSTM(embedded, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, symbols)

    def forward(self, text: Tensor) -> Tensor:
        """Logits after the last character."""
        states, _ = self.lstm(self.embedding(text.int()))
        logits: Tensor = self.out(states[:, -1])
        return logits


def layers(**modules: nn.Module) -> nn.Sequential:
    """Modules one after the other, with names."""
    return nn.Sequential(OrderedDict(modules))


def digits_mlp() -> nn.Module:
    """8 x 8 digits, (n, 64) -> (n, 10): one hidden layer of 64; 4810 parameters."""
    return layers(hidden=nn.Linear(64, 64), relu=nn.ReLU(), out=nn.Linear(64, 10))


def digits_linear() -> nn.Module:
    """8 x 8 digits, (n, 64) -> (n, 10): logistic regression; 650 parameters."""
    return layers(out=nn.Linear(64, 10))


def mnist_cnn() -> nn.Module:
    """28 x 28 digits, uint8 (n, 1, 28, 28) -> (n, 10): FedMGDA+ table 3; 21,840 parameters."""
    return _grey_cnn(Pixels(GREY_MEAN, GREY_DEVIATION))


def fashion_mnist_cnn() -> nn.Module:
    """28 x 28 garments, uint8 (n, 1, 28, 28) -> (n, 10): FedMGDA+ table 3; 21,840 parameters."""
    return _grey_cnn(Pixels((0.2860,), (0.3530,)))


def _grey_cnn(pixels: Pixels) -> nn.Module:
    return layers(
        pixels=pixels,
        conv1=nn.Conv2d(1, 10, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(10, 20, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        drop2=nn.Dropout2d(0.5),
        flat=nn.Flatten(),
        hidden=nn.Linear(320, 50),
        relu3=nn.ReLU(),
        drop3=nn.Dropout(0.5),
        out=nn.Linear(50, 10),
    )


def cifar_cnn() -> nn.Module:
    """32 x 32 colour images, uint8 (n, 3, 32, 32) -> (n, 10): FedMGDA+ table 2; 797,962 parameters."""
    return layers(
        pixels=Pixels(CIFAR_MEAN, CIFAR_DEVIATION),
        conv1=nn.Conv2d(3, 64, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        norm1=LocalResponseNorm(2),
        conv2=nn.Conv2d(64, 64, 5),
        relu2=nn.ReLU(),
        norm2=LocalResponseNorm(2),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        hidden1=nn.Linear(1600, 384),
        relu3=nn.ReLU(),
        hidden2=nn.Linear(384, 192),
        relu4=nn.ReLU(),
        out=nn.Linear(192, 10),
    )


def femnist_cnn() -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 62): FedMGDA+ table 4; 1,206,590 parameters.

    The table names no activation after the first convolution and the hidden layer; Reddi et al. 2021, its source, has
    ReLU there. Pixels are scaled to [0, 1].
    """
    return layers(
        pixels=Pixels((0.0,), (1.0,)),
        conv1=nn.Conv2d(1, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        drop2=nn.Dropout(0.25),
        flat=nn.Flatten(),
        hidden=nn.Linear(9216, 128),
        relu3=nn.ReLU(),
        drop3=nn.Dropout(0.5),
        out=nn.Linear(128, 62),
    )


def adult_logistic() -> nn.Module:
    """Binary features (n, 99) -> (n, 2): logistic regression, FedMGDA+ section 6.4; 200 parameters."""
    return layers(real=RealFeatures(), out=nn.Linear(99, 2))


def fedfv_cifar_mlp() -> nn.Module:
    """32 x 32 colour images, uint8 (n, 3, 32, 32) -> (n, 10): the code of FedFV; 656,810 parameters.

    Its standardisation has the deviations of image means, smaller than those of pixels.
    """
    return layers(
        pixels=Pixels(CIFAR_MEAN, (0.2023, 0.1994, 0.2010)),
        flat=nn.Flatten(),
        hidden1=nn.Linear(3072, 200),
        relu1=nn.ReLU(),
        hidden2=nn.Linear(200, 200),
        relu2=nn.ReLU(),
        out=nn.Linear(200, 10),
    )


def fedfv_linear() -> nn.Module:
    """Standardised pixels (n, 784) -> (n, 3): logistic regression, the code of FedFV; 2355 parameters.

    The paper names two hidden layers; its numbers are of this model, whose bias starts at zero.
    """
    out = nn.Linear(784, 3)
    nn.init.zeros_(out.bias)
    return layers(out=out)


def fedfv_mnist_cnn(mean: tuple[float, ...] = (0.0,), deviation: tuple[float, ...] = (1.0,)) -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 62): the code of FedFV; 608,702 parameters.

    As there: pixels in [0, 1], unless they are standardised; no activation after the convolutions, but one on the 62
    outputs, of which ten are used.
    """
    return layers(
        pixels=Pixels(mean, deviation),
        conv1=nn.Conv2d(1, 32, 5),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 5),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        hidden=nn.Linear(1024, 512),
        relu1=nn.ReLU(),
        out=nn.Linear(512, 62),
        relu2=nn.ReLU(),
    )


def fedfv_mnist_cnn_standardised() -> nn.Module:
    """`fedfv_mnist_cnn` for pixels with mean 0 and standard deviation 1: the same parameters."""
    return fedfv_mnist_cnn(GREY_MEAN, GREY_DEVIATION)


# Models of several objectives: an encoder, and a head for each.


def two_digits_mlp(objectives: Sequence[str]) -> nn.Module:
    """8 x 16 digits, (n, 8, 16) -> (n, 10) each: one hidden layer of 32 for both; 4128 + 2 x 330 = 4788 parameters.

    Our own. The hidden layer is narrow, so that the objectives compete for it.
    """
    encoder = layers(flat=nn.Flatten(), hidden=nn.Linear(128, 32), relu=nn.ReLU())
    return ManyHeads(encoder, {name: nn.Linear(32, 10) for name in objectives})


def lenet(objectives: Sequence[str]) -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 10) each: FedCMOO; 28,515 + 2 x 3060 = 34,635 parameters."""
    encoder = layers(
        pixels=Pixels(GREY_MEAN, GREY_DEVIATION),
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

    def head() -> nn.Module:
        return layers(hidden=nn.Linear(50, 50), relu=nn.ReLU(), drop=nn.Dropout(0.5), out=nn.Linear(50, 10))

    return ManyHeads(encoder, {name: head() for name in objectives})


def plain_lenet(objectives: Sequence[str]) -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 10) each; 21,330 + 2 x 510 = 22,350 parameters.

    The LeNet of the multi-task literature (Sener and Koltun 2018) without dropout and with one linear layer for a head.
    FMOL does not state its network; with this one, its numbers of rounds with i.i.d. clients come out.
    """
    encoder = layers(
        pixels=Pixels(GREY_MEAN, GREY_DEVIATION),
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
    return ManyHeads(encoder, {name: nn.Linear(50, 10) for name in objectives})


def cifar_mnist_cnn(objectives: Sequence[str]) -> nn.Module:
    """32 x 32 colour images, uint8 (n, 3, 32, 32) -> (n, 10) each; 1,685,888 + 2 x 20,310 = 1,726,508 parameters.

    The code of FedCMOO: two linear layers in a head, with nothing in between. One, as the paper has it, would make
    1,689,748 parameters.
    """
    encoder = layers(
        pixels=Pixels(CIFAR_MEAN, CIFAR_DEVIATION),
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

    def head() -> nn.Module:
        return layers(hidden=nn.Linear(192, 100), out=nn.Linear(100, 10))

    return ManyHeads(encoder, {name: head() for name in objectives})


def celeba_resnet(objectives: Sequence[str]) -> nn.Module:
    """32 x 32 faces, uint8 (n, 3, 32, 32) -> (n, 2) for each attribute: FedCMOO's ResNet-18 with linear heads."""
    return _faces(objectives, 2)


def celeba5_resnet(objectives: Sequence[str]) -> nn.Module:
    """32 x 32 faces, uint8 (n, 3, 32, 32) -> (n, 8) for each group of attributes: as `celeba_resnet`."""
    return _faces(objectives, 8)


def _faces(objectives: Sequence[str], outputs: int) -> nn.Module:
    mean = (72.39239876, 82.90891754, 73.15835921)  # of red, green and blue as FedCMOO subtracts them
    pixels = Pixels(tuple(value / 255 for value in mean), (1.0, 1.0, 1.0))
    return ManyHeads(
        layers(pixels=pixels, resnet=small_resnet18()), {name: nn.Linear(512, outputs) for name in objectives}
    )


def small_resnet18() -> nn.Module:
    """32 x 32 colour images, float32 (n, 3, 32, 32) -> (n, 512); 11,168,832 parameters.

    Torchvision's (He et al. 2016) with a stem of 3 x 3, stride 1, and no pooling after it, and with GroupNorm of two
    groups in place of BatchNorm. As in the code of FedCMOO, the last 4 x 4 map is averaged over its first three rows
    and columns.
    """
    from torchvision.models import resnet18  # noqa: PLC0415 - it loads slowly

    network: nn.Module = resnet18(norm_layer=partial(nn.GroupNorm, 2))
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    network.avgpool = nn.AvgPool2d(3)
    network.fc = nn.Identity()
    return network


def molecule_network(objectives: Sequence[str]) -> nn.Module:
    """Molecules (n, 29, 8) -> (n, 1) each: message passing and Set2Set, linear heads; 617,675 parameters."""
    return ManyHeads(MessagePassing(), {name: nn.Linear(64, 1) for name in objectives})


def river_mlp(objectives: Sequence[str]) -> nn.Module:
    """Flows (n, 64) -> (n, 1) each: hidden layers of 32, 16 and 8, tanh; 2816 parameters, 2744 in the encoder.

    The network that the code of exact Pareto optimal search (Mahapatra and Rajan 2020) has for RF1, whose last layer is
    the eight heads here. FMOL does not say which network it used.
    """
    encoder = layers(
        hidden1=nn.Linear(64, 32),
        tanh1=nn.Tanh(),
        hidden2=nn.Linear(32, 16),
        tanh2=nn.Tanh(),
        hidden3=nn.Linear(16, 8),
        tanh3=nn.Tanh(),
    )
    return ManyHeads(encoder, {name: nn.Linear(8, 1) for name in objectives})
