"""The minibatches of a training split."""

from collections.abc import Iterator

import torch
from torch import Tensor

from federation.tasks import Dataset

# Minibatches gathered at a time: for small models, gathering each alone costs as much as a forward pass.
_GATHERED = 32


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
