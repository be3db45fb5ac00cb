"""CountSketch (Charikar, Chen and Farach-Colton, 2002) with a seed that all clients of a round share."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.sketches.base import Jacobian, LinearSketch, Message
from federation.sketches.draws import signs, words

_CHUNK = 1 << 20  # columns at a time: what is drawn for them stays small


@dataclass(frozen=True, kw_only=True)
class CountSketch(LinearSketch):
    """Each coordinate gets a random sign and one of k = floor(budget d / M) buckets, the same for every row and client.

    A message is the k sums of each row: O(M_i d) work, k M_i floats. Its inner products estimate those of the rows
    without bias; what they are wrong by comes from pairs of coordinates that meet in a bucket.

    The hash is balanced. The coordinates are cut into consecutive blocks of k, and each block is laid over the buckets
    with a random rotation of its own. Two coordinates of one block never meet; two of different blocks meet with
    probability 1/k, as with an independent hash. So the mean squared error is never larger than with that: it is about
    1 - k/d times as large, and less where large values lie together. With k = d the sketch is exact.
    """

    name: ClassVar[str] = "count"

    @property
    def buckets(self) -> int:
        """k, at most d."""
        return min(self.d, max(1, int(self.budget * self.d) // len(self.objectives)))

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        """See the base: k sums of the first row, of the second, ..."""
        return (("sums", served * self.buckets),)

    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        """See the base."""
        return message["sums"].reshape(served, -1)

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        """Sums of the signed entries in each bucket, for each row of A."""
        k = self.buckets
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
        return {"sums": sums}
