"""One step of local SGD, the same for a worker, for stacked clients and for compiled steps."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from federation.work.computation import LocalSgd

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Descent:
    """SGD as torch.optim.SGD defines it, with the proximal term of FedProx (mu/2 |w - w_t|^2).

    Attributes:
        work: the rates.
        values: w, as one or several tensors, which are changed in place.
        start: w_t, tensors that broadcast to those of w.
        velocity: the momentum's buffers, shaped as w and changed in place; empty without momentum.
    """

    work: LocalSgd
    values: Tensors
    start: Tensors
    velocity: Tensors

    @classmethod
    def fresh(cls, work: LocalSgd, values: Tensors, start: Tensors) -> Self:
        """A descent that has made no step."""
        return cls(work, values, start, [torch.zeros_like(part) for part in values] if work.momentum else [])

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
