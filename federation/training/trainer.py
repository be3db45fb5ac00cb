"""Training, gradients and evaluation of one model on one client's data."""

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from federation.noise import Noise
from federation.tasks import DataError, Dataset, Splits, Task
from federation.tasks import parameters as flat
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.buffers import ParameterBuffers
from federation.training.determinism import deterministic, pick_device, seed_torch, training_seed
from federation.training.objectives import Measured, losses, measure, must_have_objectives, served, weighted
from federation.training.private import PrivateGradients, must_suit
from federation.training.sgd import Descent, minibatches
from federation.vectors import Layout
from federation.work.base import Result, Shape
from federation.work.computation import (
    SPLITS,
    Computation,
    Descend,
    Differentiate,
    LocalSgd,
    Measure,
    MeasureAlong,
    PrivateSgd,
    training_losses,
)

# Steps between looks at the losses: on a GPU each look waits for the device.
_LOOK_EVERY = 50
# Samples that pass through convolutions at a time on a CPU, so that what is between layers stays in its caches.
_CACHED = 64


class Trainer:
    """Trains and evaluates one task's model on one client's data. Build it once; each call starts afresh.

    A base model must have its `layout`; `objectives` are those that the client serves, in the task's order; `samples`
    are training samples.
    """

    def __init__(
        self,
        task: Task,
        splits: Splits,
        device: str = "cpu",
        threads: int | None = None,
        objectives: Sequence[str] | None = None,
    ) -> None:
        """Moves the model and the data to the device, as torch names it, or "auto" (see `pick_device`).

        `threads` are CPU threads of torch, for the whole process; None leaves torch's own choice. Another number may
        give other last bits. `objectives` are those that the client serves; None for all of the task's.

        Raises:
            TaskError: the model does not fit a flat vector, or an objective has a reserved name or does not exist.
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
        self._buffers = ParameterBuffers(self._model, self.layout, self._device)
        self._hold(splits, objectives)

    def on(self, splits: Splits, objectives: Sequence[str] | None = None) -> "Trainer":
        """A trainer for another client's data; it shares the model and its buffers, so only one may work at a time."""
        other = copy.copy(self)
        other._hold(splits, objectives)
        return other

    def _hold(self, splits: Splits, objectives: Sequence[str] | None) -> None:
        self.objectives = served(self._task, objectives)
        self.shape = Shape(self.layout, tuple(self._task.objectives), self.objectives)
        self._data = {name: self._place(getattr(splits, name)) for name in SPLITS}
        self.samples = len(splits.train)
        self._jacobian: tuple[object, Tensor] | None = None

    def compute(
        self,
        base: NDArray[np.float32],
        computation: Computation,
        *,
        seed: int,
        round: int,  # noqa: A002 - the field's own word, as everywhere
        client_id: str,
        progress: Callable[[float], None] = lambda share: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Rows and losses of the base model (d,) on this client's data, as work needs them.

        A descent gives a row w_t - w for each target, a differentiation a gradient for each objective, (d,) both. An
        idle descent measures as training does, makes no step, and gives rows of zeros. One with noise gives other rows
        each time. The gradients are kept until the
        next call, for a first step made of them; where they are missing, they are made again, to the same bytes.
        `progress` is told the share of the steps that is done; `stopped` is asked before every step and every batch of
        evaluation.

        Raises:
            DataError: the training split is empty, and steps or gradients are wanted.
            TrainingDiverged: a loss, a gradient or a parameter is not finite.
            TrainingStopped: `stopped` returned True.
            ValueError: a base of another length, or targets that name an objective which this client does not serve.
            WorkError: noise is asked for, and the model cannot be trained with it.
        """
        began = time.perf_counter()
        if isinstance(computation, Measure):
            metrics = self.evaluate(base, computation.splits, computation.metrics, stopped=stopped)
            return Result({}, {}, metrics, self.samples, time.perf_counter() - began)
        if isinstance(computation, MeasureAlong):
            found = {}
            for place, (name, model) in enumerate(computation.models(base)):
                found[name] = self.evaluate(model, ("train",), stopped=stopped)
                progress((place + 1) / len(computation.steps))
            return Result({}, {}, training_losses(found), self.samples, time.perf_counter() - began)
        idle = isinstance(computation, Descend) and computation.idle
        if self.samples == 0 and not idle:
            raise DataError(f"no training samples for {self._task.name}")
        chosen = computation.secret_seed
        key = training_seed(seed, round, client_id) if chosen is None else chosen
        with deterministic(self._device, key):
            self._buffers.load(base)
            measured = Measured({}, {}, self.samples)
            if computation.measure or idle:
                measured = self._measure("train", stopped)
                if not idle and not np.isfinite(list(measured.losses.values())).all():
                    raise TrainingDiverged(0)
            match computation:
                case Descend(idle=True):
                    rows = {name: np.zeros(self.layout.size, dtype=np.float32) for name in computation.targets}
                case Descend():
                    rows = self._train(base, computation, key, progress, stopped)
                case Differentiate():
                    gradients = self._jacobian_at(base, computation.batch_size, key)
                    rows = dict(zip(self.objectives, map(self._buffers.flat, gradients), strict=True))
                    if not all(np.isfinite(row).all() for row in rows.values()):
                        raise TrainingDiverged(1)
        seconds = time.perf_counter() - began
        return Result(rows, measured.reported(), measured.metrics("train"), self.samples, seconds)

    def _train(
        self,
        base: NDArray[np.float32],
        computation: Descend,
        key: int,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> dict[str, NDArray[np.float32]]:
        """Local SGD from w_t, which is loaded, once for each target (ALGORITHMS: the local solver)."""
        work, targets = computation.sgd, computation.targets
        for weights in targets.values():
            if unknown := sorted(weights.keys() - set(self.objectives)):
                raise ValueError(f"this client does not serve {', '.join(unknown)}: it serves {self.objectives}")
        total = work.count(self.samples)
        rows: dict[str, NDArray[np.float32]] = {}
        gradients = self._jacobian_at(base, work.batch_size, key) if computation.from_jacobian else None
        private = computation.private
        if private is not None:
            self.must_be_private()
        for number, (name, weights) in enumerate(targets.items()):

            def report(share: float, before: int = number) -> None:
                progress((before + share) / len(targets))

            if private is None:
                self._descend(weights, work, total, key, gradients, report, stopped)
            else:
                self._descend_privately(weights, work, private, total, report, stopped)
            rows[name] = self._buffers.update()
            if not np.isfinite(rows[name]).all():
                raise TrainingDiverged(total)
            self._buffers.reset()
        self._jacobian = None
        return rows

    def _jacobian_at(self, base: NDArray[np.float32], batch_size: int, key: int) -> Tensor:
        """The gradients at w_t, which is loaded, as buffers, (M, padded); those kept, if they are for w_t."""
        name = (key, batch_size, blake3(np.ascontiguousarray(base).data.cast("B")).digest())
        if self._jacobian is None or self._jacobian[0] != name:
            seed_torch(self._device, key)
            x, y = next(minibatches(self._data["train"], batch_size, key))
            self._model.train()
            values = losses(self._task, self._model(self._task.augment(x)), y)
            found = []
            for objective in self.objectives:
                self._buffers.gradient.zero_()
                last = objective == self.objectives[-1]
                values[objective].backward(retain_graph=not last)  # type: ignore[no-untyped-call]
                found.append(self._buffers.gradient.clone())
            self._jacobian = (name, torch.stack(found))
        return self._jacobian[1]

    def evaluate(
        self,
        base: NDArray[np.float32],
        splits: tuple[str, ...] = SPLITS,
        metrics: tuple[str, ...] = (),
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Measures a model (d,) on some of the client's splits; `stopped` is asked before every batch.

        `metrics` are those of the task that are measured besides loss and accuracy.

        Returns:
            "<split>/samples", "<split>/loss" and "<split>/accuracy" (means over the client's objectives; of objectives
                with names also "<split>/loss/<objective>" and "<split>/accuracy/<objective>"); "<split>/<metric>",
                and "<split>/<metric>/<key>" of a metric with several values. What has no value is left out: a number
                that is not finite, an accuracy where the task has none, and all for an empty split.

        Raises:
            TrainingStopped: `stopped` returned True.
            TaskError: a metric of the task is not a number.
        """
        found: dict[str, float] = {}
        with deterministic(self._device, 0):
            self._buffers.load(base)
            for name in splits:
                found |= self._measure(name, stopped, metrics).metrics(name)
        return found

    def _place(self, data: Dataset) -> Dataset:
        # Always a copy of torch's own: the last bits of a sum depend on how its operands are aligned in memory.
        return Dataset(*(part.detach().to(self._device, copy=True).contiguous() for part in (data.x, data.y)))

    def _measure(self, split: str, stopped: Callable[[], bool], metrics: Sequence[str] = ()) -> Measured:
        size = self._task.evaluation_batch
        size = min(size, _CACHED) if self._buffers.channels_last else size
        return measure(self._model, self._task, self._data[split], self.objectives, size, stopped, metrics)

    def _descend(
        self,
        weights: Mapping[str, float],
        work: LocalSgd,
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
        seed_torch(self._device, key)
        batches = minibatches(self._data["train"], work.batch_size, key)
        descent = Descent.fresh(work, [self._buffers.values], [self._buffers.start])
        pending: list[Tensor] = []
        self._model.train()
        step = 0
        while step < total:
            if stopped():
                raise TrainingStopped
            if step == 0 and gradients is not None:
                next(batches)
                shares = torch.tensor([weights.get(name, 0.0) for name in self.objectives], device=self._device)
                self._buffers.gradient.copy_(shares @ gradients)
                descent.step([self._buffers.gradient])
                seed_torch(self._device, key ^ 1)  # what the gradients drew depends on whether they had to be made
                step = 1
                continue
            made = self._advance(batches, weights, descent, total - step)
            step += len(made)
            pending.extend(made)
            if len(pending) >= _LOOK_EVERY or step == total:
                finite = torch.stack(pending).isfinite().tolist()
                if not all(finite):
                    raise TrainingDiverged(step - len(finite) + 1 + finite.index(False))
                pending.clear()
            progress(step / total)

    def must_be_private(self) -> None:
        """Checks that the model can be trained with noise. Raises as `federation.training.private.must_suit`."""
        must_suit(self._model, self._task, self._data["train"])

    def _descend_privately(
        self,
        weights: Mapping[str, float],
        work: LocalSgd,
        private: PrivateSgd,
        total: int,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> None:
        """DP-SGD on a weighted sum of objectives; the parameters move in place. It cannot be repeated."""
        gradients = PrivateGradients(self._model, self._task, self._data["train"], work, private, Noise())
        descent = Descent.fresh(work, [self._buffers.values], [self._buffers.start])
        views = self._buffers.parameters(self._buffers.gradient)
        self._model.train()
        for step in range(total):
            if stopped():
                raise TrainingStopped
            for view, part in zip(views, gradients.next(weights), strict=True):
                view.copy_(part)
            descent.step([self._buffers.gradient])
            progress((step + 1) / total)

    def _advance(
        self, batches: Iterator[tuple[Tensor, Tensor]], weights: Mapping[str, float], descent: Descent, room: int
    ) -> Sequence[Tensor]:
        """Some of the next steps, at most `room`; their losses."""
        return [self._step(*next(batches), weights, descent)]

    def _step(self, x: Tensor, y: Tensor, weights: Mapping[str, float], descent: Descent) -> Tensor:
        loss = weighted(losses(self._task, self._model(self._task.augment(x)), y), weights)
        self._buffers.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        descent.step([self._buffers.gradient])
        return loss.detach()
