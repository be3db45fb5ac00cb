"""The contract of a trainer: the methods of code that trains one client's models. It needs no PyTorch."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from federation.digests import derived_seed
from federation.spec.computation import (
    CANNOT,
    SPLITS,
    Ability,
    Computation,
    Descend,
    Differentiate,
    Measure,
    MeasureAlong,
    training_losses,
)
from federation.statistics.scale import ScaleLayer
from federation.tasks import (
    DataError,
    DataSource,
    LossError,
    Task,
    TaskError,
    buffers_of,
    initial_model,
    scale_layer_of,
)
from federation.training import TrainingDiverged
from federation.training.contract import (
    gradients_of,
    model_of,
    no_share_in_words,
    no_shares,
    plain,
    refused,
    scores_of,
)
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.serving import check_objectives, reported_losses, served, split_metrics
from federation.vectors import Array, Layout, Vector
from federation.work.base import Result, Shape, WorkError

if TYPE_CHECKING:
    from torch import nn

LOGGER = logging.getLogger("fedpareto.trainer")


class Trainer(ABC):
    """Trains and evaluates models of one task on one client's data. A model is a float32 vector (d,).

    A subclass defines `train` and `evaluate`, and lists its other abilities in `abilities`. Each call starts afresh
    from the model that it is given. One call is made at a time.

    Attributes:
        abilities: see `Ability`. Work that needs another one is declined. A trainer that finds in its work that it
            lacks one sets a smaller set.
        task: of the models.
        data: the client's, as `load` returned it.
        objectives: those that the client serves, in the task's order.
        device: the device of its computations: the owner's name, or a description, if `prepare` sets it.
        threads: CPU threads that it may use; None for any number.
        unfit: why its data are offered for statistics alone; empty where they can train.
    """

    abilities: frozenset[str] = frozenset()
    unfit: str = ""

    def __init__(
        self,
        task: Task,
        data: Any,
        device: str = "cpu",
        threads: int | None = None,
        objectives: Sequence[str] | None = None,
    ) -> None:
        """Calls `prepare`. `objectives` are those that the client serves; None for all of the task's.

        Raises:
            TaskError: an objective has a reserved name or does not exist, or the model cannot be a flat vector.
        """
        check_objectives(task)
        self.task, self.device, self.threads = task, device, threads
        self._named_device = device
        self.objectives = served(task, objectives)
        self.data = data
        self.prepare()
        if unknown := sorted(set(self.abilities) - set(Ability)):
            raise TaskError(f"a trainer cannot have the ability {unknown[0]!r}: there are {', '.join(Ability)}")

    # --- defined by a subclass

    @classmethod
    def load(cls, task: Task, source: DataSource) -> Any:
        """The client's data. Raises DataError."""
        return task.load(source)

    def prepare(self) -> None:  # noqa: B027 - optional
        """Prepares the common state of all trainings; called once, after all attributes but the abilities are set."""

    @abstractmethod
    def train(self, model: Vector, plan: TrainingPlan) -> Array:
        """The model (d,) after training from a model (d,), which must not be changed.

        Raises:
            TrainingDiverged: a loss or a parameter is no longer finite.
            TrainingStopped: `plan.progress` raised it.
        """

    @abstractmethod
    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
        """Measures a model (d,) on a split of the data.

        Returns:
            "loss", the mean over the client's objectives; with several objectives "loss/NAME" for each. Everything else
            is optional: "accuracy", "accuracy/NAME", and the task's own metrics, "NAME" or "NAME/KEY".

        Raises:
            TrainingStopped: `plan.stopped` returned True. It may be asked at any time, or never.
        """

    def gradients(self, model: Vector, batch_size: int, seed: int) -> Mapping[str, Array]:
        """The gradient (d,) of each of the client's objectives on one minibatch; 0 is the whole training split.

        A trainer with the ability "gradients" defines it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define gradients()")

    @cached_property
    def layout(self) -> Layout:
        """The tensors of a model."""
        return initial_model(self.task, 0)[0]

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The names of the tensors of a model that are buffers: each run decides on their treatment."""
        return frozenset(buffers_of(self.task))

    @cached_property
    def scale_layer(self) -> ScaleLayer | None:
        """The layer Standardise of the model; None without one."""
        return scale_layer_of(self.task)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of samples of each split."""
        return {name: len(getattr(self.data, name)) for name in SPLITS}

    @property
    def measured(self) -> frozenset[str]:
        """The splits that `evaluate` can measure. Of others, only the number of samples is told."""
        return frozenset(SPLITS)

    def check_can_be_made(self) -> None:
        """Raises TaskError unless `__init__` of this class was called, which a subclass with its own may forget."""
        if "_named_device" not in vars(self):
            raise TaskError(
                f"trainer {type(self).__name__}: its __init__ does not call super().__init__(task, data, device, "
                "threads, objectives), which sets its task and its data: call it, or define prepare() in its place"
            )

    def try_out(self) -> None:
        """Tries the data on the initial model, before the client takes part. Warns of scores that nobody counts.

        Raises:
            LossError: a loss is not finite.
        """
        model = initial_model(self.task, 0)[1]
        for name in SPLITS:
            scores = self._scores(model, EvaluationPlan(split=name))
            for score, value in no_shares(scores).items():
                LOGGER.warning("task %s: %s", self.task.name, no_share_in_words(score, value))
            losses = reported_losses(scores, self.objectives)
            if not all(map(math.isfinite, losses.values())):
                raise LossError(f"task {self.task.name!r}: the initial model has no finite loss on the {name} split")

    def check_private(self) -> None:
        """Checks that the model can be trained with noise.

        Raises:
            WorkError: it cannot; the reason is that of the decline.
        """
        self._check_able({Ability.NOISE})

    def try_smallest(self, computation: Descend) -> None:  # noqa: B027 - optional
        """Tries the smallest minibatch of a training, if this trainer knows which that is, before the run begins.

        Raises:
            TaskError: the task's code raised an exception.
            WorkError: the training would be declined.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Releases what `prepare` took, such as processes."""

    @property
    def device_in_words(self) -> str:
        """The device in use; empty unless `prepare` sets `device`, since the owner's name is only a wish."""
        return "" if self.device == self._named_device else self.device

    # --- help for subclasses

    def arrays(self, model: Vector) -> dict[str, Vector]:
        """The tensors of a model (d,) by name: views with the shapes of the layout."""
        return self.layout.split(model)

    def vector(self, arrays: Mapping[str, Any]) -> Vector:
        """The model (d,) that these tensors make up.

        Raises:
            ValueError: tensors are missing, too many or of another shape; the message names them.
            TypeError: one holds no numbers.
        """
        return self.layout.join({name: plain(array) for name, array in arrays.items()}, self.buffers)

    def load_module(self, module: "nn.Module", model: Vector) -> None:
        """Sets the trainable parameters and the buffers of a PyTorch module to those of a model (d,), in place.

        The module may be on any device. Raises ValueError as `vector`: the module has other tensors than the model.
        """
        from federation.training.modules import load  # noqa: PLC0415 - a trainer needs no PyTorch

        load(module, self.arrays(model), self.buffers)

    def module_vector(self, module: "nn.Module") -> Vector:
        """The model (d,) of a PyTorch module: copies of its trainable parameters and its buffers.

        Raises ValueError as `vector`.
        """
        from federation.tasks.parameters import values  # noqa: PLC0415 - a trainer needs no PyTorch

        return self.vector(values(module))

    # --- called by clients

    def trained(self, model: Vector, plan: TrainingPlan) -> Vector:
        """The model (d,) that `train` returns. Errors as of `train`, and WorkError for a result that is no model."""
        return model_of(self._returned(self.train, model, plan), self.layout, self.buffers, "train()")

    def differentiated(self, model: Vector, batch_size: int, seed: int) -> dict[str, Vector]:
        """The gradients (d,) that `gradients` returns, by objective. Errors as of `trained`."""
        returned = self._returned(self.gradients, model, batch_size, seed)
        return gradients_of(returned, self.objectives, self.layout, self.buffers)

    def scored(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        """The requested scores that `evaluate` returns, NaN for None. Errors as of `trained`."""
        requested = {"loss", "accuracy", *plan.metrics}
        return scores_of(self._returned(self.evaluate, model, plan), requested, self._needed_losses)

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return self.sizes["train"]

    @property
    def shape(self) -> Shape:
        """The shape of the model and the objectives."""
        return Shape(self.layout, tuple(self.task.objectives), self.objectives)

    def on(self, data: Any, objectives: Sequence[str] | None = None) -> Self:
        """A trainer for another client's data. It may share with this one, so only one of them may work at a time."""
        return type(self)(self.task, data, self.device, self.threads, objectives)

    def compute(
        self,
        base: Vector,
        computation: Computation,
        *,
        seed: int,
        round: int,  # noqa: A002 - the field's own word, as everywhere
        client_id: str,
        progress: Callable[[float], None] = lambda share: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Computes the rows and losses of the base model (d,) on this client's data that work needs.

        A descent gives a row w_t - w for each target, a differentiation a gradient for each objective, (d,) both. An
        idle descent measures as training does, makes no step, and gives rows of zeros. `progress` gets the share of the
        computation that is done; after `stopped` returns True, the computation ends soon.

        Raises:
            DataError: the training split is empty, and steps or gradients are needed.
            TrainingDiverged: a loss, a gradient or a parameter is not finite.
            TrainingStopped: `stopped` returned True.
            ValueError: a base of another length, or targets that name an objective which this client does not serve.
            WorkError: the trainer lacks an ability, or returned an invalid result.
        """
        began = time.perf_counter()
        self.check_can_do(computation)
        if base.shape != (self.layout.size,):
            raise ValueError(f"the model has {self.layout.size} trainable parameters, the base {base.shape}")
        match computation:
            case Measure():
                metrics = self.measure(
                    base, computation.splits, computation.metrics, undefined=computation.undefined, stopped=stopped
                )
                result = Result({}, {}, metrics, self.samples)
            case MeasureAlong():
                measured = {}
                for number, (name, model) in enumerate(computation.models(base), 1):
                    measured[name] = self.measure(model, ("train",), stopped=stopped)
                    progress(number / len(computation.steps))
                result = Result({}, {}, training_losses(measured), self.samples)
            case _:
                result = self._rows(base, computation, training_seed(seed, round, client_id), progress, stopped)
        self._check_able(computation.needs())  # the work itself may have shown that the trainer is not repeatable
        return replace(result, seconds=time.perf_counter() - began)

    def check_can_do(self, computation: Computation) -> None:
        """Raises WorkError if the trainer lacks an ability that a computation needs."""
        self._check_able(computation.needs())

    def measure(
        self,
        model: Vector,
        splits: tuple[str, ...] = SPLITS,
        metrics: tuple[str, ...] = (),
        *,
        undefined: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Measures a model (d,) on some of the client's splits.

        `metrics` are those of the task that are measured besides loss and accuracy.

        Returns:
            "<split>/samples", and the metrics of `evaluate` after "<split>/"; for an empty split only the first.
            Non-finite values are left out, unless `undefined` asks for them.

        Raises:
            TrainingStopped: `stopped` returned True.
            WorkError: `evaluate` returned no loss, or a metric without a proper name.
        """
        measured: dict[str, float] = {}
        for split in splits:
            scores = self._scores(model, EvaluationPlan(split=split, metrics=metrics, stopped=stopped))
            measured |= split_metrics(split, self.sizes[split], scores, undefined=undefined)
        return measured

    def measurable(
        self, splits: tuple[str, ...], metrics: tuple[str, ...], stopped: Callable[[], bool] = lambda: False
    ) -> frozenset[str]:
        """The names of what `measure` returns, also for values that are not finite.

        The task's own initial model is measured for it, so that no coordinator's model decides on the names. Arguments
        and errors are those of `measure`.
        """
        model = initial_model(self.task, 0)[1]
        return frozenset(self.measure(model, splits, metrics, undefined=True, stopped=stopped))

    # --- the rest

    def _rows(
        self,
        base: Vector,
        computation: Descend | Differentiate,
        key: int,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> Result:
        """The rows of a training or a differentiation, whose seed is `key` unless it has one of its own."""
        idle = isinstance(computation, Descend) and computation.idle
        if self.samples == 0 and not idle:
            raise DataError(f"no training samples for {self.task.name}", wire="there are no training samples")
        key = key if computation.secret_seed is None else computation.secret_seed
        losses: dict[str, float] = {}
        metrics = split_metrics("train", self.samples, {})
        if computation.measure or idle:
            scores = self._scores(base, EvaluationPlan(split="train", stopped=stopped))
            losses, metrics = reported_losses(scores, self.objectives), split_metrics("train", self.samples, scores)
            if not idle and not np.isfinite(list(losses.values())).all():
                raise TrainingDiverged(0)
        rows: dict[str, Vector] = {}
        match computation:
            case Descend(idle=True):
                rows = {name: np.zeros(self.layout.size, dtype=np.float32) for name in computation.targets}
            case Descend():
                rows = self._trained(base, computation, key, progress, stopped)
            case Differentiate():
                rows = self.differentiated(base, computation.batch_size, key)
                if not all(np.isfinite(row).all() for row in rows.values()):
                    raise TrainingDiverged(1)
        return Result(rows, losses, metrics, self.samples)

    def _trained(
        self,
        base: Vector,
        work: Descend,
        key: int,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> dict[str, Vector]:
        """The updates w_t - w, one for each target."""
        if work.private is not None:
            self.check_private()
        for weights in work.targets.values():
            if unknown := sorted(weights.keys() - set(self.objectives)):
                raise ValueError(f"this client does not serve {', '.join(unknown)}: it serves {self.objectives}")
        rows: dict[str, Vector] = {}
        for number, (name, weights) in enumerate(work.targets.items()):

            def tell(share: float, before: int = number) -> None:
                progress((before + share) / len(work.targets))

            plan = TrainingPlan(
                sgd=work.sgd,
                weights=weights,
                seed=key,
                samples=self.samples,
                from_gradients=work.from_jacobian,
                private=work.private,
                frozen=work.frozen,
                stopped=stopped,
                tell=tell,
            )
            with np.errstate(over="ignore", invalid="ignore"):
                rows[name] = base - self.trained(base, plan)
            if not np.isfinite(rows[name]).all():
                raise TrainingDiverged(plan.steps)
        return rows

    def _scores(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        """The requested metrics of `evaluate`, and the mean loss; empty for an empty split, and one not `measured`."""
        if not self.sizes[plan.split] or plan.split not in self.measured:
            return {}
        scores, losses = self.scored(model, plan), self._needed_losses
        return scores if "loss" in scores else {"loss": sum(scores[name] for name in losses) / len(losses), **scores}

    @property
    def _needed_losses(self) -> list[str]:
        """The names of the losses that `evaluate` must return."""
        return [f"loss/{name}" for name in self.objectives] if len(self.task.objectives) > 1 else ["loss"]

    def _returned(self, method: Callable[..., Any], model: Vector, *given: Any) -> Any:
        """What a method returns for a model.

        Code of an owner's gets a copy, so that nothing that it writes gets into the model, which may be a file.

        Raises:
            WorkError: it tried to write into the model.
        """
        own = not method.__module__.startswith("federation.")
        model = np.array(model) if own else model.view()
        model.flags.writeable = False
        try:
            return method(model, *given)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            name = f"{method.__name__}()"
            raise refused(name, f"must not change the model that it is given: use model.copy() ({error})") from error

    def _check_able(self, needed: frozenset[Ability] | set[Ability]) -> None:
        if missing := sorted(needed - self.abilities):
            raise inability(Ability(missing[0]))


def inability(ability: Ability) -> WorkError:
    """The error of a trainer without an ability that work needs."""
    return WorkError(f"the trainer of this worker {CANNOT[ability]}", reason=f"ability:{ability}")


def training_seed(seed: int, round_: int, client_id: str) -> int:
    """The seed of one client's work in one round, 0 to 2^63 - 1."""
    return derived_seed(f"fedpareto/train\0{seed}\0{round_}\0{client_id}")
