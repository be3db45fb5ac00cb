"""Tensors without names whose order is wrong, where their values show it."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 32  # elements, so that two tensors do not look alike by chance
_COMPARED = 1000  # elements of a tensor
_ALIKE = 0.5


def exchanged(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> tuple[str, str] | None:
    """Two tensors of one shape, of which the second, before a training, is much like the first after it.

    It compares distances: from a tensor after the training to another one before it, with that to itself before, and
    with the spread of the other one. Tensors with fewer than 32 elements, and constant ones, look like no other.

    Returns:
        The names of both; None if there are none.
    """
    groups = defaultdict(list)
    for name, array in before.items():
        if array.size >= _LEAST:
            groups[array.shape].append(name)
    for names in groups.values():
        size = before[names[0]].size
        chosen = np.unique(np.linspace(0, size - 1, min(size, _COMPARED)).astype(int))
        starts = np.stack([before[name].reshape(-1)[chosen].astype(float) for name in names])
        spreads = np.linalg.norm(starts - starts.mean(axis=1, keepdims=True), axis=1)
        for own, name in enumerate(names):
            distances = np.linalg.norm(starts - after[name].reshape(-1)[chosen], axis=1)
            other = int(np.argmin(distances))
            if distances[other] < _ALIKE * min(distances[own], spreads[other]):
                return name, names[other]
    return None
