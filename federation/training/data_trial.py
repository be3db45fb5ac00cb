"""Tries a task on batches of its data before a client takes part, to find data that the model cannot take.

A batch holds what goes wrong most often: samples with values that are not finite, and those with the smallest and
largest label and feature, which a loss or an embedding may not know. What is done with it is what rounds do: training
where rounds train, evaluation everywhere, with the trainer's own model, device and kernels. Minibatch and precision are
those of a run, so rehearsals and simulations try them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from federation.tasks import Dataset, LossError, Task, TaskError, metrics_of, task_code
from federation.tasks.classification import check_labels
from federation.tasks.parameters import build, trainable
from federation.training.buffers import buffers_kept
from federation.training.lending import Lending
from federation.training.objective_losses import losses, measure
from federation.training.stored import StoredSamples
from federation.value_words import dtype_name, in_words

Split = Dataset | StoredSamples
Losses = dict[str, float]

_FIRST = 8  # samples from the beginning of a split
_BAD = 4  # samples with values that are not finite
_MAX_COLUMNS = 64  # labels of a sample that are looked at one by one


@dataclass(frozen=True, eq=False)
class DataTrial:
    """A trial of a trainer's model.

    Attributes:
        task: of the model.
        model: the trainer's.
        device: of the model.
        objectives: those that the client serves.
        lending: learns whether the task's code writes into what it is given.
        run: does work from a seed, perhaps twice, with the trainer's kernels.
    """

    task: Task
    model: nn.Module
    device: torch.device
    objectives: Sequence[str]
    lending: Lending
    run: Callable[[int, Callable[[], Losses]], Losses]

    def try_on(self, data: Mapping[str, Split], trained: Collection[str], start: Callable[[], None]) -> None:
        """Evaluates the model on a batch of each data set, and trains it on those in `trained`; an empty one is passed.

        The names are those in messages. `start` loads the initial model. The model's buffers stay as they are.

        Raises:
            LossError: a loss is not finite; the message names the data set.
            TaskError: the task's code raised an exception; the message names the data set and the line of code.
        """
        with buffers_kept(self.model):
            for place, split in data.items():
                if len(split):
                    x, y = _batch(split)
                    self._try("an evaluation of", self._evaluate, place, split, x, y, start)
                    if place in trained:
                        self._try("a training pass on", self._train, place, split, x, y, start)

    def _try(
        self,
        doing: str,
        compute: Callable[[nn.Module, Tensor, Tensor], Losses],
        place: str,
        split: Split,
        x: Tensor,
        y: Tensor,
        start: Callable[[], None],
    ) -> None:
        def work() -> Losses:
            start()
            return compute(self.model, x.to(self.device, copy=True), y.to(self.device, copy=True))

        with task_code(self.task.name, f"{doing} {place} ({_labels(split)}{_types(x, y)})"):
            try:
                values = self.run(0, work)
            except RuntimeError as error:
                if "device-side assert" in str(error):  # the same on the CPU says which value is wrong
                    compute(build(self.task), x.cpu(), y.cpu())
                raise
        for name, loss in values.items():
            if not math.isfinite(loss):
                raise LossError(f"task {self.task.name!r}: {_why(name, loss, place, split)}")

    def _evaluate(self, model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """The losses of a batch, after everything that an evaluation does with one."""
        kinds = [kind.name for kind in metrics_of(self.task)]
        if type(self.task).losses is Task.losses:  # a GPU would say no more than "device-side assert"
            model.eval()
            with torch.no_grad():
                check_labels(self.task.name, model(x.clone()), y)
        given = self.objectives, len(y), lambda: False, self.lending, kinds
        return dict(measure(model, self.task, Dataset(x, y), *given).losses)

    def _train(self, model: nn.Module, x: Tensor, y: Tensor) -> Losses:
        """The losses of a batch, after a forward and a backward pass."""
        reached: list[Tensor] = []
        parameters = [parameter for _, parameter in trainable(model)]
        hooks = [
            parameter.register_post_accumulate_grad_hook(reached.append)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]
        try:
            model.train()
            with self.lending.of("training", x, y) as loan:
                own_x, own_y = loan.give(x, y)
                augmented: object = self.task.augment(own_x)
                if not isinstance(augmented, Tensor) or len(augmented) != len(own_y):
                    raise TaskError(
                        f"task {self.task.name!r}: augment() returned {in_words(augmented)} for {len(own_y)} samples; "
                        "needed: as many samples, varied"
                    )
                values = losses(self.task, model(augmented), own_y)
            total = torch.stack([values[name] for name in self.objectives]).sum()
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
        if not reached:
            raise TaskError(f"task {self.task.name!r}: no loss depends on a trainable parameter of the model")
        return {name: values[name].item() for name in self.objectives}


def _batch(split: Split) -> tuple[Tensor, Tensor]:
    chosen = torch.tensor(sorted(set(_choice(split))))
    return split.take(chosen) if isinstance(split, StoredSamples) else (split.x[chosen], split.y[chosen])


def _choice(split: Split) -> Iterator[int]:
    """The samples of the batch."""
    yield from range(min(_FIRST, len(split)))
    if isinstance(split, StoredSamples):  # to look at all would take too long
        yield len(split) - 1
        return
    for values in (split.x, split.y):
        numbers, bad = _ordered(values), not_finite(values)
        yield from bad[:_BAD].tolist()
        flat = (torch.nan_to_num(numbers) if len(bad) else numbers).reshape(len(split), -1)
        if flat.dtype == torch.bool or not flat.shape[1]:
            continue
        if flat.shape[1] > _MAX_COLUMNS:  # of many features the extremes of all together
            flat = torch.stack([flat.amin(dim=1), flat.amax(dim=1)], dim=1)
        yield from flat.argmin(dim=0).tolist()
        yield from flat.argmax(dim=0).tolist()


def _ordered(values: Tensor) -> Tensor:
    """The same numbers in a type that PyTorch can compare; of complex numbers both parts."""
    if values.is_complex():
        return torch.view_as_real(values)
    if values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return values.to(torch.int64)
    return values.float() if values.is_floating_point() and values.itemsize == 1 else values


def not_finite(values: Tensor) -> Tensor:
    """The samples that hold a value that is not finite, ascending."""
    values = _ordered(values)
    if not values.is_floating_point():
        return torch.empty(0, dtype=torch.int64)
    return (~values.reshape(len(values), -1).isfinite().all(dim=1)).nonzero()[:, 0]


def _labels(split: Split) -> str:
    if isinstance(split, StoredSamples):
        return f"its first {min(_FIRST, len(split))} samples and the last one"
    y = _ordered(split.y)
    if y.dtype == torch.bool:
        return "labels true and false"
    finite = y[y.isfinite()]
    return f"labels {finite.min().item():g} to {finite.max().item():g}" if len(finite) else "no finite label"


def _types(x: Tensor, y: Tensor) -> str:
    """The types of features and labels where they may be why the model cannot take them."""
    words = [f"x of {dtype_name(x.dtype)}"] if x.dtype != torch.float32 else []
    words += [f"y of {dtype_name(y.dtype)}"] if y.is_floating_point() and y.dtype != torch.float32 else []
    others = any(part.is_floating_point() and part.dtype != torch.float32 for part in (x, y))
    remedy = ", while the model's parameters are float32: .float() converts them" if others else ""
    return f"; {' and '.join(words)}{remedy}" if words else ""


def _why(name: str, loss: float, place: str, split: Split) -> str:
    causes = [
        f"{len(bad)} of its {len(split)} samples have {noun} that are not finite (the first is sample {bad[0]}, "
        "counted from 0)"
        for noun, bad in (
            ()
            if isinstance(split, StoredSamples)
            else (("features", not_finite(split.x)), ("labels", not_finite(split.y)))
        )
        if len(bad)
    ]
    cause = " and ".join(causes) or "the data is finite, so look at the model and at losses()"
    return f"the loss {name!r} on {place} is {loss:g}: {cause}"
