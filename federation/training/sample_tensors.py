"""Samples as people have them, as tensors for the built-in trainer: arrays of NumPy, tables and columns of pandas.

Tensors stay as they are: a model may take bytes, or convert its input by itself.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from federation.spec.computation import SPLITS
from federation.tasks import DataError, Dataset, Pool, Splits
from federation.value_words import dtype_name, in_words

# Models are float32, and PyTorch has few kernels for the other types.
_INSTEAD: dict[Any, type[np.generic]] = {
    np.dtype(np.float64): np.float32,
    np.dtype(np.longdouble): np.float32,
    np.dtype(np.complex128): np.complex64,
    np.dtype(np.uint16): np.int32,
    np.dtype(np.uint32): np.int64,
    np.dtype(np.uint64): np.int64,
}
_SHOWN = 6  # columns


def pool_of_tensors(pool: Pool) -> Pool:
    """The same pool, with tensors in place of arrays. Raises DataError as of `as_tensor`."""
    test = None if pool.test is None else pool_of_tensors(pool.test)
    return dataclasses.replace(pool, x=as_tensor(pool.x, "x"), y=as_tensor(pool.y, "y"), test=test)


def splits_of_tensors(splits: Splits) -> Splits:
    """The same splits, with tensors in place of arrays in those in memory.

    Raises:
        DataError: these are no splits; or as of `as_tensor`.
    """
    if not isinstance(splits, Splits):
        raise DataError(f"load() returned {in_words(splits)}; needed: Splits(train, validation, test)")
    return Splits(*(_of_tensors(split, name) for split, name in zip(splits, SPLITS, strict=True)))


def _of_tensors(split: Any, name: str) -> Any:
    if not isinstance(split, Dataset):
        return split
    return Dataset(as_tensor(split.x, f"x of the {name} split"), as_tensor(split.y, f"y of the {name} split"))


def as_tensor(values: Any, name: str) -> Tensor:
    """An array as a tensor; float64 becomes float32, and a type that PyTorch hardly knows one that it knows.

    Raises:
        DataError: the values are neither a tensor nor an array of numbers; `name` is that of the values.
    """
    if isinstance(values, Tensor):
        if values.layout is not torch.strided or values.is_nested:
            kind = "nested" if values.is_nested else "sparse"
            raise DataError(f"{name} is a {kind} tensor; needed: a dense one, as to_dense() makes it")
        return values
    array = _array(values, name)
    native = array.dtype.newbyteorder("=")
    kept = np.ascontiguousarray(array, dtype=_INSTEAD.get(native, native)).reshape(array.shape)
    return torch.from_numpy(kept if kept.flags.writeable else kept.copy())


def _array(values: Any, name: str) -> NDArray[Any]:
    """An array of numbers."""
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(f"{name} is a masked array, whose mask would be lost; needed: an array, as filled(VALUE) makes")
    if hasattr(values, "todense"):  # of SciPy
        raise DataError(f"{name} is sparse, {in_words(values)}; needed: a dense array, as toarray() makes it")
    if not hasattr(values, "__array__"):
        raise DataError(f"{name} is {in_words(values)}; needed: a tensor, or an array of NumPy or pandas")
    array = np.asarray(values)
    if array.dtype == object and hasattr(values, "dtypes"):
        array = _table(values, name)
    if array.dtype.kind in "biufc":
        return array
    first = array.reshape(-1)[0] if array.size else None
    remedy = (
        ". Number the classes from 0, in the same order at every member: [NAMES.index(label) for label in y]"
        if isinstance(first, str | bytes)
        else ""
    )
    example = f", such as {str(first)[:20]!r}" if array.size else ""
    raise DataError(f"{name} is {in_words(values)}{example}; needed: numbers{remedy}")


def _table(values: Any, name: str) -> NDArray[Any]:
    """A table of pandas whose columns differ in type, or a column with missing values; these are NaN."""
    if not hasattr(values, "columns"):
        numbers = getattr(values.dtype, "kind", "O") in "biuf"
        array: NDArray[Any] = values.to_numpy(dtype=np.float64, na_value=np.nan) if numbers else np.asarray(values)
        return array
    types = zip(values.columns, values.dtypes, strict=True)
    if others := [
        f"{column} ({dtype_name(kind)})" for column, kind in types if getattr(kind, "kind", "O") not in "biuf"
    ]:
        raise DataError(
            f"{name} is {in_words(values)} with columns that are not numbers: {', '.join(others[:_SHOWN])}. Leave them "
            "out, or number their values in the same way at every member"
        )
    array = values.to_numpy(dtype=np.float64, na_value=np.nan)
    return array
