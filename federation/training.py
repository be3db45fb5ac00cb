"""Local work at a member: training from a base model, and evaluation. The same assignment gives the same bytes.

What is computed depends on (base, work, seed, round, client, data) alone, on one machine and thread count: every
random choice comes from a seed derived from these, the optimiser starts afresh, and only deterministic kernels run.
A worker that died in the middle, or one that is asked twice, hands in the very same update.
"""

import copy
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from federation.objectives import JOINT, OBJECTIVE, Targets, joint_target
from federation.tasks import DataError, Dataset, Splits, Task, TaskError
from federation.tasks import parameters as flat
from federation.vectors import Layout

# Parameters lie in one buffer, each from a multiple of so many elements on (128 bytes), as fast kernels like it.
_ALIGNMENT = 32
# Steps between looks at the losses: on a GPU each look waits for the device.
_LOOK_EVERY = 50
# Minibatches gathered at a time: for small models, gathering each alone costs as much as a forward pass.
_GATHERED = 32
# Samples that pass through convolutions at a time on a CPU, so that what is between layers stays in its caches.
_CACHED = 64
# Dimensions of the kernels of a convolution: (out, in, height, width).
_KERNEL = 4
SPLITS = ("train", "validation", "test")


class TrainingDiverged(Exception):
    """A loss or a parameter is no longer finite.

    Attributes:
        step: the optimiser step, from 1; 0 when the base model itself has no finite loss on this data.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training diverged at step {step}: try a smaller learning rate"
            if step
            else "the model to start from has no finite loss on this data"
        )
        self.step = step


class TrainingStopped(Exception):
    """The caller no longer wants the result."""


@dataclass(frozen=True, kw_only=True)
class TrainWork:
    """How to train: local SGD, as a run specification's `[train]` and an assignment put it.

    Attributes:
        epochs: passes over the training split, reshuffled each; 0 when `steps` counts.
        steps: optimiser steps, across passes; 0 when `epochs` counts.
        batch_size: samples in a minibatch, the last one of a pass may be shorter; 0 is the whole split.
        learning_rate: eta_l.
        proximal_mu: mu of the term mu/2 |w - w_t|^2 (FedProx).
        momentum: of heavy-ball SGD; its buffer starts at zero.
        weight_decay: L2 penalty.

    Raises:
        ValueError: both or neither of epochs and steps, or a number out of range.
    """

    epochs: int = 0
    steps: int = 0
    batch_size: int = 0
    learning_rate: float
    proximal_mu: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if min(self.epochs, self.steps, self.batch_size) < 0 or (self.epochs > 0) == (self.steps > 0):
            raise ValueError(f"give either epochs or steps; got epochs = {self.epochs}, steps = {self.steps}")
        rates = (self.learning_rate, self.proximal_mu, self.momentum, self.weight_decay)
        if not (np.isfinite(rates).all() and min(rates) >= 0 and self.momentum < 1):
            raise ValueError(f"learning_rate, proximal_mu, momentum, weight_decay = {rates}: a rate is out of range")

    @classmethod
    def of(cls, settings: Any) -> "TrainWork":
        """From a specification's `[train]` or an assignment's, which name the same things the same way."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def count(self, samples: int) -> int:
        """Optimiser steps on so many samples."""
        return self.steps or self.epochs * -(-samples // (self.batch_size or samples))


@dataclass(frozen=True, eq=False)
class TrainResult:
    """What training gives.

    Attributes:
        rows: the update w_t - w_i for each target, float32 (d,); subtracting it descends. Of a Jacobian, the gradient
            of each objective.
        losses: of the base model on the whole training split, by objective, in evaluation mode, before any step; with
            several objectives also their mean, as "loss". Empty where it was not to be measured.
        metrics: the same measurement as "train/loss", "train/accuracy", "train/samples".
        samples: training samples held.
        seconds: wall time.
    """

    rows: Mapping[str, NDArray[np.float32]]
    losses: Mapping[str, float]
    metrics: Mapping[str, float]
    samples: int
    seconds: float


class Trainer:
    """Trains and evaluates one task's model on one client's data. Build it once; each call starts afresh.

    Attributes:
        layout: the layout that a base model must have.
        objectives: those that the client serves, in the task's order.
        samples: training samples held.
    """

    def __init__(
        self,
        task: Task,
        splits: Splits,
        device: str = "cpu",
        threads: int | None = None,
        objectives: Sequence[str] | None = None,
    ) -> None:
        """Moves the model and the data to the device.

        Args:
            task: what is learned.
            splits: the client's data.
            device: as torch names it, or "auto" (see `pick_device`).
            threads: CPU threads of torch, for the whole process; None leaves torch's own choice. Another number may
                give other last bits.
            objectives: those that the client serves; None for all of the task's.

        Raises:
            TaskError: the model does not fit a flat vector, an objective has a reserved name, or there is no such one.
        """
        must_have_objectives(task)
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(pick_device(device))
        if self._device.type == "cuda":
            # Without this cuBLAS has no deterministic workspace; it is read when the first kernel runs.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self._task = task
        model = flat.build(task)
        self.layout: Layout = flat.layout(model)
        self._model = model.to(self._device)
        self._weights = _Weights(self._model, self.layout, self._device)
        self._hold(splits, objectives)

    def on(self, splits: Splits, objectives: Sequence[str] | None = None) -> "Trainer":
        """A trainer for another client's data; it shares the model and its buffers: one of them works at a time."""
        other = copy.copy(self)
        other._hold(splits, objectives)
        return other

    def _hold(self, splits: Splits, objectives: Sequence[str] | None) -> None:
        self.objectives = served(self._task, objectives)
        self._data = {name: self._place(getattr(splits, name)) for name in SPLITS}
        self.samples = len(splits.train)
        self._jacobian: tuple[object, Tensor] | None = None

    def train(
        self,
        base: NDArray[np.float32],
        work: TrainWork,
        *,
        seed: int,
        round: int,  # noqa: A002 - the field's own word, as everywhere
        client_id: str,
        targets: Targets | None = None,
        from_jacobian: bool = False,
        measure: bool = True,
        progress: Callable[[float], None] = lambda share: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> TrainResult:
        """Local SGD from the base model, once for each target (ALGORITHMS: the local solver).

        Args:
            base: w_t, (d,).
            work: how to train.
            seed: of the run.
            round: from 0.
            client_id: who trains.
            targets: what the rows of the update descend; None is one row for the mean of the client's objectives.
            from_jacobian: the first step is a weighted sum of the gradients that `jacobian` gives (FedCMOO, step 4).
            measure: whether to measure the base model on the whole training split before.
            progress: told the share of the steps that is done, 0 to 1.
            stopped: asked before every step.

        Raises:
            DataError: the training split is empty.
            TrainingDiverged: a loss or a parameter became non-finite.
            TrainingStopped: `stopped` said so.
            ValueError: targets that name an objective which this client does not serve.
        """
        began = time.perf_counter()
        self._must_have_samples()
        targets = joint_target(self.objectives) if targets is None else targets
        for weights in targets.values():
            if unknown := sorted(weights.keys() - set(self.objectives)):
                raise ValueError(f"this client does not serve {', '.join(unknown)}: it serves {self.objectives}")
        total = work.count(self.samples)
        rows: dict[str, NDArray[np.float32]] = {}
        key = training_seed(seed, round, client_id)
        with deterministic(self._device, key):
            self._weights.load(base)
            measured = self._measured_before(measure, stopped)
            gradients = self._jacobian_at(base, work, key) if from_jacobian else None
            for number, (name, weights) in enumerate(targets.items()):

                def report(share: float, before: int = number) -> None:
                    progress((before + share) / len(targets))

                self._descend(weights, work, total, key, gradients, report, stopped)
                rows[name] = self._weights.update()
                if not np.isfinite(rows[name]).all():
                    raise TrainingDiverged(total)
                self._weights.reset()
        self._jacobian = None
        return self._result(rows, measured, began)

    def jacobian(
        self,
        base: NDArray[np.float32],
        work: TrainWork,
        *,
        seed: int,
        round: int,  # noqa: A002 - the field's own word, as everywhere
        client_id: str,
        measure: bool = True,
        stopped: Callable[[], bool] = lambda: False,
    ) -> TrainResult:
        """The gradient of each objective at the base model, on the first minibatch of the round (FedCMOO, step 2).

        The gradients are kept until the next call, for a first step made of them; `train` makes them again where they
        are not there any more, and gives the same bytes.

        Args:
            base: w_t, (d,).
            work: how to train; its batch size is that of the gradients.
            seed: of the run.
            round: from 0.
            client_id: whose gradients.
            measure: whether to measure the base model on the whole training split, too.
            stopped: asked before every batch.

        Returns:
            A row (d,) for each objective that the client serves.

        Raises:
            DataError: the training split is empty.
            TrainingDiverged: a loss or a gradient is not finite.
            TrainingStopped: `stopped` said so.
        """
        began = time.perf_counter()
        self._must_have_samples()
        key = training_seed(seed, round, client_id)
        with deterministic(self._device, key):
            self._weights.load(base)
            measured = self._measured_before(measure, stopped)
            gradients = self._jacobian_at(base, work, key)
        rows = {name: self._weights.flat(part) for name, part in zip(self.objectives, gradients, strict=True)}
        if not all(np.isfinite(row).all() for row in rows.values()):
            raise TrainingDiverged(1)
        return self._result(rows, measured, began)

    def idle(
        self,
        base: NDArray[np.float32],
        *,
        rows: Sequence[str] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> TrainResult:
        """What a client has to hand in that measures the base model as `train` does, and makes no step: rows of zeros.

        Args:
            base: w_t, (d,).
            rows: their names; None for the one of all objectives together.
            stopped: asked before every batch.

        Raises:
            TrainingStopped: `stopped` said so.
        """
        began = time.perf_counter()
        with deterministic(self._device, 0):
            self._weights.load(base)
            measured = self._measure(self._data["train"], stopped)
        names = (JOINT,) if rows is None else rows
        zeros = {name: np.zeros(self.layout.size, dtype=np.float32) for name in names}
        return self._result(zeros, measured, began)

    def _must_have_samples(self) -> None:
        if self.samples == 0:
            raise DataError(f"no training samples for {self._task.name}")

    def _measured_before(self, measure: bool, stopped: Callable[[], bool]) -> "Measured":
        if not measure:
            return Measured({}, {}, self.samples)
        measured = self._measure(self._data["train"], stopped)
        if not np.isfinite(list(measured.losses.values())).all():
            raise TrainingDiverged(0)
        return measured

    def _result(self, rows: Mapping[str, NDArray[np.float32]], measured: "Measured", began: float) -> TrainResult:
        seconds = time.perf_counter() - began
        return TrainResult(rows, measured.reported(), measured.metrics("train"), self.samples, seconds)

    def _jacobian_at(self, base: NDArray[np.float32], work: TrainWork, key: int) -> Tensor:
        """The gradients at w_t, which is loaded, as buffers, (M, padded); those that are kept, if they are these."""
        name = (key, work.batch_size, blake3(np.ascontiguousarray(base).data.cast("B")).digest())
        if self._jacobian is None or self._jacobian[0] != name:
            _seed_torch(self._device, key)
            x, y = next(self._batches(work.batch_size, key))
            self._model.train()
            losses = self._losses(self._model(self._task.augment(x)), y)
            found = []
            for objective in self.objectives:
                self._weights.gradient.zero_()
                last = objective == self.objectives[-1]
                losses[objective].backward(retain_graph=not last)  # type: ignore[no-untyped-call]
                found.append(self._weights.gradient.clone())
            self._jacobian = (name, torch.stack(found))
        return self._jacobian[1]

    def evaluate(
        self,
        base: NDArray[np.float32],
        splits: tuple[str, ...] = SPLITS,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Measures a model on the client's own splits, in evaluation mode.

        Args:
            base: the model, (d,).
            splits: of "train", "validation" and "test".
            stopped: asked before every batch.

        Returns:
            "<split>/samples", "<split>/loss" and "<split>/accuracy" (means over the client's objectives; of objectives
            with names also "<split>/loss/<objective>" and "<split>/accuracy/<objective>"). What has no value is left
            out: a loss that is not finite, an accuracy where the task knows none, and both for an empty split.

        Raises:
            TrainingStopped: `stopped` said so.
        """
        metrics: dict[str, float] = {}
        with deterministic(self._device, 0):
            self._weights.load(base)
            for name in splits:
                metrics |= self._measure(self._data[name], stopped).metrics(name)
        return metrics

    def _place(self, data: Dataset) -> Dataset:
        # Always a copy of torch's own: the last bits of a sum depend on how its operands are aligned in memory.
        return Dataset(*(part.detach().to(self._device, copy=True).contiguous() for part in (data.x, data.y)))

    def _measure(self, data: Dataset, stopped: Callable[[], bool]) -> "Measured":
        """Mean losses and accuracies over a split; nothing for an empty one."""
        if len(data) == 0:
            return Measured({}, {}, 0)
        losses = dict.fromkeys(self.objectives, 0.0)
        right: dict[str, float] = defaultdict(float)
        self._model.eval()
        size = self._task.evaluation_batch
        if self._weights.channels_last:
            size = min(size, _CACHED)
        with torch.no_grad():
            for begin in range(0, len(data), size):
                if stopped():
                    raise TrainingStopped
                x, y = data.x[begin : begin + size], data.y[begin : begin + size]
                output = self._model(x)
                for name, value in self._losses(output, y).items():
                    if name in losses:
                        losses[name] += value.item() * len(y)
                for name, hits in correct(self._task, output, y, self.objectives).items():
                    right[name] += hits.sum().item()
        count = len(data)
        means = {name: value / count for name, value in losses.items()}
        return Measured(means, {name: value / count for name, value in right.items()}, count)

    def _descend(
        self,
        weights: Mapping[str, float],
        work: TrainWork,
        total: int,
        key: int,
        gradients: Tensor | None,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> None:
        """SGD on a weighted sum of objectives; the parameters move in place.

        Where `gradients` (M, padded) are given, the first step is made of them, and its minibatch is passed over.
        """
        # Every row sees the same batches and the same dropout, so that they differ by what they descend alone.
        _seed_torch(self._device, key)
        batches = self._batches(work.batch_size, key)
        descent = Descent(self._weights, work)
        pending: list[Tensor] = []
        self._model.train()
        step = 0
        while step < total:
            if stopped():
                raise TrainingStopped
            if step == 0 and gradients is not None:
                next(batches)
                shares = torch.tensor([weights.get(name, 0.0) for name in self.objectives], device=self._device)
                self._weights.gradient.copy_(shares @ gradients)
                descent.step()
                _seed_torch(self._device, key ^ 1)  # what the gradients drew depends on whether they had to be made
                step = 1
                continue
            losses = self._advance(batches, weights, descent, total - step)
            step += len(losses)
            pending.extend(losses)
            if len(pending) >= _LOOK_EVERY or step == total:
                finite = torch.stack(pending).isfinite().tolist()
                if not all(finite):
                    raise TrainingDiverged(step - len(finite) + 1 + finite.index(False))
                pending.clear()
            progress(step / total)

    def _advance(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        weights: Mapping[str, float],
        descent: "Descent",
        room: int,
    ) -> Sequence[Tensor]:
        """Some of the next steps, at most `room`; their losses."""
        return [self._step(*next(batches), weights, descent)]

    def _step(self, x: Tensor, y: Tensor, weights: Mapping[str, float], descent: "Descent") -> Tensor:
        loss = _weighted(self._losses(self._model(self._task.augment(x)), y), weights)
        self._weights.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        descent.step()
        return loss.detach()

    def _losses(self, output: object, y: Tensor) -> dict[str, Tensor]:
        losses = self._task.losses(output, y)
        if set(losses) != set(self._task.objectives):
            raise TaskError(
                f"task {self._task.name!r}: losses() returned {sorted(losses)}, its objectives are "
                f"{sorted(self._task.objectives)}"
            )
        return losses

    def _batches(self, size: int, key: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches without end: reshuffled every pass, the last short one kept."""
        data = self._data["train"]
        if size == 0 or size >= self.samples:
            while True:
                yield data.x, data.y
        generator = torch.Generator().manual_seed(key)
        while True:
            order = torch.randperm(self.samples, generator=generator).to(self._device)
            for some in torch.split(order, size * _GATHERED):
                x, y = data.x.index_select(0, some), data.y.index_select(0, some)
                yield from zip(torch.split(x, size), torch.split(y, size), strict=True)


def pick_device(name: str = "auto") -> str:
    """The device to train on. Apple's GPUs are not offered: they lack deterministic kernels (max pooling, say).

    Args:
        name: "auto" (CUDA where there is one, else the CPU), "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: not such a device, or not here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name) is None:
        raise ValueError(f"no device {name!r}: use auto, cpu, cuda or cuda:N")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use device {name!r}: {str(error).splitlines()[0]}") from error
    return name


def describe_device(name: str) -> str:
    """A device for people: "cuda NVIDIA H200", "cpu"."""
    return f"{name} {torch.cuda.get_device_name(name)}" if torch.device(name).type == "cuda" else name


class _Weights:
    """The trainable parameters and their gradients as two buffers, so that a step is a few operations whatever d is.

    On a CPU the kernels of convolutions lie in them with their channels last, which is up to 1.6 times as fast.

    Attributes:
        values: w, with the parameters as views into it.
        gradient: likewise the gradients; backward adds to it.
        start: w_t.
        channels_last: whether there are such kernels.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, device: torch.device) -> None:
        self._size = layout.size
        self._shapes = [parameter.shape for _, parameter in flat.trainable(model)]
        self._places: list[tuple[slice, slice]] = []  # where a parameter is in the flat vector, and in the buffer
        self.channels_last = device.type == "cpu" and any(len(shape) == _KERNEL for shape in self._shapes)
        offset = padded = 0
        for tensor in layout.tensors:
            self._places.append((slice(offset, offset + tensor.size), slice(padded, padded + tensor.size)))
            offset += tensor.size
            padded += -(-tensor.size // _ALIGNMENT) * _ALIGNMENT
        self.values = torch.zeros(padded, device=device)
        self.gradient = torch.zeros(padded, device=device)
        self.start = torch.zeros(padded, device=device)
        views = zip(flat.trainable(model), self.parameters(self.values), self.parameters(self.gradient), strict=True)
        for (_, parameter), value, gradient in views:
            parameter.data, parameter.grad = value, gradient

    def parameters(self, buffer: Tensor) -> list[Tensor]:
        """What a buffer holds, as views with the parameters' shapes."""
        views = []
        for (_, place), shape in zip(self._places, self._shapes, strict=True):
            if self.channels_last and len(shape) == _KERNEL:
                out, channels, height, width = shape
                views.append(buffer[place].view(out, height, width, channels).permute(0, 3, 1, 2))
            else:
                views.append(buffer[place].view(shape))
        return views

    def load(self, base: NDArray[np.float32]) -> None:
        """Starts from a model (d,)."""
        if base.shape != (self._size,):
            raise ValueError(f"the model has {self._size} trainable parameters, the base {base.shape}")
        vector = torch.from_numpy(np.array(base, dtype=np.float32))  # a copy: the base may be a read-only file
        for (source, _), view in zip(self._places, self.parameters(self.start), strict=True):
            view.copy_(vector[source].view(view.shape))
        self.reset()

    def reset(self) -> None:
        """Back to w_t."""
        self.values.copy_(self.start)

    def update(self) -> NDArray[np.float32]:
        """The update w_t - w, (d,)."""
        return self.flat(self.start - self.values)

    def flat(self, buffer: Tensor) -> NDArray[np.float32]:
        """What a buffer holds, without its gaps, (d,)."""
        row = torch.empty(self._size)
        for (target, _), view in zip(self._places, self.parameters(buffer.cpu()), strict=True):
            row[target].view(view.shape).copy_(view)
        return row.numpy()


class Descent:
    """Plain SGD, as torch.optim.SGD defines it, with the proximal term; fresh for every row.

    Attributes:
        work: how to train.
        velocity: the momentum's buffer, which moves; None without momentum.
    """

    def __init__(self, weights: _Weights, work: TrainWork) -> None:
        self.work = work
        self.velocity = torch.zeros_like(weights.values) if work.momentum else None
        self._weights = weights

    def step(self) -> None:
        """One step along the gradient that is in the buffer."""
        values, direction, work = self._weights.values, self._weights.gradient, self.work
        if work.weight_decay:
            direction.add_(values, alpha=work.weight_decay)
        if work.proximal_mu:
            direction.add_(values, alpha=work.proximal_mu).sub_(self._weights.start, alpha=work.proximal_mu)
        if self.velocity is not None:
            direction = self.velocity.mul_(work.momentum).add_(direction)
        values.sub_(direction, alpha=work.learning_rate)


@dataclass(frozen=True)
class Measured:
    """What a model scores on one split.

    Attributes:
        losses: mean loss by objective; empty for an empty split, or where nothing was measured.
        accuracies: share of right samples by objective; under "" where the task tells one for all objectives.
        samples: of the split.
    """

    losses: Mapping[str, float]
    accuracies: Mapping[str, float]
    samples: int

    def reported(self) -> dict[str, float]:
        """The losses as an update reports them: each, and their mean."""
        return {**self.losses, JOINT: _mean(self.losses)} if self.losses else {}

    def metrics(self, split: str) -> dict[str, float]:
        """As replies name it; see `Trainer.evaluate`."""
        found = {f"{split}/samples": float(self.samples)}
        for kind, values in (("loss", self.losses), ("accuracy", self.accuracies)):
            if values:
                found[f"{split}/{kind}"] = _mean(values)
            if set(self.losses) != {JOINT}:
                found |= {f"{split}/{kind}/{name}": value for name, value in values.items() if name}
        return {name: value for name, value in found.items() if np.isfinite(value)}


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


def correct(task: Task, output: object, y: Tensor, objectives: Sequence[str]) -> dict[str, Tensor]:
    """Which samples of a batch are right, (n,) of bool, by objective; under "" where the task does not tell apart."""
    hits = task.correct(output, y)
    if hits is None:
        return {}
    return {"": hits} if isinstance(hits, Tensor) else {name: hits[name] for name in objectives if name in hits}


def served(task: Task, objectives: Sequence[str] | None) -> tuple[str, ...]:
    """The objectives that a client serves, in the task's order; all of them for None.

    Raises:
        TaskError: none, or one that the task does not have.
    """
    wanted = task.objectives if objectives is None else tuple(objectives)
    if not wanted or not set(wanted) <= set(task.objectives):
        raise TaskError(
            f"task {task.name!r}: cannot serve {', '.join(wanted) or 'nothing'}; "
            f"its objectives are {', '.join(task.objectives)}"
        )
    return tuple(name for name in task.objectives if name in wanted)


def must_have_objectives(task: Task) -> None:
    """Makes sure that the names of a task's objectives can stand in metrics, layouts and rows.

    Raises:
        TaskError: they cannot; the message says which.
    """
    names = task.objectives
    several = len(names) > 1
    for name in names:
        if re.fullmatch(OBJECTIVE, name) is None or (several and name == JOINT) or name in ("accuracy", "samples"):
            raise TaskError(
                f"task {task.name!r}: {name!r} cannot be the name of an objective: lower-case letters, digits and "
                f"hyphens, and not accuracy, samples or (with others) {JOINT}"
            )
    if not names or len(set(names)) < len(names):
        raise TaskError(f"task {task.name!r}: its objectives are {names}; each needs a name of its own")


def _weighted(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """sum_k weights_k losses_k; a loss that weighs 1 alone is handed on as it is."""
    terms = [losses[name] if weight == 1.0 else weight * losses[name] for name, weight in weights.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def training_seed(seed: int, round_: int, client_id: str) -> int:
    """The seed of one client's work in one round, 0 to 2^63 - 1."""
    text = f"fedpareto/train\0{seed}\0{round_}\0{client_id}"
    return int.from_bytes(blake3(text.encode()).digest(8), "little") >> 1


def _seed_torch(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextmanager
def deterministic(device: torch.device, seed: int) -> Iterator[None]:
    """Seeded generators and deterministic kernels inside; torch's global state as it was outside."""
    cudnn = torch.backends.cudnn
    was = (torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        _seed_torch(device, seed)
        # The same switch as torch.use_deterministic_algorithms, which would import the compiler (seconds) for it.
        torch.set_deterministic_debug_mode("error")
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            mode, cudnn.deterministic, cudnn.benchmark = was
            torch.set_deterministic_debug_mode(mode)
