"""A random mask: some of the coordinates, as they are."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.sketches.base import Jacobian, LinearSketch, Message
from federation.sketches.draws import words


@dataclass(frozen=True, kw_only=True)
class Mask(LinearSketch):
    """One coordinate out of each of k = floor(budget d / M) equal stretches, the same in every row and at every client.

    An inner product over the kept ones, each counted as many times as its stretch is long, is unbiased. FedCMOO's
    baseline keeps a share 1/M of each client's entries, drawn anew for each client and row, and does not rescale. Its
    rescaled version would still count the noise of the mask in each client's product with itself; this one does not.
    """

    name: ClassVar[str] = "mask"

    @property
    def kept(self) -> int:
        """k, at most d."""
        return min(self.d, max(1, int(self.budget * self.d) // len(self.objectives)))

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        """See the base: the kept values of the first row, of the second, ..."""
        return (("values", served * self.kept),)

    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        """See the base."""
        return message["values"].reshape(served, -1) * np.sqrt(np.diff(self._bounds()))

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        """The entries of the drawn coordinates, for each row of A."""
        bounds = self._bounds()
        drawn = words(shared_seed, self.kept) % np.diff(bounds).astype(np.uint64)
        return {"values": A[:, bounds[:-1] + drawn.astype(np.int64)]}

    def _bounds(self) -> NDArray[np.int64]:
        return np.arange(self.kept + 1) * self.d // self.kept
