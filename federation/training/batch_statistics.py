"""Models that normalise with the statistics of a minibatch, as BatchNorm does: those of very few samples mislead them.

The minibatches of such a model are evened out, as `Cut` says. All other models get the minibatches of `torch.split`.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from federation.tasks import Task
from federation.tasks import parameters as flat
from federation.text import counted
from federation.training.buffers import buffers_kept
from federation.training.determinism import without_kernel
from federation.training.objective_losses import losses
from federation.training.reasons import reason_of
from federation.work.base import WorkError
from federation.work.minibatch_sizes import Forming

TRIED = 2  # samples
WHY_TWO = "the model trains on two or more only, as models with BatchNorm do"


def is_evened(forming: Forming, *, layers: bool, needs_two: Callable[[], bool]) -> bool:
    """Whether a training evens its minibatches out.

    `layers` says if a layer of the model normalises with the statistics of a minibatch; `needs_two` is `needs_two` of
    its model, which is asked only where the answer changes something.

    Raises:
        WorkError: `batch-of-one`: a single sample would pass through a model that needs two.
    """
    alone = forming.smallest_part(even=True) == 1
    if not layers:
        changes = forming.parts(even=True) != forming.parts(even=False)
        if not ((changes or alone) and needs_two()):
            return False
    if alone and needs_two():
        raise WorkError(_refusal(forming), reason="batch-of-one")
    return True


def normalizes(model: nn.Module) -> bool:
    """True if a BatchNorm layer of the model, in its present mode, uses the statistics of the minibatch."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def needs_two(task: Task, model: nn.Module, objectives: Sequence[str], x: Tensor, y: Tensor) -> bool:
    """True if the model, in its present mode, trains on two samples together, and on neither of them alone.

    The features and labels are those of the two. They, the buffers and the gradients stay as they are.
    """
    with buffers_kept(model), warnings.catch_warnings(action="ignore"):  # such as those of std() of one sample
        alone = any(_trains(task, model, objectives, x[at : at + 1], y[at : at + 1]) for at in range(TRIED))
        return not alone and _trains(task, model, objectives, x, y)


def _trains(task: Task, model: nn.Module, objectives: Sequence[str], x: Tensor, y: Tensor) -> bool:
    """True if a pass of training raises nothing, and gives finite numbers."""
    try:
        values = losses(task, model(task.augment(x.clone())), y.clone())
        total = torch.stack([values[name] for name in objectives]).sum()
        gradients = torch.autograd.grad(total, [part for _, part in flat.trainable(model)], allow_unused=True)
    except Exception as error:
        if without_kernel(error) or reason_of(error) == "memory":
            raise
        return False
    return all(part is None or bool(part.isfinite().all()) for part in (total, *gradients))


def _refusal(forming: Forming) -> str:
    alone = forming.smallest_minibatch(even=True) == 1
    key = "train.batch_size" if alone else "train.micro_batch"
    remedy = "use" if forming.samples == 1 else f"use another {key},"
    facts = [counted(forming.samples, "training sample"), f"train.batch_size = {forming.batch_size}"]
    if forming.micro_batch:
        facts.append(f"train.micro_batch = {forming.micro_batch}")
    noun = "minibatch" if alone else "part of a minibatch"
    return (
        f"a {noun} would have one sample ({', '.join(facts)}), and {WHY_TWO}: {remedy} more samples, or a model with "
        "GroupNorm or LayerNorm"
    )
