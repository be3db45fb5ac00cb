"""The minibatches and the step of local training, the same for a worker, for stacked clients and for compiled steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset
from federation.training.stored import StoredSamples
from federation.work.minibatch_sizes import Cut

# Minibatches gathered at a time: for small models, gathering each alone costs as much as a forward pass.
_GATHERED = 32

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(eq=False)
class Descent:
    """SGD, Adam or AdamW as torch.optim defines them, with the proximal term of FedProx (mu/2 |w - w_t|^2).

    Attributes:
        work: the optimiser and the rates.
        values: w, as one or several tensors, which are changed in place.
        start: w_t, tensors that broadcast to those of w.
        means: the momentum, or Adam's means of the gradients, shaped as w and changed in place; empty where there are
            none.
        squares: Adam's means of the squared gradients, likewise.
        frozen: where w stays w_t, masks that broadcast to the tensors of w; empty for nowhere.
        total: the steps of the training, for a schedule.
        made: steps so far, counted for Adam and schedules.
    """

    work: LocalSgd
    values: Tensors
    start: Tensors
    means: Tensors
    squares: Tensors = ()
    frozen: Tensors = ()
    total: int = 1
    made: int = 0

    @classmethod
    def fresh(cls, work: LocalSgd, values: Tensors, start: Tensors, total: int, frozen: Tensors = ()) -> Self:
        """A descent that has made none of its steps."""
        adam = work.optimizer != "sgd"
        means = [torch.zeros_like(part) for part in values] if work.momentum or adam else []
        squares = [torch.zeros_like(part) for part in values] if adam else []
        return cls(work, values, start, means, squares, frozen, total)

    def step(self, gradients: Tensors) -> None:
        """One step along the gradients, shaped as w, which are overwritten."""
        work, rate = self.work, self.work.learning_rate
        if not work.plain:
            rate *= work.schedule.factor(self.made, self.total)
            self.made += 1
        if work.optimizer == "adamw":
            torch._foreach_mul_(self.values, 1 - rate * work.weight_decay)
        elif work.weight_decay:
            torch._foreach_add_(gradients, self.values, alpha=work.weight_decay)
        if work.proximal_mu:
            torch._foreach_add_(gradients, self.values, alpha=work.proximal_mu)
            torch._foreach_sub_(gradients, self.start, alpha=work.proximal_mu)
        if work.optimizer == "sgd":
            if self.means:
                torch._foreach_mul_(self.means, work.momentum)
                torch._foreach_add_(self.means, gradients)
                gradients = self.means
            torch._foreach_sub_(self.values, gradients, alpha=rate)
        else:
            self._adam(gradients, rate)
        if self.frozen:
            for value, start, frozen in zip(self.values, self.start, self.frozen, strict=True):
                torch.where(frozen, start, value, out=value)

    def _adam(self, gradients: Tensors, rate: float) -> None:
        """Kingma and Ba, 2015, algorithm 1, in the order of operations of torch.optim.Adam."""
        work = self.work
        torch._foreach_lerp_(self.means, gradients, 1 - work.beta1)
        torch._foreach_mul_(self.squares, work.beta2)
        torch._foreach_addcmul_(self.squares, gradients, gradients, 1 - work.beta2)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, (1 - work.beta2**self.made) ** 0.5)
        torch._foreach_add_(roots, work.epsilon)
        torch._foreach_addcdiv_(self.values, self.means, roots, -rate / (1 - work.beta1**self.made))


def minibatches(
    data: Dataset | StoredSamples, size: int, seed: int, count: int, *, even: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """At least `count` minibatches of `size` samples (0: the whole split): reshuffled every pass, the short one kept.

    `even` is that of `Cut`.

    Raises:
        DataError: a sample that is not in memory cannot be read.
    """
    if isinstance(data, StoredSamples):
        yield from data.minibatches(size, seed, count, even=even)
        return
    if size == 0 or size >= len(data):
        while True:
            yield data.x, data.y
    generator = torch.Generator().manual_seed(seed)
    gathered = in_groups(Cut.of(len(data), size, even=even))
    while True:
        order = torch.randperm(len(data), generator=generator).to(data.x.device)
        for some, sizes in zip(torch.split(order, list(map(sum, gathered))), gathered, strict=True):
            x, y = data.x.index_select(0, some), data.y.index_select(0, some)
            yield from zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)


def in_groups(cut: Cut) -> list[list[int]]:
    """The sizes of the minibatches of one pass, in the groups that are gathered at a time."""
    sizes = cut.sizes
    return [sizes[first : first + _GATHERED] for first in range(0, len(sizes), _GATHERED)]
