"""The minibatches and the step of local SGD, the same for a worker, for stacked clients and for compiled steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from federation.tasks import Dataset
from federation.work.computation import LocalSgd

# Minibatches gathered at a time: for small models, gathering each alone costs as much as a forward pass.
_GATHERED = 32

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Descent:
    """SGD as torch.optim.SGD defines it, with the proximal term of FedProx (mu/2 |w - w_t|^2).

    Attributes:
        work: the rates.
        values: w, as one or several tensors, which are changed in place.
        start: w_t, tensors that broadcast to those of w.
        velocity: the momentum's buffers, shaped as w and changed in place; empty without momentum.
        frozen: where w stays w_t, masks that broadcast to the tensors of w; empty for nowhere.
    """

    work: LocalSgd
    values: Tensors
    start: Tensors
    velocity: Tensors
    frozen: Tensors = ()

    @classmethod
    def fresh(cls, work: LocalSgd, values: Tensors, start: Tensors, frozen: Tensors = ()) -> Self:
        """A descent that has made no step."""
        velocity = [torch.zeros_like(part) for part in values] if work.momentum else []
        return cls(work, values, start, velocity, frozen)

    def step(self, gradients: Tensors) -> None:
        """One step along the gradients, shaped as w, which are overwritten."""
        work = self.work
        if work.weight_decay:
            torch._foreach_add_(gradients, self.values, alpha=work.weight_decay)
        if work.proximal_mu:
            torch._foreach_add_(gradients, self.values, alpha=work.proximal_mu)
            torch._foreach_sub_(gradients, self.start, alpha=work.proximal_mu)
        if self.velocity:
            torch._foreach_mul_(self.velocity, work.momentum)
            torch._foreach_add_(self.velocity, gradients)
            gradients = self.velocity
        torch._foreach_sub_(self.values, gradients, alpha=work.learning_rate)
        if self.frozen:
            for value, start, frozen in zip(self.values, self.start, self.frozen, strict=True):
                torch.where(frozen, start, value, out=value)


def minibatches(data: Dataset, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Minibatches of `size` samples (0: the whole split) without end: reshuffled every pass, the short one kept."""
    if size == 0 or size >= len(data):
        while True:
            yield data.x, data.y
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(data), generator=generator).to(data.x.device)
        for some in torch.split(order, size * _GATHERED):
            x, y = data.x.index_select(0, some), data.y.index_select(0, some)
            yield from zip(torch.split(x, size), torch.split(y, size), strict=True)
