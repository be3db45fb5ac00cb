"""The models of the papers' tables, with the number of parameters that each comes to."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class Real(nn.Module):
    """From features of any element type to float32, as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers, of the same shape."""
        return x.float()


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


def digits_mlp() -> nn.Module:
    """8 x 8 digits, (n, 64) -> (n, 10): one hidden layer of 64; 4810 parameters."""
    return nn.Sequential(OrderedDict(hidden=nn.Linear(64, 64), relu=nn.ReLU(), out=nn.Linear(64, 10)))


def grey_cnn(mean: float, deviation: float) -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 10): FedMGDA+ table 3; 21,840 parameters.

    Args:
        mean: of the training pixels, scaled to [0, 1].
        deviation: their standard deviation.
    """
    return nn.Sequential(
        OrderedDict(
            pixels=Pixels((mean,), (deviation,)),
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
    )


def cifar_cnn() -> nn.Module:
    """32 x 32 colour images, uint8 (n, 3, 32, 32) -> (n, 10): FedMGDA+ table 2; 797,962 parameters."""
    return nn.Sequential(
        OrderedDict(
            pixels=Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
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
    )


def femnist_cnn() -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 62): FedMGDA+ table 4; 1,206,590 parameters.

    The table names no activation after the first convolution and the hidden layer; Reddi et al. 2021, whom it follows,
    have ReLU there. Pixels are scaled to [0, 1].
    """
    return nn.Sequential(
        OrderedDict(
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
    )


def adult_logistic() -> nn.Module:
    """Binary features (n, 99) -> (n, 2): logistic regression, FedMGDA+ section 6.4; 200 parameters."""
    return nn.Sequential(OrderedDict(real=Real(), out=nn.Linear(99, 2)))


def fedfv_cifar_mlp() -> nn.Module:
    """32 x 32 colour images, uint8 (n, 3, 32, 32) -> (n, 10): the code of FedFV; 656,810 parameters.

    Its standardisation has the deviations of image means, smaller than those of pixels.
    """
    return nn.Sequential(
        OrderedDict(
            pixels=Pixels((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
            flat=nn.Flatten(),
            hidden1=nn.Linear(3072, 200),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(200, 200),
            relu2=nn.ReLU(),
            out=nn.Linear(200, 10),
        )
    )


def fedfv_linear() -> nn.Module:
    """Standardised pixels (n, 784) -> (n, 3): logistic regression, the code of FedFV; 2355 parameters.

    The paper names two hidden layers; its numbers are of this model, whose bias starts at zero.
    """
    out = nn.Linear(784, 3)
    nn.init.zeros_(out.bias)
    return nn.Sequential(OrderedDict(out=out))


def fedfv_mnist_cnn() -> nn.Module:
    """28 x 28 grey images, uint8 (n, 1, 28, 28) -> (n, 62): the code of FedFV; 608,702 parameters.

    As there: pixels in [0, 1], no activation after the convolutions, but one on the 62 outputs, of which ten are used.
    """
    return nn.Sequential(
        OrderedDict(
            pixels=Pixels((0.0,), (1.0,)),
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
    )
