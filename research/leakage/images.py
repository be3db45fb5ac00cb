"""Gradient inversion: images whose gradient points in the direction that the coordinator saw.

    minimise  1 - cos(g(x), observed) + tv TV(x)   over images x in [0, 1]

by Adam from random images (Geiping, Bauermeister, Droege and Moeller, 2020, "Inverting Gradients"; after Zhu, Liu and
Han, 2019, DLG). The coordinator is given the labels. For a sketch the cosine is that of sketches; for a private round
g is the weighted sum of all members' unit gradients, and the images of all members are unknown.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad, vmap

from leakage.federation import Network

SIDE = 8
_VARIATION = 1e-3  # tv
_RATE = 0.05
_BEST = 1e-5  # the least mean square error that counts: 50 dB


def gradients(network: Network, w: Tensor, x: Tensor, y: Tensor, clip: float | None = None) -> Tensor:
    """The mean gradient of a batch, (d,); with a norm, gradients of single samples are clipped to it first."""
    if clip is None:
        value: Tensor = grad(network.loss)(w, x, y)
        return value
    single = vmap(grad(network.loss_of_one), in_dims=(None, 0, 0))(w, x, y)
    clipped: Tensor = (single * (clip / single.norm(dim=1, keepdim=True).clamp(min=clip))).mean(0)
    return clipped


def inverted(
    observed: Tensor,
    explain: Callable[[Tensor, Tensor], Tensor],
    labels: Tensor,
    restarts: int,
    iterations: int,
    generator: torch.Generator,
) -> Tensor:
    """The images of each problem that explain it best, (p, *shape, 64).

    Args:
        observed: what the coordinator saw, (p, f), of p independent problems.
        explain: from the images of one problem, (*shape, 64), and labels, `shape`, to what would be seen, (f,). The
            shape is (n,) for images of one member, (m, n) for those of all members of a sum.
        labels: (p, *shape).
        restarts: random images from which each problem is solved.
        iterations: of Adam.
        generator: of the random images.
    """
    labels = labels.repeat(restarts, *[1] * (labels.dim() - 1))
    observed = observed.repeat(restarts, 1)
    images = torch.rand((*labels.shape, SIDE * SIDE), generator=generator)

    def misfit(x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
        return 1 - torch.nn.functional.cosine_similarity(explain(x, y), seen, dim=0)

    def loss(x: Tensor, y: Tensor, seen: Tensor) -> Tensor:
        return misfit(x, y, seen) + _VARIATION * _total_variation(x)

    slope = vmap(grad(loss))
    optimizer = torch.optim.Adam([images], lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
    for _ in range(iterations):
        images.grad = slope(images, labels, observed)
        optimizer.step()
        schedule.step()
        images.clamp_(0, 1)
    best = vmap(misfit)(images, labels, observed).view(restarts, -1).argmin(0)
    return images.view(restarts, -1, *images.shape[1:])[best, torch.arange(len(best))]


def _total_variation(x: Tensor) -> Tensor:
    squares = x.reshape(-1, SIDE, SIDE)
    return squares.diff(dim=1).abs().mean() + squares.diff(dim=2).abs().mean()


def matched(found: Tensor, true: Tensor, labels: Tensor) -> Tensor:
    """The images of one batch, (n, 64), in the order of the true ones: those of one label in their best order."""
    errors = (found[:, None] - true[None]).square().mean(2) + 1e3 * (labels[:, None] != labels[None])
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - loading takes 0.3 s

    rows, columns = linear_sum_assignment(errors.numpy())
    return found[torch.from_numpy(rows[np.argsort(columns)])]


def decibels(found: Tensor, true: Tensor) -> NDArray[np.float64]:
    """The peak signal-to-noise ratio of each image, (n,), at most 50 dB."""
    errors = (found - true).square().mean(1).clamp(min=_BEST)
    return np.asarray((-10 * errors.log10()).double().numpy())


def recognised(found: Tensor, indices: NDArray[np.int64], x: Tensor, y: Tensor) -> NDArray[np.bool_]:
    """Whether the true image, x[index], is the nearest of all images of its label, for each found one, (n,)."""
    distances = torch.cdist(found, x)
    distances[y[indices][:, None] != y[None]] = torch.inf
    return np.asarray(distances.argmin(1).numpy() == indices)
