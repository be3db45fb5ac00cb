"""DP-SGD (Abadi et al., 2016, algorithm 1): gradients of single samples, clipped, added up, and covered by noise.

Each gradient is that of the loss of a batch of one, so it depends on its sample alone whatever the task's loss is; a
gradient taken out of a larger batch does so only where the loss is a mean over samples. Opacus says which models cannot
be trained one sample at a time, such as those with BatchNorm.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from federation.owners_code import passes, place
from federation.spec import accounting
from federation.spec.computation import PrivateSgd
from federation.spec.noise import Noise
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, Task
from federation.tasks import parameters as flat
from federation.training.determinism import without_kernel
from federation.training.objective_losses import losses, weighted
from federation.training.stored import StoredSamples
from federation.work.base import WorkError

# Gradients of single samples that are in memory at a time, in elements (128 MiB).
_AT_ONCE = 1 << 25


class PrivateGradients:
    """Noisy gradients of a task's loss on Poisson samples of a training split.

    Args:
        model: in training mode; its parameters are read at each step.
        task: whose losses count.
        data: the training split, not empty.
        sgd: whose batch size is the expected number of samples.
        private: the noise and the bound on each sample.
        noise: where noise and samples are drawn from.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        data: Dataset | StoredSamples,
        sgd: LocalSgd,
        private: PrivateSgd,
        noise: Noise,
    ) -> None:
        self._model, self._task, self._data, self._private, self._noise = model, task, data, private, noise
        self._parameters = dict(flat.trainable(model))
        self._device = data.device if isinstance(data, StoredSamples) else data.x.device
        self._rate = sgd.sampling_rate(len(data))
        self._chunk = max(1, _AT_ONCE // sum(part.numel() for part in self._parameters.values()))

    def next(self, weights: Mapping[str, float]) -> list[Tensor]:
        """The gradient of a weighted sum of objectives on a fresh sample, float64, shaped as the parameters.

        It is divided by the expected number of samples, not by the number that was drawn, which may be 0.
        """
        drawn = self._draw()
        total = [torch.zeros_like(part, dtype=torch.float64) for part in self._parameters.values()]
        for some in torch.split(drawn, self._chunk):
            if len(some):
                for part, clipped in zip(total, self._clipped(some, weights), strict=True):
                    part.add_(clipped)
        expected = self._rate * len(self._data)
        deviation = self._private.noise * self._private.clip
        for part in total:
            drawn_noise = torch.from_numpy(self._noise.gaussian(part.numel())).view(part.shape)
            part.add_(drawn_noise.to(part.device), alpha=deviation).div_(expected)
        return total

    def _draw(self) -> Tensor:
        """A Poisson sample: each sample with the same probability, independently of the others and of any seed."""
        count, device = len(self._data), self._device
        if self._rate >= 1:
            return torch.arange(count, device=device)
        return torch.from_numpy((self._noise.uniform(count) <= self._rate).nonzero()[0]).to(device)

    def _clipped(self, some: Tensor, weights: Mapping[str, float]) -> list[Tensor]:
        """The sum of the gradients of these samples, each clipped to norm C; one that is not finite counts as zero."""
        x, y = _take(self._data, some)
        x = self._task.augment(x)

        def loss(parameters: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
            output = functional_call(self._model, parameters, (one_x[None],))
            return weighted(losses(self._task, output, one_y[None]), weights)

        parameters = {name: part.detach() for name, part in self._parameters.items()}
        gradients = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")(parameters, x, y)
        rows = [gradients[name].flatten(1) for name in parameters]
        norms = torch.stack([row.norm(dim=1) for row in rows]).norm(dim=0)
        factors = torch.where(norms.isfinite(), (self._private.clip / norms).clamp(max=1.0), 0.0)
        return [
            (factors @ row.nan_to_num(0.0, 0.0, 0.0)).view(part.shape)
            for row, part in zip(rows, parameters.values(), strict=True)
        ]


def _take(data: Dataset | StoredSamples, index: Tensor) -> tuple[Tensor, Tensor]:
    """Some samples."""
    if isinstance(data, StoredSamples):
        return data.take(index)
    index = index.to(data.x.device)
    return data.x.index_select(0, index), data.y.index_select(0, index)


def check_suits(model: nn.Module, task: Task, data: Dataset | StoredSamples) -> None:
    """Checks that a model can be trained with noise, on one sample of the data, before anything is released.

    Raises:
        WorkError: `dp-missing`: a package is not installed; `dp-model`: the model mixes samples, or cannot be trained
            one sample at a time.
    """
    if find_spec("opacus") is None:
        raise WorkError(f"training with noise needs the package opacus; {accounting.INSTALL}", reason="dp-missing")
    try:
        accounting.check_there()
    except accounting.AccountingError as error:
        raise WorkError(str(error), reason="dp-missing") from None
    from opacus.validators import ModuleValidator  # noqa: PLC0415 - an extra

    if problems := ModuleValidator.validate(model.train(), strict=False):
        unsuitable = "the model cannot be trained with noise"
        raise WorkError(f"{unsuitable}: {problems[0]}", reason="dp-model", wire=unsuitable)
    if not len(data):
        return
    first = Dataset(*_take(data, torch.tensor([0])))
    trial = PrivateGradients(
        model, task, first, LocalSgd(steps=1, batch_size=0, learning_rate=1.0), PrivateSgd(noise=1.0, clip=1.0), Noise()
    )
    try:
        trial.next(dict.fromkeys(task.objectives, 1.0))
    except BaseException as error:  # of torch, or of the task's own code
        if passes(error) or without_kernel(error):  # without a kernel the trainer begins again
            raise
        line = (str(error) or type(error).__name__).splitlines()[0]
        unsuitable = "the model cannot be trained one sample at a time"
        wire = f"{unsuitable}: {place(error)}"
        raise WorkError(f"{unsuitable}: {line}", reason="dp-model", wire=wire) from error
