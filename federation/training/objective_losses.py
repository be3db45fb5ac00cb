"""The losses of a task's objectives, and the scores of a model."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from federation.spec import task_metrics as own
from federation.spec.objective_names import JOINT
from federation.tasks import Dataset, Task, TaskError
from federation.training import TrainingStopped
from federation.training.lending import Lending
from federation.training.stored import StoredSamples
from federation.value_words import in_words


def losses(task: Task, output: object, y: Tensor) -> Mapping[str, Tensor]:
    """The mean loss of a batch for each objective.

    Raises:
        TaskError: `losses` of the task returned anything else.
    """
    values: object = task.losses(output, y)
    if not isinstance(values, Mapping):
        example = ", ".join(f"{name!r}: ..." for name in task.objectives)
        raise TaskError(
            f"task {task.name!r}: losses() returned {in_words(values)}; needed: the mean loss of each objective by "
            f"name, {{{example}}}"
        )
    if set(values) != set(task.objectives):
        names = sorted(map(str, values))
        raise TaskError(f"task {task.name!r}: losses() returned {names}, its objectives are {sorted(task.objectives)}")
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TaskError(
                f"task {task.name!r}: losses()[{name!r}] is {in_words(value)}; needed: the mean over the batch, a "
                "tensor of one number, as .mean() gives it"
            )
    return values


def weighted(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """sum_k weights_k losses_k; a single loss with weight 1 is returned as it is."""
    terms = [losses[name] if weight == 1.0 else weight * losses[name] for name, weight in weights.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@dataclass(frozen=True)
class Measured:
    """The scores of a model on one split: mean losses and shares of right samples by objective, and the task's metrics.

    All are empty for an empty split, or without a measurement. An accuracy under "" is for all objectives.
    """

    losses: Mapping[str, float]
    accuracies: Mapping[str, float]
    samples: int
    others: Mapping[str, float] = field(default_factory=dict)

    def scores(self) -> dict[str, float]:
        """The scores in the form of `Trainer.evaluate`."""
        scores = {}
        for kind, values in (("loss", self.losses), ("accuracy", self.accuracies)):
            if values:
                scores[kind] = sum(values.values()) / len(values)
            if set(self.losses) != {JOINT}:
                scores |= {f"{kind}/{name}": value for name, value in values.items() if name}
        return {**scores, **self.others}


def correct(task: Task, output: object, y: Tensor, objectives: Sequence[str]) -> dict[str, Tensor]:
    """Marks the right samples of a batch, (n,) of bool, by objective; under "" if the task does not separate them.

    Raises:
        TaskError: `correct` of the task returned anything else.
    """
    hits: Any = task.correct(output, y)
    if hits is None:
        return {}
    marks: dict[str, Any] = {"": hits}
    if isinstance(hits, Mapping):
        if not set(hits) <= set(task.objectives):
            names = sorted(map(str, hits))
            raise TaskError(
                f"task {task.name!r}: correct() returned {names}, its objectives are {sorted(task.objectives)}"
            )
        marks = {name: hits[name] for name in objectives if name in hits}
    for value in marks.values():
        if not isinstance(value, Tensor) or value.shape != (len(y),):
            raise TaskError(
                f"task {task.name!r}: correct() returned {in_words(value)} for {len(y)} samples; needed: a tensor "
                f"({len(y)},) that marks the right ones, or None"
            )
    return marks


class OwnMetrics:
    """Some of a task's metrics over batches. Unknown names are ignored."""

    def __init__(self, task: Task, names: Collection[str]) -> None:
        self._task = task
        self._metrics = {name: metric for name, metric in task.metrics().items() if name in names} if names else {}
        for metric in self._metrics.values():
            metric.measure.reset()  # the task may give the same one again

    def update(self, output: object, y: Tensor) -> None:
        """Adds a batch: the output of the model, and the targets."""
        if self._metrics:
            output, y = tree_map_only(Tensor, lambda part: part.detach().cpu(), (output, y))
        for metric in self._metrics.values():
            metric.measure.update(output, y)

    def compute(self) -> dict[str, float]:
        """The values by name, as in `federation.spec.task_metrics.values`. Raises TaskError if one is not a number."""
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            try:
                values |= own.values(name, metric.measure.compute())
            except ValueError as error:
                raise TaskError(f"task {self._task.name!r}: {error}") from None
        return values


def _in_order(data: Dataset | StoredSamples, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples in batches of at most this size."""
    if isinstance(data, StoredSamples):
        return data.in_order(size)
    return zip(torch.split(data.x, size), torch.split(data.y, size), strict=True)


def measure(
    model: torch.nn.Module,
    task: Task,
    data: Dataset | StoredSamples,
    objectives: Sequence[str],
    batch_size: int,
    stopped: Callable[[], bool],
    lending: Lending,
    metrics: Collection[str] = (),
) -> Measured:
    """Mean losses and accuracies of a model over a split, and some of the task's metrics; nothing for an empty one.

    It calls `stopped` before every forward pass of `batch_size` samples; `lending` lends them to the task's code.

    Raises:
        TrainingStopped: `stopped` returned True.
        TaskError: a metric that is not a number; or losses, marks or writes as of `losses`, `correct` and `Lending`.
        DataError: a sample that is not in memory cannot be read.
    """
    count = len(data)
    if count == 0:
        return Measured({}, {}, 0)
    sums = dict.fromkeys(objectives, 0.0)
    right: dict[str, float] = defaultdict(float)
    others = OwnMetrics(task, metrics)
    model.eval()
    with torch.no_grad():
        for x, y in _in_order(data, batch_size):
            if stopped():
                raise TrainingStopped
            with lending.of("evaluation", x, y) as loan:
                output = model(loan.give(x))
                values = losses(task, *loan.give(output, y))
                for name in objectives:
                    sums[name] += values[name].item() * len(y)
                own_output, own_y = loan.give(output, y)
                for name, hits in correct(task, own_output, own_y, objectives).items():
                    right[name] += hits.sum().item()
                others.update(*loan.give(output, y))
    means = {name: value / count for name, value in sums.items()}
    return Measured(means, {name: value / count for name, value in right.items()}, count, others.compute())
