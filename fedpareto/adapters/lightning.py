"""A LightningModule as a task: `LightningTask`. Tested with Lightning 2.6.

The package is the one that the module's class comes from, `lightning.pytorch` or `pytorch_lightning`: this file imports
neither.
"""

import copy
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from federation.spec.computation import SPLITS
from federation.tasks import DataError, Dataset, DataSource, PartError, Splits, Task, TaskError
from federation.tasks.parameters import build
from federation.training import TrainingStopped, precision
from federation.training.contract import refused
from federation.training.determinism import describe_device, pick_device
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.sample_tensors import splits_of_tensors
from federation.training.trainer import Trainer
from federation.value_words import in_words
from federation.vectors import Vector
from fedpareto.adapters.seeded import seeded

LOGGER = logging.getLogger("fedpareto.trainer")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LOADERS = dict(zip(SPLITS, ("train_dataloader", "val_dataloader", "test_dataloader"), strict=True))
_RATE, _BATCH = ("learning_rate", "lr"), ("batch_size",)  # where Lightning's tuner sets them, too
_PRECISION = {"float32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
# What the adapter gives to Lightning's Trainer, so that `options` cannot.
_GIVEN = {
    *("accelerator", "devices", "num_nodes", "strategy", "plugins", "precision", "max_epochs", "max_steps", "logger"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    *("num_sanity_val_steps", "limit_val_batches"),
}


@dataclass(frozen=True, eq=False)
class ModuleSplits(Splits):
    """The data sets of a LightningDataModule, with the data module, which makes batches of them."""

    module: Any


class LightningTrainer(Trainer):
    """Trains and measures a LightningModule. Each call makes it, its optimiser and Lightning's Trainer afresh."""

    task: "LightningTask"
    data: Splits

    def prepare(self) -> None:
        """Finds the device and the package of Lightning.

        Raises:
            TaskError: the task is of another kind, its `options` has what the adapter gives, or its module is none of
                Lightning's, or has no validation_step.
            ValueError: no such device.
        """
        name = self.task.name
        if not isinstance(self.task, LightningTask):
            raise TaskError(f"task {name!r}: {type(self.task).__name__} must inherit from LightningTask")
        if taken := sorted(_GIVEN & {*self.task.options}):
            raise TaskError(f"task {name!r}: options has {taken[0]!r}, which the adapter sets: leave it out")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._device = torch.device(pick_device(self.device))
        self.device = describe_device(str(self._device))
        module: Any = build(self.task)
        self._lightning = _package(module, name)
        if type(module).validation_step is self._lightning.LightningModule.validation_step:
            raise TaskError(f"task {name!r}: {type(module).__name__} has no validation_step, which measures a model")
        logging.getLogger(self._lightning.__name__).setLevel(logging.WARNING)  # each call would tell its devices
        if not isinstance(self.data, ModuleSplits):
            self.data = splits_of_tensors(self.data)
        self._warn_of_unused(module, "learning_rate", _RATE)
        if isinstance(self.data, ModuleSplits):
            self._warn_of_unused(self.data.module, "batch_size", _BATCH)

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        """Lightning's fit, with the epochs or steps, the batch size, the rate and the precision of the run.

        Raises WorkError, besides what `Trainer.train` raises, for a precision that the device lacks.
        """
        sgd = plan.sgd
        length = {"max_epochs": sgd.epochs} if sgd.epochs else {"max_steps": sgd.steps}

        def follow(trainer: Any, module: nn.Module, outputs: object, batch: object, index: int) -> None:
            passes = trainer.current_epoch + (index + 1) / trainer.num_training_batches
            plan.progress(min(1.0, passes / sgd.epochs if sgd.epochs else trainer.global_step / sgd.steps))

        precision.check_suits(sgd.precision, self._device)
        plan.progress(0.0)
        with seeded(plan.seed), _interrupts_kept():
            module = self._module(model)
            _set(module, _RATE, sgd.learning_rate)
            trainer = self._trainer(
                {"on_train_batch_end": follow}, **length, limit_val_batches=0, precision=_PRECISION[sgd.precision]
            )
            trainer.fit(module, **self._training_batches(sgd.batch_size or plan.samples))
        return self.module_vector(module)

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
        """What `validation_step` logs on a split, under the names in `scores` of the task."""

        def follow(*_: object) -> None:
            if plan.stopped():
                raise TrainingStopped

        with seeded(0), _interrupts_kept():
            module = self._module(model)
            trainer = self._trainer({"on_validation_batch_end": follow})
            (logged,) = trainer.validate(module, **self._measured_batches(plan.split), verbose=False)
        if (needed := self.task.scores.get("loss")) not in logged:
            names = ", ".join(map(repr, sorted(logged))) or "nothing"
            raise refused("evaluate()", f"needs {needed!r} as the loss; validation_step logs {names}: see `scores`")
        return {name: logged[key] for name, key in self.task.scores.items() if key in logged}

    def _module(self, model: Vector) -> Any:
        """A new module with the values of a model (d,), without callbacks that write files or end a training."""
        module: Any = build(self.task)
        self.load_module(module, model)
        own = module.configure_callbacks
        module.configure_callbacks = lambda: self._kept(own())
        return module

    def _kept(self, callbacks: Any) -> list[Any]:
        """The callbacks of the owner but those of checkpoints and early stopping."""
        left_out = (self._lightning.callbacks.Checkpoint, self._lightning.callbacks.EarlyStopping)
        listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        return [callback for callback in listed if not isinstance(callback, left_out)]

    def _trainer(self, hooks: Mapping[str, Callable[..., None]], **more: Any) -> Any:
        """Lightning's Trainer, which writes nothing."""
        options = dict(self.task.options)
        own = self._kept(options.pop("callbacks", None) or [])
        environments = import_module(f"{self._lightning.__name__}.plugins.environments")
        gpu = self._device.type == "cuda"
        return self._lightning.Trainer(
            accelerator="gpu" if gpu else "cpu",
            devices=[self._device.index or 0] if gpu else 1,
            plugins=[environments.LightningEnvironment()],  # one process, also inside of a job of Slurm
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[*own, self._lightning.callbacks.LambdaCallback(**hooks)],
            **options,
            **more,
        )

    def _training_batches(self, size: int) -> dict[str, Any]:
        """The training data as an argument of fit, in minibatches of this size."""
        if not isinstance(self.data, ModuleSplits):
            return {"train_dataloaders": DataLoader(_samples(self.data.train), batch_size=size, shuffle=True)}
        _set(self.data.module, _BATCH, size)
        return {"datamodule": _loaded(self.data.module)}

    def _measured_batches(self, split: str) -> dict[str, Any]:
        """A split as an argument of validate: each sample once, in order."""
        if not isinstance(self.data, ModuleSplits):
            data = _samples(getattr(self.data, split))
            return {"dataloaders": DataLoader(data, batch_size=self.task.evaluation_batch)}
        module = _loaded(self.data.module)
        loader = getattr(module, _LOADERS[split])()
        if split == "train" and loader.batch_size is not None:
            loader = DataLoader(
                loader.dataset,
                batch_size=loader.batch_size,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
                worker_init_fn=loader.worker_init_fn,
            )
        module.val_dataloader = lambda: loader
        return {"datamodule": module}

    def _warn_of_unused(self, holder: object, key: str, names: tuple[str, ...]) -> None:
        if not any(name in place for name in names for place in _places(holder)):
            LOGGER.warning(
                "task %s: train.%s of a run is not used: %s has no attribute and no hyper-parameter %s",
                *(self.task.name, key, type(holder).__name__, " or ".join(names)),
            )


class LightningTask(Task):
    """A task whose model is a LightningModule, which Lightning trains and measures.

    A subclass defines `model`, which returns the LightningModule, and `data`, or as any task `pool` or `load`: then the
    batches are pairs of x and y.

    Attributes:
        scores: the names under which `validation_step` logs, by those of the federation: "loss", if known "accuracy",
            and those of `metrics`.
        options: further arguments of Lightning's Trainer.
    """

    trainer = LightningTrainer
    scores: ClassVar[Mapping[str, str]] = {"loss": "val_loss", "accuracy": "val_acc"}
    options: ClassVar[Mapping[str, Any]] = {}

    def data(self, source: DataSource) -> Any:
        """A LightningDataModule with the member's data. Raises DataError."""
        raise NotImplementedError(f"{type(self).__name__} defines none of data, pool and load")

    def load(self, source: DataSource) -> Splits:
        """The data sets of `data`, which is set up once; without it as of any task.

        Raises:
            PartError: a part of the data is asked for.
            DataError: the data is missing, or a loader has no data set with a length.
        """
        if type(self).data is LightningTask.data:
            return super().load(source)
        if source.part is not None:
            raise PartError(
                f"task {self.name!r}: a LightningDataModule is the data of one member, and is not dealt to several: "
                "give each member its own directory, or define pool in place of data"
            )
        module = self.data(source)
        module.prepare_data()
        for stage in ("fit", "test"):
            module.setup(stage)
        train, validation, test = (_data_set(module, name) for name in _LOADERS.values())
        return ModuleSplits(train, validation, test, module)


def _package(module: nn.Module, task: str) -> Any:
    """The package of Lightning that the class of a module comes from. Raises TaskError: from none."""
    bases = (base.__module__ for base in type(module).__mro__ if base.__name__ == "LightningModule")
    for place in bases:
        for package in _PACKAGES:
            if place.startswith(f"{package}."):
                return import_module(package)
    raise TaskError(f"task {task!r}: model() returned {in_words(module)}; needed: a LightningModule")


def _data_set(module: Any, loader: str) -> Any:
    """The samples of a loader; () if the data module has no such loader."""
    try:
        made = getattr(module, loader)()
    except Exception as error:
        if type(error).__name__ == "MisconfigurationException":  # of a method that is not defined
            return ()
        raise
    data = getattr(made, "dataset", None)
    if not hasattr(data, "__len__"):
        raise DataError(f"{loader}() returned {in_words(made)}; needed: one DataLoader of a data set with a length")
    return data


def _loaded(module: Any) -> Any:
    """A copy of a data module that was set up, which Lightning does not set up or tear down again."""
    module = copy.copy(module)
    module.prepare_data = lambda: None
    module.setup = module.teardown = lambda stage: None
    return module


def _samples(split: Any) -> Any:
    """A split as a map-style data set of PyTorch."""
    return TensorDataset(split.x, split.y) if isinstance(split, Dataset) else split


def _places(holder: Any) -> list[Any]:
    """The attributes, and the hyper-parameters, of a module."""
    return [vars(holder), dict(getattr(holder, "hparams", {}))]


def _set(holder: Any, names: tuple[str, ...], value: float) -> None:
    """Sets the attributes and the hyper-parameters of these names, if there are some."""
    attributes, hyperparameters = _places(holder)
    for name in names:
        if name in attributes:
            setattr(holder, name, value)
        if name in hyperparameters:
            holder.hparams[name] = value


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Passes Ctrl-C on, of which Lightning makes an exit, after which it would ignore Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
