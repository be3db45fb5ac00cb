"""What is learned: a model, this client's data, and named objectives.

A task is code that the owner of a machine chose to run there. It is loaded by name, from an installed package's entry
point (group `fedpareto.tasks`) or as `module:Class`, and never from bytes that arrived over the wire. Torch is imported
only when a model or data is asked for, so that a command can list tasks at once; a task whose trainer does not use
torch needs none.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from federation.owners_code import described
from federation.plugins import Offer, PluginError, Plugins

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from federation.metrics import Metric, MetricKind
    from federation.training.trainer import Trainer
    from federation.vectors import Layout

_BUILT_IN = {
    "adult": "federation.tasks.adult:Adult",
    "celeba": "federation.tasks.celeba:CelebA",
    "celeba-5": "federation.tasks.celeba:CelebA5",
    "cifar10": "federation.tasks.vision:Cifar10",
    "cifar10-fedfv": "federation.tasks.fedfv:Cifar10FedFV",
    "cifar10-mnist": "federation.tasks.pairs:Cifar10Mnist",
    "digits": "federation.tasks.digits:Digits",
    "emnist": "federation.tasks.vision:Emnist",
    "fashion-mnist": "federation.tasks.vision:FashionMnist",
    "fashion-mnist-3": "federation.tasks.fedfv:FashionMnist3",
    "femnist": "federation.tasks.femnist:Femnist",
    "mnist": "federation.tasks.vision:Mnist",
    "mnist-fashion": "federation.tasks.pairs:MnistFashion",
    "mnist-fedfv": "federation.tasks.fedfv:MnistFedFV",
    "multi-mnist": "federation.tasks.pairs:MultiMnist",
    "multi-mnist-fmol": "federation.tasks.pairs:MultiMnistFmol",
    "multi-mnist-fmol-256": "federation.tasks.pairs:MultiMnistFmol256",
    "multi-mnist-l1": "federation.tasks.pairs:MultiMnistL1",
    "qm9": "federation.tasks.qm9:Qm9",
    "river-flow": "federation.tasks.river_flow:RiverFlow",
    "river-flow-whole": "federation.tasks.river_flow:RiverFlowWhole",
    "shakespeare": "federation.tasks.shakespeare:Shakespeare",
    "two-digits": "federation.tasks.pairs:TwoDigits",
}


class TaskError(ValueError):
    """A task that cannot be used: not found, not a task, or with a model that a flat vector cannot carry."""


class DataError(Exception):
    """Data that is missing or malformed; the message names the expected path and where to get it."""


class PartError(ValueError):
    """A part of a data set that cannot be cut."""


_POSITIVE = r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,9})?"
_SCHEMES = {"iid": None, "natural": None, "shards": r"[1-9][0-9]{0,5}", "dirichlet": _POSITIVE}
_SIZES = {"equal": None, "lognormal": _POSITIVE}


@dataclass(frozen=True)
class Part:
    """Which part of one shared data set this client rehearses with. Members with data of their own need none.

    Attributes:
        index: 0 to count - 1.
        count: how many clients share the data set.
        scheme: "iid", "shards:S", "dirichlet:ALPHA" or "natural"; see `federation.tasks.partition.partition`.
        seed: clients with the same seed, count, scheme and sizes hold disjoint parts.
        sizes: "equal", or for iid and dirichlet "lognormal:SIGMA" (see `federation.tasks.partition.quotas`).

    Raises:
        PartError: an index or a count out of range, or an unknown scheme.
    """

    index: int
    count: int
    scheme: str = "iid"
    seed: int = 0
    sizes: str = "equal"

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise PartError(f"part {self.index + 1} of {self.count}: parts count from 1/{max(self.count, 1)}")
        if self.seed < 0:
            raise PartError(f"the seed of a partition is not negative; got {self.seed}")
        if not _known(self.scheme, _SCHEMES):
            raise PartError(
                f"unknown scheme {self.scheme!r}: use iid, shards:S (S >= 1), dirichlet:ALPHA (ALPHA > 0) or natural"
            )
        if not _known(self.sizes, _SIZES):
            raise PartError(f"unknown sizes {self.sizes!r}: use equal or lognormal:SIGMA (SIGMA > 0)")
        if self.sizes != "equal" and self.scheme.partition(":")[0] not in ("iid", "dirichlet"):
            raise PartError(f"sizes {self.sizes!r} go with iid and dirichlet; {self.scheme!r} has sizes of its own")

    @classmethod
    def parse(cls, text: str, scheme: str = "iid", seed: int = 0, sizes: str = "equal") -> "Part":
        """Reads "3/8", the third of eight parts, counted from 1. Raises PartError."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None:
            raise PartError(f"{text!r} is no part: write 3/8 for the third of eight")
        return cls(int(match[1]) - 1, int(match[2]), scheme, seed, sizes)


def _known(text: str, forms: dict[str, str | None]) -> bool:
    """Whether a text is one of these kinds, followed by an argument of its form where it takes one."""
    kind, colon, argument = text.partition(":")
    form = forms.get(kind)
    return kind in forms and (re.fullmatch(form, argument) is not None if form else not colon)


@dataclass(frozen=True)
class Loading:
    """How samples that are not in memory are read: by `workers` processes, or 0 for the trainer's own.

    With `pin`, they are read into memory that a GPU copies from faster.
    """

    workers: int = 0
    pin: bool = False


@dataclass(frozen=True)
class DataSource:
    """Where a client's data is: the owner's `--data`, or None for data that comes with the task; and which part of it.

    With `download`, a task may fetch a public data set into the directory. `loading` is the owner's choice.
    """

    directory: Path | None = None
    part: Part | None = None
    download: bool = False
    loading: Loading = Loading()


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of one split, in memory: inputs of the model x (n, ...), targets of the objectives y (n, ...).

    Both are tensors of torch, or arrays of NumPy.
    """

    x: Any
    y: Any

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} samples but {len(self.y)} labels")

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Splits:
    """A client's data: what it trains on, and what it keeps back.

    A split that does not fit into memory is a map-style torch.utils.data.Dataset, whose items are pairs of x and y.
    """

    train: Any
    validation: Any
    test: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.train, self.validation, self.test))


@dataclass(frozen=True, eq=False)
class Pool:
    """Every sample of a data set, before it is dealt to clients.

    Attributes:
        x: inputs of the model, (n, ...); a tensor of torch, or an array of NumPy.
        y: targets of the objectives, (n, ...), as x.
        labels: (n,) int64, the classes that shards and Dirichlet deal by, such as a pair of labels as one number; None
            if y are the classes.
        owners: the names of the natural owners of the data; empty if there are none.
        owner: (n,) int64, the owner of each sample, an index into `owners`.
        test: an official test part. With the scheme "natural" it is dealt to the same owners.

    Raises:
        DataError: lengths that differ, or owners that are unknown or have one name.
    """

    x: Any
    y: Any
    labels: "NDArray[np.int64] | None" = None
    owners: tuple[str, ...] = ()
    owner: "NDArray[np.int64] | None" = None
    test: "Pool | None" = None

    def __post_init__(self) -> None:
        for name, values in (("samples", self.x), ("labels to deal by", self.labels), ("owners", self.owner)):
            if values is not None and len(values) != len(self.y):
                raise DataError(f"{len(values)} {name} but {len(self.y)} labels")
        if bool(self.owners) != (self.owner is not None) or len(set(self.owners)) < len(self.owners):
            raise DataError("a pool names each owner once, and says of each sample whose it is, or does neither")
        if (
            self.owner is not None
            and len(self.owner)
            and not 0 <= self.owner.min() <= self.owner.max() < len(self.owners)
        ):
            raise DataError(f"a sample has owner {self.owner.min()} or {self.owner.max()} of {len(self.owners)}")
        if self.test is not None and self.test.owners != self.owners:
            raise DataError("the test part of a pool has other owners than the pool")

    def __len__(self) -> int:
        return len(self.y)


class Task:
    """What a federation learns. Subclass it, define the model and the data, and name the class to the worker.

    Attributes:
        name: what the federation calls the task; set by `task`.
        objectives: the names of the losses. A parameter called `heads.NAME....` belongs to the objective NAME alone;
            all others are the encoder that all objectives share.
        evaluation_batch: samples in one forward pass where no gradient is needed.
        trainer: trains the task unless a member names another one: the class, or its name.
    """

    name: str = ""
    objectives: tuple[str, ...] = ("loss",)
    evaluation_batch: int = 1000
    trainer: "type[Trainer] | str" = "torch"

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

        return deal(self.pool(source), source.part)

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """The mean loss of a batch for each objective, of what the model returned and targets (n, ...).

        By default, the cross-entropy of logits (n, C) with classes (n,).
        """
        from torch.nn.functional import cross_entropy  # noqa: PLC0415

        return {"loss": cross_entropy(output, y)}

    def augment(self, x: "torch.Tensor") -> "torch.Tensor":
        """A training minibatch (n, ...), varied at random by torch's global generator; of the same shape."""
        return x

    def correct(self, output: Any, y: "torch.Tensor") -> "torch.Tensor | dict[str, torch.Tensor] | None":
        """Which samples of a batch are right, (n,) of bool; None where accuracy means nothing (regression).

        A task of several objectives may return it for each of them; a sample with several labels may be right by a
        share.
        """
        right: torch.Tensor = output.argmax(dim=1) == y
        return right

    def metrics(self) -> "Mapping[str, Metric]":
        """The task's own metrics by name, made afresh; they are measured when a model is evaluated.

        A name has lower-case letters, digits and hyphens; "loss", "accuracy" and "samples" are taken.
        """
        return {}


def available() -> tuple[Offer, ...]:
    """The built-in tasks and those of installed packages, by name. Imports none of them."""
    # No package takes the place of a built-in task: the name that an owner allowed keeps its meaning.
    built_in = (Offer(name, origin, "fedpareto") for name, origin in _BUILT_IN.items())
    return tuple(sorted((*built_in, *_TASKS.offers()), key=lambda offer: (offer.name, offer.package)))


def task(name: str) -> Task:
    """Loads a task that the owner of this machine named: one of `available`, or `module:Class` on Python's path.

    Raises:
        TaskError: no such task, or its code raises an exception, or it is not a `Task`.
    """
    try:
        kind = _TASKS.find(_BUILT_IN.get(name, name))
    except PluginError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "torch":
            raise error.__cause__ from None
        raise TaskError(str(error)) from error.__cause__
    if kind.model is Task.model and kind.initial is Task.initial:
        raise TaskError(f"task {name!r}: {kind.__module__}:{kind.__name__} defines neither model nor initial")
    with task_code(name, f"making {kind.__module__}:{kind.__name__} without arguments"):
        loaded: Task = kind()
    loaded.name = name
    return loaded


@contextmanager
def task_code(name: str, doing: str) -> Iterator[None]:
    """Turns an error of a task's code into a TaskError that says where it was raised.

    `doing` is what the task is asked for, such as "loading its data". A missing torch is passed on as it is.
    """
    try:
        yield
    except (TaskError, DataError, PartError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise
        raise TaskError(f"task {name!r}: {doing} failed: {described(error)}") from error


def metrics_of(task: Task) -> "tuple[MetricKind, ...]":
    """What the task's own metrics are, in its order.

    Raises:
        TaskError: its code raised an exception, or one that cannot be used.
    """
    from federation.metrics import kinds  # noqa: PLC0415

    with task_code(task.name, "making its metrics"):
        return kinds(task.metrics())


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
