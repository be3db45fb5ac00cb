"""A model that Hugging Face's Trainer trains, as a task: `TransformersTask`.

Tested with transformers 5.23 and accelerate 1.15, which are imported where a model is trained or measured.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from federation.spec.computation import SPLITS
from federation.tasks import DataError, Dataset, DataSource, PartError, Splits, Task, TaskError, task_code
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
from fedpareto.missing_packages import PackagesMissing, need

_EVALUATED = "per_device_eval_batch_size"
# What no owner can set: it writes files, reports to somebody, or uses several devices.
_OFF: Mapping[str, Any] = MappingProxyType(
    {
        "output_dir": os.curdir,  # it must exist; nothing is written
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "push_to_hub": False,
        "disable_tqdm": True,
        "eval_on_start": False,
        "load_best_model_at_end": False,
        "enable_jit_checkpoint": False,
        "auto_find_batch_size": False,
        "deepspeed": None,
        "fsdp": None,
    }
)
# What the run sets.
_OF_RUN = (
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "learning_rate", "bf16", "fp16"),
    *("seed", "use_cpu"),
)
_GIVEN = ("model", "model_init", "args", "train_dataset", "eval_dataset", "optimizers")  # to the library's Trainer


class TransformersTrainer(Trainer):
    """Trains and measures by Hugging Face's Trainer. Each call makes it, the model and the optimiser afresh."""

    task: "TransformersTask"
    data: Splits

    def prepare(self) -> None:
        """Finds the device, and imports the library, which tells nobody about its use.

        Raises:
            TaskError: the task is of another kind, the library or accelerate is not installed, or `arguments` or
                `options` has what the adapter sets.
            ValueError: no such device.
        """
        name = self.task.name
        if not isinstance(self.task, TransformersTask):
            raise TaskError(f"task {name!r}: {type(self.task).__name__} must inherit from TransformersTask")
        for attribute, taken in (("arguments", {*_OFF, *_OF_RUN}), ("options", {*_GIVEN})):
            if both := sorted(taken & {*getattr(self.task, attribute)}):
                raise TaskError(f"task {name!r}: {attribute} has {both[0]!r}, which the adapter sets: leave it out")
        try:
            need(f"task {name!r} needs", "transformers", "accelerate", extra="transformers")
        except PackagesMissing as error:
            raise TaskError(str(error)) from None
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self._device = torch.device(pick_device(self.device))
        if self._device.index:
            raise TaskError(
                f"task {name!r}: Hugging Face's Trainer takes the first GPU, not {self.device}: name the GPU in "
                "CUDA_VISIBLE_DEVICES, and set device to cuda"
            )
        self.device = describe_device(str(self._device))
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        self._library: Any = import_module("transformers")
        constants: Any = import_module("huggingface_hub.constants")  # it may have been imported before
        constants.HF_HUB_DISABLE_TELEMETRY = True
        with task_code(name, "making its TrainingArguments"):
            self._arguments()
        splits = splits_of_tensors(self.data)
        self.data = Splits(*(_samples(split, self.task.columns) for split in splits))

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        """The library's training, with the epochs or steps, the batch size, the rate and the precision of the run.

        Raises WorkError, besides what `Trainer.train` raises, for a precision that the device lacks.
        """
        sgd = plan.sgd
        length = {"num_train_epochs": sgd.epochs} if sgd.epochs else {"max_steps": sgd.steps}

        def follow(arguments: object, state: Any, control: object, **_: object) -> None:
            plan.progress(min(1.0, state.global_step / state.max_steps))

        precision.check_suits(sgd.precision, self._device)
        plan.progress(0.0)
        with seeded(plan.seed):
            module = self._module(model)
            trainer = self._trainer(
                module,
                {"on_substep_end": follow, "on_step_end": follow},
                train_dataset=self.data.train,
                args=self._arguments(
                    **length,
                    per_device_train_batch_size=sgd.batch_size or plan.samples,
                    learning_rate=sgd.learning_rate,
                    bf16=sgd.precision == "bf16",
                    fp16=sgd.precision == "fp16",
                    seed=plan.seed % 2**32,
                ),
            )
            trainer.train()
        return self.module_vector(module)

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> Mapping[str, float]:
        """What the library's evaluation of a split tells, under the names in `scores` of the task."""

        def follow(*_: object, **__: object) -> None:
            if plan.stopped():
                raise TrainingStopped

        with seeded(0):
            trainer = self._trainer(self._module(model), {"on_prediction_step": follow}, args=self._arguments())
            told = trainer.evaluate(getattr(self.data, plan.split))
        if (needed := self.task.scores.get("loss")) not in told:
            raise refused(
                "evaluate()",
                f"needs {needed!r} as the loss; the Trainer tells {', '.join(map(repr, sorted(told)))}: see `scores`, "
                "and whether each sample has labels",
            )
        return {name: told[key] for name, key in self.task.scores.items() if key in told}

    def _module(self, model: Vector) -> nn.Module:
        """A new module with the values of a model (d,)."""
        module = build(self.task)
        self.load_module(module, model)
        return module

    def _arguments(self, **of_run: Any) -> Any:
        """The library's TrainingArguments, for one device."""
        kind = self.task.arguments_class or self._library.TrainingArguments
        gpu = self._device.type == "cuda"
        own = {_EVALUATED: self.task.evaluation_batch, "dataloader_pin_memory": gpu, **self.task.arguments}
        arguments = kind(**own, **_OFF, use_cpu=not gpu, **of_run)
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # the library would train on all GPUs, and with other minibatches
        return arguments

    def _trainer(self, module: nn.Module, hooks: Mapping[str, Callable[..., None]], **more: Any) -> Any:
        """The library's Trainer, which writes and reports nothing."""
        library = self._library
        trainer = (self.task.trainer_class or library.Trainer)(model=module, **self.task.options, **more)
        silent = (library.PrinterCallback, library.ProgressCallback, library.EarlyStoppingCallback)
        for callback in list(trainer.callback_handler.callbacks):
            places = (base.__module__ for base in type(callback).__mro__)
            if isinstance(callback, silent) or any(map(_reports, places)):
                trainer.remove_callback(callback)
        own = {name: staticmethod(hook) for name, hook in hooks.items()}
        trainer.add_callback(type("Follow", (library.TrainerCallback,), own))
        return trainer


class TransformersTask(Task):
    """A task whose model Hugging Face's Trainer trains and measures.

    A subclass defines `model`, and `data`, or as any task `pool` or `load`.

    Attributes:
        scores: the names under which the Trainer tells its numbers, by those of the federation: "loss", if known
            "accuracy", and those of `metrics`.
        arguments: further arguments of TrainingArguments.
        options: further arguments of the Trainer, such as `data_collator` and `compute_metrics`.
        columns: the names of x and y in a sample, where the data is that of `pool`, or `Dataset`s.
        trainer_class: a class derived from the library's Trainer, in place of it.
        arguments_class: likewise, of TrainingArguments.
    """

    trainer = TransformersTrainer
    scores: ClassVar[Mapping[str, str]] = {"loss": "eval_loss", "accuracy": "eval_accuracy"}
    arguments: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    columns: ClassVar[tuple[str, str]] = ("input_ids", "labels")
    trainer_class: ClassVar[Any] = None
    arguments_class: ClassVar[Any] = None

    def data(self, source: DataSource) -> Mapping[str, Any]:
        """The member's data sets by split, whose samples are dicts. Raises DataError."""
        raise NotImplementedError(f"{type(self).__name__} defines none of data, pool and load")

    def load(self, source: DataSource) -> Splits:
        """The data sets of `data`; without it as of any task.

        Raises:
            PartError: a part of the data is asked for.
            DataError: the data is missing, or is not given by split as data sets with a length.
        """
        if type(self).data is TransformersTask.data:
            return super().load(source)
        if source.part is not None:
            raise PartError(
                f"task {self.name!r}: data() returns the data of one member, which is not dealt to several: give each "
                "member its own directory, or define pool in place of data"
            )
        found = self.data(source)
        if not isinstance(found, Mapping) or not {*found} <= {*SPLITS}:
            names = (
                f"{in_words(found)} with {', '.join(map(str, found))}"
                if isinstance(found, Mapping)
                else in_words(found)
            )
            raise DataError(f"data() returned {names}; needed: data sets by split ({', '.join(SPLITS)})")
        for name, split in found.items():
            if not hasattr(split, "__len__") or not hasattr(split, "__getitem__"):
                raise DataError(f"data() returned {in_words(split)} as {name}; needed: a data set with a length")
        return Splits(*(found.get(name, ()) for name in SPLITS))


class _Columns(torch.utils.data.Dataset[dict[str, Any]]):
    """The samples of a data set of pairs, with names."""

    def __init__(self, split: Dataset, names: tuple[str, str]) -> None:
        self._split, self._names = split, names

    def __len__(self) -> int:
        return len(self._split.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(self._names, (self._split.x[index], self._split.y[index]), strict=True))


def _samples(split: Any, names: tuple[str, str]) -> Any:
    return _Columns(split, names) if isinstance(split, Dataset) else split


def _reports(module: str) -> bool:
    """True for the library's own reports to others."""
    return module.startswith("transformers.integrations.")
