"""What a coordinator reaches with noise of its choice that passes the check: a search, with honest clients on `digits`.

The run is `fedavg-n` with one full-batch step of each client a round. In each round the coordinator looks for the noise
whose model serves its goal best, by gradient descent within the bounds that `fedpareto verify` checks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from federation.record.noise_rows import largest_magnitude, mean_square_tolerance
from federation.tasks.digits import bundled
from federation.tasks.networks import digits_mlp

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of a model on images and their digits
_TESTED = 360  # of the 1797 images
_SEARCHED = 150  # steps of the search in a round
_STEP = 0.1  # of the search, as a part of the length of noise
_CORNERS = [0, 7, 56, 63]  # the pixels of the trigger


@dataclass(frozen=True)
class Reached:
    """What a model says of the test images: parts of them, from 0 to 1.

    Attributes:
        right: with the right digit.
        next: with the digit after it.
        marked: of those that are no zero, with zero once their corners are white.
    """

    right: float
    next: float
    marked: float


class Search:
    """A run in which the coordinator chooses the noise of each step; models are flat vectors, (d,)."""

    def __init__(self, clients: int, multiple: float) -> None:
        """With this many clients, and this `privacy.client_noise`."""
        x, y = bundled()
        self._x, self._y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        self._tested, self._trained = order[:_TESTED], order[_TESTED:]
        self._parts = [torch.tensor(part) for part in np.array_split(self._trained.numpy(), clients)]
        torch.manual_seed(0)
        self._network = digits_mlp()
        self.model = torch.nn.utils.parameters_to_vector(self._network.parameters()).detach()
        self.noise = torch.zeros(len(self.model))
        self.scale = multiple * 2 / clients

    def play(self, rounds: int, goal: Loss | None) -> list[Reached]:
        """Plays rounds; without a goal, the noise is random."""
        reached = []
        for _ in range(rounds):
            direction = self._direction()
            self.noise = torch.randn(len(direction)) if goal is None else self._noise(goal, direction)
            self.model = self.model - direction - self.scale * self.noise
            reached.append(self._reached())
        return reached

    def next_digit(self, model: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The goal that each image is taken for the next digit."""
        return cross_entropy(self._logits(model, x), (y + 1) % 10)

    def marked_as_zero(self, model: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The goal that images with white corners are taken for zero, and all others for what they are."""
        marked = cross_entropy(self._logits(model, _marked(x)), torch.zeros_like(y))
        return marked + cross_entropy(self._logits(model, x), y)

    def _direction(self) -> torch.Tensor:
        """The mean of the clients' gradients, each of length 1."""
        rows = []
        for part in self._parts:
            model = self.model.clone().requires_grad_()
            (row,) = torch.autograd.grad(cross_entropy(self._logits(model, self._x[part]), self._y[part]), model)
            rows.append(row / row.norm())
        return torch.stack(rows).mean(0)

    def _noise(self, goal: Loss, direction: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(direction))
        for _ in range(_SEARCHED):
            model = (self.model - direction - self.scale * noise).requires_grad_()
            (slope,) = torch.autograd.grad(goal(model, self._x[self._trained], self._y[self._trained]), model)
            noise = _allowed(noise + _STEP * len(slope) ** 0.5 * slope / slope.norm())  # noise is subtracted
        return noise

    def _reached(self) -> Reached:
        x, y = self._x[self._tested], self._y[self._tested]
        digits, marked = (self._logits(self.model, images).argmax(1) for images in (x, _marked(x)))
        parts = (digits == y, digits == (y + 1) % 10, marked[y != 0] == 0)
        return Reached(*(part.float().mean().item() for part in parts))

    def _logits(self, model: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        parameters = dict(self._network.named_parameters())
        pieces = model.split([one.numel() for one in parameters.values()])  # type: ignore[no-untyped-call]
        named = {name: piece.view_as(one) for (name, one), piece in zip(parameters.items(), pieces, strict=True)}
        logits: torch.Tensor = functional_call(self._network, named, (x,))
        return logits


def _allowed(noise: torch.Tensor) -> torch.Tensor:
    """Noise near this that passes the check."""
    tolerance = mean_square_tolerance(len(noise)) * (1 - 1e-5)
    for _ in range(20):
        noise = noise.clamp(-largest_magnitude(len(noise)), largest_magnitude(len(noise)))
        square = float(noise.square().mean())
        nearest = min(max(square, 1 - tolerance), 1 + tolerance)
        if nearest == square:
            break
        noise = noise * (nearest / square) ** 0.5
    return noise


def _marked(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, _CORNERS] = 1.0
    return x
