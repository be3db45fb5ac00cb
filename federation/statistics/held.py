"""The columns of a data set in memory, by name: the features of a table or the channels of images, then the targets."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.statistics.data_columns import Column, ColumnError
from federation.value_words import in_words

_TABLE = 2  # dimensions: samples and features


class HeldData(ABC):
    """The samples of a client."""

    @property
    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """The columns that the task names; none where the data name them."""

    @abstractmethod
    def parts(self, split: str) -> Iterator[tuple[Any, Any]]:
        """The samples of a split, some at a time: inputs x (n, ...) and targets y (n, ...)."""


def held(x: Any, y: Any, named: Sequence[Column] = ()) -> dict[str, Any]:
    """The columns of inputs x (n, ...) and targets y (n, ...), each (n,), or (n, ...) of a channel; not yet read.

    `named` are those of the task, in the order of the features and then the targets. Without them, a table of pandas
    has its own names, and other data `x0`, `x1`, ..., of images `x0` for the first channel, and `y`, or `y0`, ....

    Raises:
        ColumnError: the task names more or fewer columns than the data have, or one name is there twice.
    """
    features, targets = list(_columns("x", x)), list(_columns("y", y))
    found = [*features, *targets]
    if named and len(named) != len(found):
        raise ColumnError(
            f"the task names {len(named)} columns, and the data have {len(features)} of x and {len(targets)} of y"
        )
    names = [column.name for column in named] or [name for name, _ in found]
    if len(set(names)) < len(names):
        raise ColumnError(f"column {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return dict(zip(names, (values for _, values in found), strict=True))


def numbers(name: str, values: Any) -> NDArray[np.float64]:
    """The numbers of a column, missing ones as NaN. Raises ColumnError: they are text, or no real numbers."""
    try:
        array = np.asarray(values)
        if array.dtype == object or array.dtype.kind not in "biuf":  # columns of pandas with its own missing values
            kind = getattr(getattr(values, "dtype", None), "kind", "O")
            if kind not in "biuf":
                raise _no_numbers(name, values)
            array = values.to_numpy(dtype=np.float64, na_value=np.nan)
        return array.astype(np.float64, copy=False)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ColumnError):
            raise
        raise _no_numbers(name, values) from error


def chosen(columns: Sequence[Column], data: Mapping[str, Any]) -> Iterator[tuple[Column, NDArray[np.float64]]]:
    """The numbers of some columns of a data set. Raises ColumnError: it has no column of this name, or no numbers."""
    if missing := [column.name for column in columns if column.name not in data]:
        absent, some = f"there is no column {missing[0]!r}", ", ".join([*data][:6])
        raise ColumnError(f"{absent}; the data have {len(data)}: {some}", wire=absent)
    for column in columns:
        yield column, numbers(column.name, data[column.name])


def _no_numbers(name: str, values: Any) -> ColumnError:
    text = f"column {name!r} is {in_words(values)}, such as text; needed: numbers"
    return ColumnError(text, wire=f"column {name!r} holds no numbers")


def _columns(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(values, "columns") and hasattr(values, "iloc"):  # a table of pandas
        for number, name in enumerate(values.columns):
            yield str(name), values.iloc[:, number]
        return
    shape = tuple(values.shape)
    if len(shape) < _TABLE:
        name = getattr(values, "name", None)  # of a column of pandas
        yield (name if isinstance(name, str) and name else prefix), values
        return
    for number in range(shape[1]):
        yield f"{prefix}{number}", values[:, number]
