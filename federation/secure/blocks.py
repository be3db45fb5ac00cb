"""Vectors of d coordinates in blocks, so that memory does not grow with d."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from federation.secure.fields import Reals

BLOCK = 1 << 16
"""Coordinates of a block: the computation of one fits into a core's cache."""

Blocks = Iterable[NDArray[np.floating[Any]]]
Scalar = TypeVar("Scalar", bound=np.generic)


def blocks(vector: NDArray[Scalar]) -> Iterator[NDArray[Scalar]]:
    """Consecutive parts of a vector (d,), which may be mapped from a file."""
    return (vector[start : start + BLOCK] for start in range(0, len(vector), BLOCK))


def norm(vector: Blocks) -> float:
    """The length of a vector, in float64."""
    # In float64: the square of a finite float32 can overflow, and a good vector would count as a failed computation.
    return float(np.sqrt(sum(float(np.square(block, dtype=np.float64).sum()) for block in vector)))


def unit(vector: Blocks, length: float) -> Iterator[Reals]:
    """The blocks of a vector divided by its length, in float64."""
    return (block / np.float64(length) for block in vector)


def scaled(vector: Blocks, factor: float) -> Iterator[Reals]:
    """The blocks of a vector times a number, in float64."""
    return (block * np.float64(factor) for block in vector)
