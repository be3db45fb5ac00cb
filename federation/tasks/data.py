"""The data of a task: where it is, and its samples. Needs neither NumPy nor torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from federation.spec.part import Part
from federation.tasks.errors import DataError
from federation.value_words import in_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Loading:
    """The reading of samples that are not in memory: by `workers` processes, or 0 for the trainer's own.

    With `pin`, they are read into memory from which a GPU copies faster.
    """

    workers: int = 0
    pin: bool = False


@dataclass(frozen=True)
class DataSource:
    """The source of a client's data: the owner's `--data`, or None for data that comes with the task; and its part.

    With `download`, a task may fetch a public data set into the directory. `loading` is the owner's choice.
    """

    directory: Path | None = None
    part: Part | None = None
    download: bool = False
    loading: Loading = Loading()


@dataclass(frozen=True, eq=False)
class Dataset:
    """The samples of one split, in memory: inputs of the model x (n, ...), targets of the objectives y (n, ...).

    Both are tensors of torch, or arrays of NumPy or pandas. The built-in trainer makes tensors of arrays.

    Raises:
        DataError: lengths that differ, or several parts in place of one array.
    """

    x: Any
    y: Any

    def __post_init__(self) -> None:
        if _length("x", self.x) != _length("y", self.y):
            raise DataError(f"{len(self.x)} samples but {len(self.y)} labels")

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Splits:
    """A client's data: its training, validation and test split.

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
        x: inputs of the model, (n, ...); a tensor of torch, or an array of NumPy or pandas.
        y: targets of the objectives, (n, ...), as x.
        labels: (n,) int64, the classes that shards and Dirichlet deal by, such as a pair of labels as one number; None
            if y are the classes.
        owners: the names of the natural owners of the data; empty if there are none.
        owner: (n,) int64, the owner of each sample, an index into `owners`.
        test: an official test part. With the scheme "natural" it is dealt to the same owners.
        groups: (n,) a key for each sample, such as the number of the patient: integers or strings. The samples of a key
            are in one split, and with one client of a simulation. None: each sample counts as independent.
        stratify: each split keeps the shares of the classes (`labels`, or y).

    Raises:
        DataError: lengths that differ, several parts in place of one array, owners that are unknown or have one name,
            or keys of groups that are no keys or stand in the official test part, too.
    """

    x: Any
    y: Any
    labels: "NDArray[np.int64] | None" = None
    owners: tuple[str, ...] = ()
    owner: "NDArray[np.int64] | None" = None
    test: "Pool | None" = None
    groups: "NDArray[Any] | Any" = None
    stratify: bool = False

    def __post_init__(self) -> None:
        _length("x", self.x)
        _length("y", self.y)
        for field in ("labels", "owner"):  # which may be lists, tensors or columns of pandas
            if getattr(self, field) is not None:
                object.__setattr__(self, field, _whole_numbers(field, getattr(self, field)))
        if self.groups is not None:
            object.__setattr__(self, "groups", _keys(self.groups))
        named = (("samples", self.x), ("labels to deal by", self.labels), ("owners", self.owner))
        for name, values in (*named, ("keys of groups", self.groups)):
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
        if self.groups is not None and self.test is not None and self.test.groups is not None:
            both = sorted(set(self.groups.tolist()) & set(self.test.groups.tolist()), key=str)
            if both:
                raise DataError(
                    f"{len(both)} of the pool's groups are in its official test part, too; the first is {both[0]!r}: "
                    "leave their samples out of one of the two"
                )

    def __len__(self) -> int:
        return len(self.y)


def _keys(groups: Any) -> "NDArray[Any]":
    """Keys of groups as an array of integers or strings, (n,). Raises DataError."""
    import numpy as np  # noqa: PLC0415

    keys = np.asarray(groups)
    if keys.dtype == object and all(isinstance(key, str) for key in keys.ravel()):
        keys = keys.astype(str)
    if keys.ndim != 1 or keys.dtype.kind not in "biuUS":
        raise DataError(
            f"groups of a pool is {in_words(groups)}; needed: a key for each sample, (n,), integers or strings. Where "
            "the key of a sample is not known, give it one of its own"
        )
    return keys


def _whole_numbers(name: str, values: Any) -> "NDArray[np.int64]":
    """A number for each sample. Raises DataError for other values."""
    import numpy as np  # noqa: PLC0415

    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        raise DataError(f"{name} of a pool is {in_words(array)}; needed: a whole number for each sample, (n,)")
    return array.astype(np.int64, copy=False)


def _length(name: str, values: Any) -> int:
    """The number of samples. Raises DataError if these are several parts, or a single value."""
    if isinstance(values, Mapping | tuple):
        raise DataError(
            f"{name} is {in_words(values)}; needed: one tensor or array (n, ...). Put the parts beside each other in "
            "it, and take them apart in the model or in losses()"
        )
    try:
        return len(values)
    except TypeError:
        sparse = ", which is sparse" if hasattr(values, "todense") else ""
        raise DataError(f"{name} is {in_words(values)}{sparse}; needed: a tensor or an array (n, ...)") from None
