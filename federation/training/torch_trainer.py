"""The built-in trainer: local training with PyTorch, and evaluation."""

import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from federation.spec.computation import SPLITS, Ability, Computation, Descend, Differentiate
from federation.spec.noise import Noise
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, DataSource, Splits, Task, TaskError, initial_model, task_code
from federation.tasks import parameters as flat
from federation.text import counted
from federation.training import TrainingDiverged, TrainingStopped, precision
from federation.training.batch_statistics import TRIED, WHY_TWO, is_evened, needs_two, normalizes
from federation.training.buffers import ModelState, ParameterBuffers, buffers_kept
from federation.training.data_trial import DataTrial
from federation.training.determinism import Kernels, describe_device, pick_device, seed_torch
from federation.training.dp_sgd import PrivateGradients, check_suits
from federation.training.generators import generators_kept
from federation.training.lending import Lending, SamplesWrittenError
from federation.training.objective_losses import losses, measure, weighted
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.precision import Precision
from federation.training.serving import served
from federation.training.sgd import Descent, minibatches
from federation.training.stored import StoredSamples, with_stored
from federation.training.trainer import Trainer
from federation.vectors import Layout, Vector
from federation.work.base import Result
from federation.work.minibatch_sizes import Cut, Forming

T = TypeVar("T")
# Steps between checks of the losses: on a GPU each check waits for the device.
_LOOK_EVERY = 50
# Samples that pass through convolutions at a time on a CPU, so that the outputs of layers stay in its caches.
_CACHED = 64


@dataclass(frozen=True, eq=False)
class Training:
    """One training: its plan, its optimiser, the precision of its gradients, and whether it evens minibatches out."""

    plan: TrainingPlan
    descent: Descent
    precision: Precision
    even: bool


class TorchTrainer(Trainer):
    """Trains the module that `Task.model` makes, with SGD or Adam, on a CPU or a GPU.

    The device is named as torch names it, or "auto" (see `pick_device`). `threads` are CPU threads of torch, for the
    whole process; None leaves torch's own choice. Another number may give other last bits.
    """

    abilities = frozenset(Ability)

    @classmethod
    def load(cls, task: Task, source: DataSource) -> Splits:
        """As `Trainer.load`; samples that are not in memory are read as the owner wants."""
        return with_stored(task.load(source), source.loading)

    @property
    def device_in_words(self) -> str:
        """The name of the chosen device."""
        return self.device

    def prepare(self) -> None:
        """Makes the model, and moves it and the data to the device.

        Raises:
            ValueError: no such device, or no number of samples in `evaluation_batch` of the task.
            DataError: as of `with_stored`.
        """
        size = self.task.evaluation_batch
        if not isinstance(size, int) or size < 1:
            raise TaskError(f"task {self.task.name!r}: evaluation_batch is {size!r}; needed: a whole number from 1 on")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._device = torch.device(pick_device(self.device))
        self.device = describe_device(str(self._device))
        if self._device.type == "cuda":
            # Without this cuBLAS has no deterministic workspace; it is read when the first kernel runs.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        model = flat.build(self.task)
        self._layout = flat.layout(model)
        self._model = model.to(self._device)
        self._state = ModelState(self._model)
        self._lending = Lending(self.task)
        self._statistics: dict[frozenset[str], bool] = {}  # see _needs_two; trainers that share the model share it
        count = len(self._layout.tensors) - len(self._state.names)
        self._buffers = ParameterBuffers(self._model, Layout(self._layout.tensors[:count]), self._device)
        self.kernels = Kernels(self._device, self.task.name)
        self._hold(self.data)

    @cached_property
    def layout(self) -> Layout:
        """The trainable parameters of the model, and its buffers."""
        return self._layout

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The names of the buffers."""
        return frozenset(self._state.names)

    @property
    def _parameters(self) -> int:
        """The number of columns of a model that are trainable parameters; buffers follow."""
        return self._layout.size - self._state.size

    def _load(self, model: Vector) -> None:
        """Starts from a model (d,)."""
        self._buffers.load(model[: self._parameters])
        self._state.load(model[self._parameters :])

    def on(self, data: Any, objectives: Sequence[str] | None = None) -> "TorchTrainer":
        """A trainer for another client's data; it shares the model and its buffers."""
        trainer = copy.copy(self)
        trainer.objectives = served(self.task, objectives)
        trainer._hold(data)
        return trainer

    def _hold(self, splits: Splits) -> None:
        self.data = with_stored(splits)
        self._data = {name: self._place(getattr(self.data, name)) for name in SPLITS}
        self._jacobian: tuple[object, Tensor] | None = None

    def _place(self, data: Dataset | StoredSamples) -> Dataset | StoredSamples:
        if isinstance(data, StoredSamples):
            return data.on(self._device)
        # Always a copy of torch's own: the last bits of a sum depend on how its operands are aligned in memory.
        return Dataset(*(part.detach().to(self._device, copy=True).contiguous() for part in (data.x, data.y)))

    def close(self) -> None:
        """Ends the processes that read samples."""
        for data in self._data.values():
            if isinstance(data, StoredSamples):
                data.close()

    def try_out(self) -> None:
        """Evaluates and trains the initial model on a batch of each split that a round evaluates or trains on.

        Raises as `DataTrial`, and TaskError also for a single training sample where the model needs two.
        """
        if self.samples == 1 and self._needs_two(()):
            remedy = "use more samples, or a model with GroupNorm or LayerNorm"
            raise TaskError(f"task {self.task.name!r}: the train split has one sample, and {WHY_TWO}: {remedy}")
        self.try_on({f"the {name} split": getattr(self.data, name) for name in SPLITS}, ["the train split"])

    def try_on(self, data: Mapping[str, Dataset | StoredSamples], trained: Collection[str]) -> None:
        """Evaluates the initial model on a batch of each data set, and trains it on those in `trained`.

        The names say in messages where the data is. Nothing of the trainer changes but what `Kernels` decides. Raises
        as `DataTrial`.
        """
        trial = DataTrial(self.task, self._model, self._device, self.objectives, self._lending, self._run)
        trial.try_on(data, trained, lambda: self._load(initial_model(self.task, 0)[1]))

    def check_private(self) -> None:
        """Checks that the model can be trained with noise. Raises as `federation.training.dp_sgd.check_suits`."""
        self._run(0, lambda: check_suits(self._model, self.task, self._data["train"]))

    def check_can_do(self, computation: Computation) -> None:
        """As `Trainer.check_can_do`.

        Raises WorkError also for a precision that the device lacks, for a minibatch of a whole split that is not in
        memory, and as `is_evened`.
        """
        self._note_kernels()
        super().check_can_do(computation)
        train = self._data["train"]
        if isinstance(computation, Descend) and not computation.idle:
            precision.check_suits(computation.sgd.precision, self._device)
            if isinstance(train, StoredSamples):
                train.check_readable(computation.sgd.batch_size)
            if self.samples and computation.private is None:
                self._evens(computation.sgd, computation.frozen)
        elif isinstance(computation, Differentiate):
            if isinstance(train, StoredSamples):
                train.check_readable(computation.batch_size)
            if self.samples:
                self._evens_first(computation.batch_size)

    def try_smallest(self, computation: Descend) -> None:
        """Trains the initial model on as many samples as the smallest minibatch of this training has.

        Raises:
            TaskError: an exception of the task's code, or of PyTorch; the message has the number of samples.
            WorkError: as of `check_can_do`.
        """
        self.check_can_do(computation)
        if computation.idle or computation.private is not None or not self.samples:
            return
        even = self._evens(computation.sgd, computation.frozen)
        size = self._forming(computation.sgd).smallest_minibatch(even=even)
        weights = next(iter(computation.targets.values()))
        plan = TrainingPlan(sgd=computation.sgd, weights=weights, seed=0, samples=size, frozen=computation.frozen)

        def work() -> Tensor:
            self._load(initial_model(self.task, 0)[1])
            training = self._training(plan, even)
            self._train_mode(plan.frozen)
            return self._step(*self._first(size), training)

        doing = f"a training pass on {counted(size, 'sample')}, the smallest minibatch of the run,"
        with generators_kept(), buffers_kept(self._model), task_code(self.task.name, doing):
            self._run(0, work)

    def compute(self, base: Vector, computation: Computation, **given: Any) -> Result:
        """As `Trainer.compute`. Gradients are kept until the next training.

        Missing gradients are computed again, to the same bytes.
        """
        result = super().compute(base, computation, **given)
        if isinstance(computation, Descend):
            self._jacobian = None
        return result

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        """Descends a weighted sum of objectives (the local solver of the papers); DP-SGD cannot be repeated."""
        even = plan.private is None and self._evens(plan.sgd, plan.frozen)
        return self._run(plan.seed, lambda: self._train(model, plan, even))

    def gradients(self, model: Vector, batch_size: int, seed: int) -> dict[str, Vector]:
        """The gradients on the first minibatch."""
        even = self._evens_first(batch_size)
        return self._run(seed, lambda: self._gradients(model, batch_size, seed, even))

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        """Losses, accuracies if the task has them, and the requested metrics of the task.

        It calls `plan.stopped` before every batch.
        """
        return self._run(0, lambda: self._evaluate(model, plan))

    def _run(self, seed: int, work: Callable[[], T]) -> T:
        """Does work that starts afresh in each call with the kernels that are decided on; see `Kernels`."""
        try:
            return self.kernels.run(seed, work)
        except SamplesWrittenError:
            self._hold(self.data)  # the samples as they were
            return self.kernels.run(seed, work)
        finally:
            self._note_kernels()

    def _note_kernels(self) -> None:
        if not self.kernels.repeatable:
            self.abilities = self.abilities - {Ability.REPEATABLE}

    def _evens(self, sgd: LocalSgd, frozen: Sequence[slice]) -> bool:
        """Whether this client's training evens its minibatches out. Raises WorkError as of `is_evened`."""
        return self._is_evened(self._forming(sgd), frozen)

    def _evens_first(self, batch_size: int) -> bool:
        """The same for gradients on the first minibatch."""
        first = Forming(samples=self.samples, batch_size=batch_size, steps=1, processes=self._processes)
        return self._is_evened(first, ())

    def _forming(self, sgd: LocalSgd) -> Forming:
        return Forming(
            samples=self.samples,
            batch_size=sgd.batch_size,
            steps=sgd.count(self.samples),
            micro_batch=sgd.micro_batch,
            processes=self._processes,
        )

    def _is_evened(self, forming: Forming, frozen: Sequence[slice]) -> bool:
        self._train_mode(frozen)
        layers = normalizes(self._model)
        return is_evened(forming, layers=layers, needs_two=lambda: self._needs_two(frozen))

    def _needs_two(self, frozen: Sequence[slice]) -> bool:
        """`needs_two` of the initial model, which does not depend on a coordinator's; it is found once."""

        def work() -> bool:
            self._load(initial_model(self.task, 0)[1])
            self._train_mode(frozen)
            x, y = (part[torch.arange(TRIED) % len(part)] for part in self._first(min(TRIED, self.samples)))
            return needs_two(self.task, self._model, self.objectives, x, y)

        freezes = self._freezes(frozen)
        if freezes not in self._statistics:
            with generators_kept():
                self._statistics[freezes] = self._run(0, work)
        return self._statistics[freezes]

    def _first(self, count: int) -> tuple[Tensor, Tensor]:
        """The first training samples."""
        train, index = self._data["train"], torch.arange(count)
        if isinstance(train, StoredSamples):
            return train.take(index)
        index = index.to(self._device)
        return train.x.index_select(0, index), train.y.index_select(0, index)

    def _train(self, model: Vector, plan: TrainingPlan, even: bool) -> Vector:
        self._load(model)
        if plan.private is None:
            self._descend(model, plan, even)
        else:
            self._descend_privately(plan)
        return np.concatenate([self._buffers.flat(self._buffers.values), self._state.flat()])

    def _gradients(self, model: Vector, batch_size: int, seed: int, even: bool) -> dict[str, Vector]:
        self._load(model)
        jacobian = self._jacobian_at(model, batch_size, seed, even)
        unchanged = np.zeros(self._state.size, dtype=np.float32)
        rows = [np.concatenate([self._buffers.flat(gradient), unchanged]) for gradient in jacobian]
        return dict(zip(self.objectives, rows, strict=True))

    def _evaluate(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        size = self.task.evaluation_batch
        size = min(size, _CACHED) if self._buffers.channels_last else size
        self._load(model)
        given = self.objectives, size, plan.stopped, self._lending, plan.metrics
        return measure(self._model, self.task, self._data[plan.split], *given).scores()

    def _jacobian_at(self, base: Vector, batch_size: int, key: int, even: bool) -> Tensor:
        """The gradients at w_t, which is loaded, as buffers, (M, padded); the kept ones if they are for w_t."""
        name = (key, batch_size, blake3(np.ascontiguousarray(base).data.cast("B")).digest())
        if self._jacobian is None or self._jacobian[0] != name:
            self._seed(key)
            x, y = next(minibatches(self._data["train"], batch_size, key, 1, even=even))
            count, x, y = len(y), self._part(x, even), self._part(y, even)
            self._model.train()
            values: Mapping[str, Tensor] = {}
            if len(y):
                with self._lent(x, y) as (own_x, own_y):
                    values = losses(self.task, self._model(self.task.augment(own_x)), own_y)
            gradients = []
            for objective in self.objectives:
                self._buffers.gradient.zero_()
                if values:
                    last = objective == self.objectives[-1]
                    loss = _share(values[objective], len(y), count)
                    loss.backward(retain_graph=not last)  # type: ignore[no-untyped-call]
                self._add_up(self._buffers.gradient)
                gradients.append(self._buffers.gradient.clone())
            self._jacobian = (name, torch.stack(gradients))
        return self._jacobian[1]

    def _descend(self, base: Vector, plan: TrainingPlan, even: bool) -> None:
        """Training from w_t, which is loaded; the parameters move in place.

        A first step from gradients skips its minibatch.
        """
        work, key, total = plan.sgd, plan.seed, plan.steps
        gradients = self._jacobian_at(base, work.batch_size, key, even) if plan.from_gradients else None
        # Every row uses the same batches and the same dropout, so that rows differ by their targets alone.
        self._seed(key)
        batches = minibatches(self._data["train"], work.batch_size, key, total, even=even)
        training = self._training(plan, even)
        pending: list[Tensor] = []
        self._train_mode(plan.frozen)
        step = 0
        while step < total:
            if plan.stopped():
                raise TrainingStopped
            if step == 0 and gradients is not None:
                next(batches)
                shares = torch.tensor([plan.weights.get(name, 0.0) for name in self.objectives], device=self._device)
                self._buffers.gradient.copy_(shares @ gradients)
                self._move(plan, training.descent)
                self._seed(key ^ 1)  # the gradients may have used random numbers, if they were computed now
                step = 1
                continue
            losses_of_steps = self._advance(batches, training, total - step)
            step += len(losses_of_steps)
            pending.extend(losses_of_steps)
            if len(pending) >= _LOOK_EVERY or step == total:
                finite = torch.stack(pending).isfinite().tolist()
                if not all(finite):
                    raise TrainingDiverged(step - len(finite) + 1 + finite.index(False))
                pending.clear()
            plan.tell(step / total)

    def _descend_privately(self, plan: TrainingPlan) -> None:
        """DP-SGD from w_t, which is loaded; the parameters move in place."""
        assert plan.private is not None  # noqa: S101
        gradients = PrivateGradients(self._model, self.task, self._data["train"], plan.sgd, plan.private, Noise())
        descent = self._training(plan, even=False).descent
        views = self._buffers.parameters(self._buffers.gradient)
        self._train_mode(plan.frozen)
        for step in range(plan.steps):
            if plan.stopped():
                raise TrainingStopped
            for view, part in zip(views, gradients.next(plan.weights), strict=True):
                view.copy_(part)
            descent.step([self._buffers.gradient])
            plan.tell((step + 1) / plan.steps)

    def _train_mode(self, frozen: Sequence[slice]) -> None:
        self._model.train()
        self._state.freeze(self._freezes(frozen))

    def _freezes(self, frozen: Sequence[slice]) -> frozenset[str]:
        """The names of the buffers in these columns."""
        return self._state.within(frozen, self._parameters)

    def _training(self, plan: TrainingPlan, even: bool) -> Training:
        """A training from w_t, which is loaded."""
        frozen = [self._buffers.mask(plan.frozen)] if plan.frozen else []
        descent = Descent.fresh(plan.sgd, [self._buffers.values], [self._buffers.start], plan.steps, frozen)
        move = partial(self._move, plan, descent)
        return Training(plan, descent, Precision(plan.sgd.precision, self._device, self._buffers.gradient, move), even)

    def _move(self, plan: TrainingPlan, descent: Descent) -> None:
        """One step along the gradient in the buffer."""
        if plan.sgd.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), plan.sgd.clip_norm)
        descent.step([self._buffers.gradient])

    def _advance(self, batches: Iterator[tuple[Tensor, Tensor]], training: Training, room: int) -> Sequence[Tensor]:
        """Some of the next steps, at most `room`; their losses."""
        return [self._step(*next(batches), training)]

    def _step(self, x: Tensor, y: Tensor, training: Training) -> Tensor:
        """A step on one minibatch; its loss."""
        plan, count, shares = training.plan, len(y), list[Tensor]()
        x, y = self._part(x, training.even), self._part(y, training.even)
        self._buffers.gradient.zero_()
        if len(y):
            with self._lent(x, y) as (own_x, own_y):
                sizes = Cut.of(len(y), plan.sgd.micro_batch, even=training.even).sizes
                parts = torch.split(self.task.augment(own_x), sizes), torch.split(own_y, sizes)
                for part_x, part_y in zip(*parts, strict=True):
                    with training.precision.forward():
                        loss = weighted(losses(self.task, self._model(part_x), part_y), plan.weights)
                    shares.append(_share(loss, len(part_y), count))
                    training.precision.backward(shares[-1])
        self._add_up(self._buffers.gradient)
        training.precision.step()
        total = shares[0].detach() if len(shares) == 1 else sum((part.detach() for part in shares), start=self._zero())
        self._add_up(total)
        return total

    @contextmanager
    def _lent(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A minibatch, or a part of one, for one pass: if it is the client's own samples, as `Lending` lends them."""
        train = self._data["train"]
        if isinstance(train, StoredSamples) or not (x is train.x or x._base is train.x):
            yield x, y  # gathered for this pass
            return
        with self._lending.of("training", x, y) as loan:
            yield loan.give(x, y)

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self._device)

    # --- overridden for several processes that train together

    def _seed(self, seed: int) -> None:
        """Seeds the random numbers of the model."""
        seed_torch(self._device, seed)

    @property
    def _processes(self) -> int:
        """The number of processes that train together."""
        return 1

    def _part(self, samples: Tensor, even: bool) -> Tensor:
        """The part of a minibatch that this process computes."""
        return samples

    def _add_up(self, tensor: Tensor) -> None:
        """Adds up a tensor over the processes, in place."""


def _share(loss: Tensor, samples: int, of: int) -> Tensor:
    """The contribution of some samples of a minibatch to its mean loss."""
    return loss if samples == of else loss * (samples / of)
