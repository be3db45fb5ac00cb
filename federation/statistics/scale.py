"""The scale of a layer Standardise: the means and deviations of its columns, by the result of a described round."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import Error
from federation.statistics.shown import FEWER

FORMATS = (1,)  # of the results that are read here
_SMALLEST = float(np.finfo(np.float32).tiny)  # a smaller deviation is none in float32
_LARGEST = float(np.finfo(np.float32).max)
_ENDS = 2  # of a range


class ScaleError(Error, ValueError):
    """A layer Standardise cannot be filled from a result; the message names the column."""


@dataclass(frozen=True)
class ScaleLayer:
    """The layer Standardise of a task's model.

    Attributes:
        name: of the layer in the model, such as "0".
        columns: the names of the columns, in the order of the features.
    """

    name: str
    columns: tuple[str, ...]

    @property
    def mean(self) -> str:
        """The name of the tensor with the means."""
        return f"{self.name}.mean"

    @property
    def deviation(self) -> str:
        """The name of the tensor with the deviations."""
        return f"{self.name}.deviation"

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of both tensors."""
        return self.mean, self.deviation


@dataclass(frozen=True, eq=False)
class InputScale:
    """What the inputs x of a model are standardised with: (x - mean) / deviation.

    Attributes:
        mean, deviation: one for each column, (n,) float32, finite; deviations are above 0.
    """

    mean: NDArray[np.float32]
    deviation: NDArray[np.float32]

    def of(self, layer: ScaleLayer) -> dict[str, NDArray[np.float32]]:
        """The tensors of a layer, by name."""
        return {layer.mean: self.mean, layer.deviation: self.deviation}


def scale_of(document: bytes, columns: Sequence[str]) -> InputScale:
    """The scale of the columns with these names, which the result has first and in this order.

    Further columns of the result, such as targets, are not used. A column whose deviation is 0 gets 1, and one of
    classes the mean 0 and the deviation 1. One whose mean is not shown, such as one whose values are all alike, gets
    the middle and half the width of its range. The submitter of the run of statistics chooses that, so it has to hold
    values: the result has to show some inside, and not more than half outside.

    Raises:
        ScaleError: the document is no result; it has other columns; a column shows no mean and has no range; its range
            does not hold its values; or its numbers are not finite in float32.
    """
    described = _columns_of(document)
    names = [str(column.get("name")) for column in described]
    for at, wanted in enumerate(columns):
        if at >= len(names):
            raise ScaleError(f"the result has {len(names)} columns, and the model standardises {len(columns)}")
        if names[at] != wanted:
            where = f"; it has {wanted!r} as column {names.index(wanted) + 1}" if wanted in names else ""
            raise ScaleError(f"column {at + 1} of the model is {wanted!r}, and that of the result {names[at]!r}{where}")
    pairs = [_pair(column) for column in described[: len(columns)]]
    mean, deviation = (np.array([pair[place] for pair in pairs], dtype=np.float32) for place in (0, 1))
    return InputScale(mean, deviation)


def _columns_of(document: bytes) -> list[dict[str, Any]]:
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise ScaleError(f"the result is no JSON document: {str(error)[:200]}") from None
    columns = parsed.get("columns") if isinstance(parsed, dict) else None
    if not isinstance(columns, list) or not all(isinstance(column, dict) for column in columns):
        raise ScaleError("the document is no result of statistics: it has no columns")
    if parsed.get("format") not in FORMATS:
        raise ScaleError(f"the result has the format {str(parsed.get('format'))[:20]}, which this version cannot read")
    return columns


def _pair(column: dict[str, Any]) -> tuple[float, float]:
    """The mean and the deviation of a column; without them, the middle and half the width of its range."""
    name, count = str(column.get("name"))[:80], column.get("count")
    if column.get("classes"):
        return 0.0, 1.0
    mean, deviation = (_number(column.get(key)) for key in ("mean", "deviation"))
    if mean is None or deviation is None:
        ends = column.get("range")
        low, high = (_number(end) for end in ends) if isinstance(ends, list) and len(ends) == _ENDS else (None, None)
        if low is None or high is None or not low < high:
            raise ScaleError(
                f"column {name!r} shows no mean in the result (values: {str(count)[:40]}), and has no range: its "
                "numbers are few, or all alike. Give it a range (Task.columns), or leave it out of the task"
            )
        if not _holds_values(column):
            raise ScaleError(
                f"column {name!r} shows no mean in the result, and no values inside its range {low!r} to {high!r} "
                f"(missing: {_count(column, 'missing')}, outside: {_count(column, 'outside')}): it has none or few, "
                "or they are elsewhere. Describe it with a range that holds its values, or leave it out of the task"
            )
        mean, deviation = low / 2 + high / 2, high / 2 - low / 2
    if _is_mostly_outside(column):
        raise ScaleError(
            f"column {name!r}: more than half of its values are outside its range (values: {_count(column, 'values')}, "
            f"outside: {_count(column, 'outside')}). Describe it with a range that holds them"
        )
    if not (abs(mean) <= _LARGEST and 0 <= deviation <= _LARGEST):
        raise ScaleError(f"column {name!r}: mean {mean:g} and deviation {deviation:g} are not finite in float32")
    return mean, deviation if deviation >= _SMALLEST else 1.0


def _is_mostly_outside(column: dict[str, Any]) -> bool:
    """True if a column shows that more than half of its values are outside its range."""
    outside, values = (_number(column.get(key)) for key in ("outside", "values"))
    return outside is not None and 2 * outside > (values or 0) - (_number(column.get("missing")) or 0)


def _holds_values(column: dict[str, Any]) -> bool:
    """True if a column that shows no mean shows, by the counts that it hides, that its range holds values.

    A member with most of its values outside tells the column as missing. `described` hides bins before it hides the
    missing values and those outside: where it hides these, and does not say that they are few, they may be all values.
    """
    missing, outside, cells = (column.get(key) for key in ("missing", "outside", "counts"))
    if outside != FEWER and _number(outside) is None:
        return False
    if isinstance(cells, list) and any(cell != FEWER for cell in cells):
        return True
    absent, values = _number(missing), _number(column.get("values"))
    return missing == FEWER or (absent is not None and values is not None and absent < values)


def _count(column: dict[str, Any], key: str) -> str:
    return str(column.get(key))[:20]


def _number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def check_scale(tensors: Mapping[str, NDArray[np.float32]], document: bytes, layer: ScaleLayer | None = None) -> None:
    """Checks the fixed tensors of a model against the document of a result.

    `layer` is that of the task's model; without one, as where the task is not known, the names of columns are not
    compared, and the tensors are those whose names end in ".mean" and ".deviation".

    Raises:
        ScaleError: they are not what the result gives; the message names the tensor and the number.
    """
    if layer is None:
        names = [name[: -len(".mean")] for name in tensors if name.endswith(".mean")]
        names = [name for name in names if f"{name}.deviation" in tensors]
        if len(names) != 1:
            raise ScaleError(
                f"the fixed tensors {', '.join(tensors)[:200]} hold {len(names)} pairs .mean and .deviation"
            )
        layer = ScaleLayer(names[0], ())
        columns = [str(column.get("name")) for column in _columns_of(document)][: tensors[layer.mean].size]
    else:
        columns = list(layer.columns)
    for name, wanted in scale_of(document, columns).of(layer).items():
        given = tensors.get(name)
        if given is None or given.shape != wanted.shape:
            held = "missing" if given is None else f"of shape {list(given.shape)}"
            raise ScaleError(f"{name!r} is {held}; the result gives {len(wanted)} numbers")
        if (differs := np.flatnonzero(given != wanted)).size:
            at = int(differs[0])
            raise ScaleError(f"number {at + 1} of {name!r} is {given[at]:.9g}, and the result gives {wanted[at]:.9g}")
