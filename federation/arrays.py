"""Numbers as people have them, in lists, arrays of NumPy and tensors of PyTorch, as arrays."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = ArrayLike | Sequence[Any]


def numbers(values: Any) -> NDArray[Any]:
    """Numbers that people have, as an array: a sequence, an array, or tensors of PyTorch on any device.

    It may share the memory of `values`.

    Raises:
        ValueError: something else, such as text, rows of several lengths, or an array with masked elements.
    """
    try:
        array = np.asarray(detached(values))
    except (TypeError, ValueError, RuntimeError) as error:
        why = str(error).strip().partition(".")[0] or "it cannot be read"
        raise ValueError(f"got {type(values).__name__}, not numbers: {why}") from error
    if values is None:
        raise ValueError("got None, not numbers")
    if array.dtype.kind not in "biuf":
        of = {"O": "objects", "U": "text", "c": "complex values"}.get(array.dtype.kind, str(array.dtype))
        raise ValueError(f"got {type(values).__name__} of {of}, not numbers")
    return array


def vector(name: str, values: Any, length: int | None = None) -> NDArray[np.float64]:
    """Numbers as a vector, float64. Raises ValueError, with the name, for other values, or another length."""
    try:
        array: NDArray[np.float64] = numbers(values).astype(np.float64, copy=False)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if array.ndim != 1 or length not in (None, len(array)):
        needed = "a vector is" if length is None else f"{length} numbers, one for each row, are"
        raise ValueError(f"{name} has shape {array.shape}; {needed} needed")
    return array


def detached(values: Any) -> Any:
    """Tensors of PyTorch, alone or in a sequence, as arrays; anything else as it is.

    Raises:
        ValueError: an array with masked elements.
        RuntimeError, TypeError: tensors that have no numbers, or none that NumPy knows.
    """
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise ValueError("some of its elements are masked: leave these out, or fill them")
    if "torch" not in sys.modules:
        return values
    import torch  # noqa: PLC0415 - only where somebody has imported it

    if isinstance(values, torch.Tensor):
        dense = values if values.layout is torch.strided else values.to_dense()
        narrow = dense.is_floating_point() and dense.element_size() < torch.float32.itemsize
        return (dense.float() if narrow else dense).numpy(force=True)  # NumPy has no bfloat16
    if isinstance(values, list | tuple) and any(isinstance(item, torch.Tensor) for item in values):
        return [detached(item) for item in values]
    return values
