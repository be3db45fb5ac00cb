"""Tries a task on a batch of its data before anything is trained, to find data that the model cannot take.

The batch holds what goes wrong most often: samples with values that are not finite, and those with the smallest and
largest label and feature, which a loss or an embedding may not know.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from federation.tasks import DataError, Dataset, Pool, Splits, Task, TaskError, metrics_of, task_code
from federation.tasks.parameters import build, trainable
from federation.training.objective_losses import OwnMetrics
from federation.training.objective_losses import losses as losses_of
from federation.training.stored import StoredSamples, with_stored

Split = Dataset | StoredSamples

_FIRST = 8  # samples from the beginning of a split
_BAD = 4  # samples with values that are not finite
_MAX_COLUMNS = 64  # labels of a sample that are looked at one by one


def try_splits(task: Task, splits: Splits, objectives: Collection[str] = (), whose: str = "") -> None:
    """Tries a client's data on the task's model; an empty split is passed over.

    `objectives` are those that the client serves, none for all; `whose` names the client in messages if there are
    several.

    Raises:
        DataError: values that are not finite make a loss that is not finite; the message names the split.
        TaskError: the task's code raised an exception; the message names the split and the line of code.
    """
    names = [f"{whose and whose + ': '}the {name} split" for name in ("train", "validation", "test")]
    _try(task, dict(zip(names, with_stored(splits), strict=True)), objectives)


def try_pool(task: Task, pool: Pool) -> None:
    """Tries all the data of a task, before it is dealt to clients. Errors as of `try_splits`."""
    data = {"the data": Dataset(pool.x, pool.y)}
    if pool.test is not None:
        data["the official test data"] = Dataset(pool.test.x, pool.test.y)
    _try(task, data, ())


def _try(task: Task, data: Mapping[str, Split], objectives: Collection[str]) -> None:
    model = build(task)
    for place, split in data.items():
        if len(split):
            with task_code(task.name, f"a forward and backward pass on {place} ({_labels(split)})"):
                losses = _losses(task, model, split)
            for name, loss in losses.items():
                if name in (objectives or task.objectives) and not loss.isfinite():
                    raise DataError(f"task {task.name!r}: {_why(name, loss, place, split)}")


def _losses(task: Task, model: torch.nn.Module, split: Split) -> dict[str, Tensor]:
    """The losses of a batch, after everything that training and evaluation do with one."""
    chosen = torch.tensor(sorted(set(_choice(split))))
    x, y = split.take(chosen) if isinstance(split, StoredSamples) else (split.x[chosen], split.y[chosen])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model.eval()
        with torch.no_grad():
            output = model(x)
            losses = losses_of(task, output, y)
            task.correct(output, y)
            own = OwnMetrics(task, [kind.name for kind in metrics_of(task)])
            own.update(output, y)
            own.compute()
        model.train()
        model.zero_grad()
        trained = task.losses(model(task.augment(x)), y)
        torch.stack(list(trained.values())).sum().backward()  # type: ignore[no-untyped-call]
    if all(parameter.grad is None for _, parameter in trainable(model)):
        raise TaskError(f"task {task.name!r}: no loss depends on a trainable parameter of the model")
    return dict(losses)


def _choice(split: Split) -> Iterator[int]:
    """The samples of the batch."""
    yield from range(min(_FIRST, len(split)))
    if isinstance(split, StoredSamples):  # to look at all would take too long
        yield len(split) - 1
        return
    for values in (split.x, split.y):
        bad = _bad(values)
        yield from bad[:_BAD].tolist()
        flat = (torch.nan_to_num(values) if len(bad) else values).reshape(len(split), -1)
        if flat.dtype == torch.bool or not flat.shape[1]:
            continue
        if flat.shape[1] > _MAX_COLUMNS:  # of many features the extremes of all together
            flat = torch.stack([flat.amin(dim=1), flat.amax(dim=1)], dim=1)
        yield from flat.argmin(dim=0).tolist()
        yield from flat.argmax(dim=0).tolist()


def _bad(values: Tensor) -> Tensor:
    """The samples that hold a value that is not finite, ascending."""
    if not values.is_floating_point():
        return torch.empty(0, dtype=torch.int64)
    return (~values.reshape(len(values), -1).isfinite().all(dim=1)).nonzero()[:, 0]


def _labels(split: Split) -> str:
    if isinstance(split, StoredSamples):
        return f"its first {min(_FIRST, len(split))} samples and the last one"
    y = split.y
    if y.dtype == torch.bool:
        return "labels true and false"
    finite = y[y.isfinite()]
    return f"labels {finite.min().item():g} to {finite.max().item():g}" if len(finite) else "no finite label"


def _why(name: str, loss: Tensor, stage: str, split: Split) -> str:
    causes = [
        f"{len(bad)} of its {len(split)} samples have {noun} that are not finite (the first is sample {bad[0]}, "
        "counted from 0)"
        for noun, bad in (
            () if isinstance(split, StoredSamples) else (("features", _bad(split.x)), ("labels", _bad(split.y)))
        )
        if len(bad)
    ]
    cause = " and ".join(causes) or "the data is finite, so look at the model and at losses()"
    return f"the loss {name!r} on {stage} is {loss.item():g}: {cause}"
