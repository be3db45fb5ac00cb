"""Tasks: a model, this client's data, and named objectives.

A task is code that the owner of a machine chose to run there. It is loaded by name, from an installed package's entry
point (group `fedpareto.tasks`) or as `module:Class`, and never from bytes that arrived over the wire. Torch is imported
only when a model or data is asked for, so that a command can list tasks at once; a task whose trainer does not use
torch needs none.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from federation.plugins import Offer, PluginAbsent, PluginError, Plugins
from federation.spec.part import Part, PartError
from federation.statistics.data_columns import Column
from federation.tasks.classification import cross_entropy, right_samples
from federation.tasks.data import Dataset, DataSource, Loading, Pool, Splits
from federation.tasks.errors import DataError, LossError, TaskAbsent, TaskError, task_code
from federation.value_words import in_words

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from federation.spec.run_spec import RunSpec
    from federation.spec.task_metrics import Metric, MetricKind
    from federation.statistics.scale import ScaleLayer
    from federation.vectors import Layout

__all__ = [
    "Column",
    "DataError",
    "DataSource",
    "Dataset",
    "Loading",
    "LossError",
    "Part",
    "PartError",
    "Pool",
    "Splits",
    "Task",
    "TaskAbsent",
    "TaskError",
    "available",
    "buffers_of",
    "cautions_of",
    "columns_of",
    "initial_model",
    "metrics_of",
    "pool_of",
    "scale_layer_of",
    "task",
    "task_code",
    "task_of",
]

_BUILT_IN = {
    "adult": "federation.tasks.adult:Adult",
    "celeba": "federation.tasks.celeba:CelebA",
    "celeba-5": "federation.tasks.celeba:CelebA5",
    "cifar10": "federation.tasks.vision:Cifar10",
    "cifar10-fedfv": "federation.tasks.fedfv_tasks:Cifar10FedFV",
    "cifar10-mnist": "federation.tasks.pairs:Cifar10Mnist",
    "digits": "federation.tasks.digits:Digits",
    "emnist": "federation.tasks.vision:Emnist",
    "fashion-mnist": "federation.tasks.vision:FashionMnist",
    "fashion-mnist-3": "federation.tasks.fedfv_tasks:FashionMnist3",
    "femnist": "federation.tasks.femnist:Femnist",
    "mnist": "federation.tasks.vision:Mnist",
    "mnist-fashion": "federation.tasks.pairs:MnistFashion",
    "mnist-fedfv": "federation.tasks.fedfv_tasks:MnistFedFV",
    "mnist-fedfv-standardised": "federation.tasks.fedfv_tasks:MnistFedFVStandardised",
    "multi-mnist": "federation.tasks.pairs:MultiMnist",
    "multi-mnist-fmol": "federation.tasks.pairs:MultiMnistFmol",
    "multi-mnist-fmol-256": "federation.tasks.pairs:MultiMnistFmol256",
    "multi-mnist-l1": "federation.tasks.pairs:MultiMnistL1",
    "qm9": "federation.tasks.qm9:Qm9",
    "river-flow": "federation.tasks.river_flow:RiverFlow",
    "river-flow-whole": "federation.tasks.river_flow:RiverFlowWhole",
    "scanners": "federation.tasks.scanners:Scanners",
    "shakespeare": "federation.tasks.shakespeare:Shakespeare",
    "two-digits": "federation.tasks.pairs:TwoDigits",
    "two-digits-scaled": "federation.tasks.pairs:TwoDigitsScaled",
}


class Task:
    """The model, the data and the losses that a federation learns: subclass it, and name the class to the worker.

    Attributes:
        name: of the task in the federation; set by `task`.
        objectives: the names of the losses. A parameter called `heads.NAME....` belongs to the objective NAME alone;
            all others are the encoder that all objectives share.
        evaluation_batch: samples in one forward pass where no gradient is needed.
        trainer: trains the task unless a member names another one: a class derived from
            `Trainer`, or its name.
    """

    name: str = ""
    objectives: tuple[str, ...] = ("loss",)
    evaluation_batch: int = 1000
    trainer: type[Any] | str = "torch"

    def model(self) -> "torch.nn.Module":
        """A fresh model on the CPU: the same parameters in the same order at every member.

        Its trainable parameters are float32. What it keeps besides, such as BatchNorm's running statistics, follows
        `parameters.buffers` of the run. Random initial values may come from torch's global generator, which is seeded
        before the call. A task with another trainer than torch may define `initial` instead.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither model nor initial")

    def initial(self, seed: int) -> "Mapping[str, NDArray[Any]]":
        """The tensors of the model that a run starts from, by name; the same for the same seed.

        Their names, shapes and order do not depend on the seed. By default, the parameters and buffers of `model`.
        """
        from federation.tasks.parameters import build, values  # noqa: PLC0415

        return values(build(self, seed))

    def buffers(self) -> tuple[str, ...]:
        """The names of the tensors of `initial` that are buffers: no gradient changes them."""
        if type(self).initial is not Task.initial:
            return ()
        from federation.tasks.parameters import buffers, build  # noqa: PLC0415

        return tuple(buffers(build(self)))

    def pool(self, source: DataSource) -> Pool:
        """All the data at the source, before a part of it is dealt; `source.part` is ignored.

        Raises:
            DataError: missing or malformed.
            NotImplementedError: the task defines `load` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither pool nor load")

    def load(self, source: DataSource) -> Splits:
        """This client's data: its part of the pool, or all of it, cut into train, validation and test.

        Raises:
            DataError: missing or malformed, or too little for this number of clients.
        """
        from federation.tasks.partition import deal  # noqa: PLC0415

        return deal(_checked(self, self.pool(source)), source.part)

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """The mean loss of a batch for each objective, from the model's output and targets (n, ...).

        By default, the cross-entropy of logits (n, C) with classes (n,), of bool or any type of integers.
        """
        return {"loss": cross_entropy(self.name, output, y)}

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        """A training minibatch (n, ...), varied at random by torch's global generator; of the same shape."""
        return x

    def correct(self, output: Any, y: "torch.Tensor") -> "torch.Tensor | dict[str, torch.Tensor] | None":
        """Marks the right samples of a batch, (n,) of bool; None if accuracy is undefined (regression).

        A task of several objectives may return it for each of them; a sample with several labels may be right by a
        share.
        """
        return right_samples(self.name, output, y)

    def metrics(self) -> "Mapping[str, Metric]":
        """The task's own metrics by name, made afresh; they are measured when a model is evaluated.

        A name has lower-case letters, digits and hyphens; "loss", "accuracy" and "samples" are taken.
        """
        return {}

    def columns(self) -> tuple[Column, ...]:
        """The columns of the data for statistics: those of x, then those of y, with ranges and classes.

        By default none are named: a table of pandas has its own names, other data "x0", "x1", ..., of images "x0" for
        the first channel, and "y", or "y0", ....
        """
        return ()

    def cautions(self, spec: "RunSpec") -> tuple[str, ...]:
        """What the author of a run should know before it begins; told when it is submitted or simulated."""
        return ()


def available() -> tuple[Offer, ...]:
    """The built-in tasks and those of installed packages, by name. Imports none of them."""
    # No package takes the place of a built-in task: the name that an owner allowed keeps its meaning.
    built_in = (Offer(name, origin, "fedpareto") for name, origin in _BUILT_IN.items())
    return tuple(sorted((*built_in, *_TASKS.offers()), key=lambda offer: (offer.name, offer.package)))


def task(name: str) -> Task:
    """Loads a task that the owner of this machine named: one of `available`, or `module:Class` on Python's path.

    Raises:
        TaskAbsent: there is no such task on this machine, or a module that it imports is missing.
        TaskError: its code raises an exception, or it is not a `Task`.
    """
    try:
        kind = _TASKS.find(_BUILT_IN.get(name, name))
    except PluginError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "torch":
            raise error.__cause__ from None
        absent = isinstance(error, PluginAbsent) or isinstance(error.__cause__, ModuleNotFoundError)
        raise (TaskAbsent if absent else TaskError)(str(error)) from error.__cause__
    return task_of(kind, name)


def task_of(kind: type[Task], name: str) -> Task:
    """The task that a class makes, under a name in the federation.

    Raises:
        TaskError: its code raises an exception, or it makes no model.
    """
    if kind.model is Task.model and kind.initial is Task.initial:
        raise TaskError(f"task {name!r}: {kind.__module__}:{kind.__name__} defines neither model nor initial")
    with task_code(name, f"making {kind.__module__}:{kind.__name__} without arguments"):
        loaded: Task = kind()
    loaded.name = name
    return loaded


def pool_of(task: Task, source: DataSource) -> Pool:
    """All the data of a task at a source.

    Raises:
        DataError: missing or malformed.
        TaskError: its code raised an exception, or returned something else.
    """
    with task_code(task.name, "loading its data"):
        return _checked(task, task.pool(source))


def _checked(task: Task, pool: object) -> Pool:
    if not isinstance(pool, Pool):
        raise TaskError(f"task {task.name!r}: pool() returned {in_words(pool)}; needed: Pool(x, y)")
    return pool


def metrics_of(task: Task) -> "tuple[MetricKind, ...]":
    """The kinds of the task's own metrics, in its order.

    Raises:
        TaskError: its code raised an exception, or a metric cannot be used.
    """
    from federation.spec.task_metrics import kinds  # noqa: PLC0415

    with task_code(task.name, "making its metrics"):
        return kinds(task.metrics())


def cautions_of(task: Task, spec: "RunSpec") -> tuple[str, ...]:
    """The task's warnings about a run. Raises TaskError: its code raised an exception."""
    with task_code(task.name, "asking it for cautions"):
        return tuple(task.cautions(spec))


def columns_of(task: Task) -> tuple[Column, ...]:
    """The columns that a task names. Raises TaskError: its code raised an exception, or returned something else."""
    with task_code(task.name, "naming its columns"):
        columns = tuple(task.columns())
    if wrong := [column for column in columns if not isinstance(column, Column)]:
        raise TaskError(f"task {task.name!r}: columns() returned {in_words(wrong[0])}; needed: Column(name=...)")
    return columns


def buffers_of(task: Task) -> tuple[str, ...]:
    """The names of the task's buffers. Raises TaskError: its code raised an exception."""
    with task_code(task.name or type(task).__name__, "naming its buffers"):
        return tuple(task.buffers())


def scale_layer_of(task: Task) -> "ScaleLayer | None":
    """The layer Standardise of the task's model; None without one.

    Raises:
        TaskError: its code raised an exception, or the model has several.
    """
    if type(task).initial is not Task.initial:
        return None
    from federation.tasks.parameters import build, scale_layer  # noqa: PLC0415

    model = build(task)
    with task_code(task.name or type(task).__name__, "finding its layer Standardise"):
        return scale_layer(model)


_TASKS: Plugins[Task] = Plugins("task", "fedpareto.tasks", Task, "fedpareto.Task", _BUILT_IN)


def initial_model(task: Task, seed: int) -> "tuple[Layout, NDArray[np.float32]]":
    """The model that a run starts from, as its layout and vector (d,); the same for the same task and seed.

    Raises:
        TaskError: a tensor cannot be in a flat vector.
    """
    import numpy as np  # noqa: PLC0415

    from federation.vectors import Layout, Tensor  # noqa: PLC0415

    with task_code(task.name or type(task).__name__, "making its initial model"):
        values = {name: np.asarray(value, dtype=np.float32) for name, value in task.initial(seed).items()}
        layout = Layout(tuple(Tensor(name, value.shape) for name, value in values.items()))
    if wrong := [name for name, value in values.items() if not np.isfinite(value).all()]:
        raise TaskError(f"task {task.name!r}: the initial values of {wrong[0]} are not finite")
    return layout, layout.join(values)
