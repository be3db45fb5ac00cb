"""Linear sketches: the same k numbers for each gradient, from one random linear map for all clients of a round."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.sketches.base import Jacobian, LinearSketch, Message
from federation.sketches.draws import signs, words

_CHUNK = 1 << 20  # columns at a time: the random numbers for them stay few


@dataclass(frozen=True, kw_only=True)
class _Stacked(LinearSketch):
    """A sketch whose message is one row: k numbers for the first gradient, k for the second, ...

    Attributes:
        row: the name of the row.
    """

    row: ClassVar[str]

    @property
    def k(self) -> int:
        """floor(budget d / M), from 1 to d."""
        return min(self.d, max(1, int(self.budget * self.d) // len(self.objectives)))

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        return ((self.row, served * self.k),)

    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        return message[self.row].reshape(served, self.k)


@dataclass(frozen=True, kw_only=True)
class Exact(_Stacked):
    """No compression: the whole Jacobian, M_i d floats whatever the budget. The others are measured against it."""

    name = "exact"
    row = "jacobian"

    @property
    def k(self) -> int:
        return self.d

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        return {self.row: A}


@dataclass(frozen=True, kw_only=True)
class RandomMask(_Stacked):
    """A random mask: one coordinate of each of k equal stretches, the same in every gradient and at every client.

    An inner product over the kept coordinates, each counted as many times as its stretch is long, is unbiased.
    FedCMOO's baseline keeps a share 1/M of each client's entries, drawn anew for each client and row, and does not
    rescale. Its rescaled version would still count the noise of the mask in each client's product with itself.
    """

    name = "mask"
    row = "values"

    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        return super().vectors(message, served, shared_seed=shared_seed) * np.sqrt(np.diff(self._bounds()))

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        bounds = self._bounds()
        drawn = words(shared_seed, self.k) % np.diff(bounds).astype(np.uint64)
        return {self.row: A[:, bounds[:-1] + drawn.astype(np.int64)]}

    def _bounds(self) -> NDArray[np.int64]:
        return np.arange(self.k + 1) * self.d // self.k


@dataclass(frozen=True, kw_only=True)
class CountSketch(_Stacked):
    """CountSketch (Charikar, Chen and Farach-Colton, 2002): signed sums of the coordinates in each of k buckets.

    The signs and the buckets are the same for every gradient and client. It takes O(M_i d) work. The inner products of
    messages estimate those of the gradients without bias; the error comes from pairs of coordinates in one bucket.

    The hash is balanced. The coordinates are cut into consecutive blocks of k, and each block is laid over the buckets
    with a random rotation of its own. Two coordinates of one block never meet; two of different blocks meet with
    probability 1/k, as with an independent hash. So the mean squared error is never larger than with that: it is about
    1 - k/d times as large, and less where large values lie together. With k = d the sketch is exact.
    """

    name = "count"
    row = "sums"

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        k = self.k
        bits, blocks = -(-self.d // 64), -(-self.d // k)
        raw = words(shared_seed, bits + blocks)
        flips = signs(raw[:bits], self.d)
        rotations = (raw[bits:] % np.uint64(k)).astype(np.int64)
        sums = np.zeros((len(A), k))
        for start in range(0, self.d, _CHUNK):
            part = slice(start, min(self.d, start + _CHUNK))
            columns = np.arange(part.start, part.stop)
            bucket = (columns + rotations[columns // k]) % k
            for i, row in enumerate(A):
                sums[i] += np.bincount(bucket, weights=row[part] * flips[part], minlength=k)
        return {self.row: sums}
