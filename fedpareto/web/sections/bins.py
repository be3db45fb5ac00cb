"""Rounds put together, for drawings that have no room for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS = 200  # of a line; of more rounds, several are averaged


@dataclass(frozen=True)
class Bins:
    """Rounds put together: `together` rounds make a point; there are `count` points so far."""

    together: int
    count: int

    @classmethod
    def of(cls, planned: int, stop: int, most: int = POINTS) -> "Bins":
        """The bins of `stop` rounds of `planned`, so that there are at most `most` at the end."""
        together = max(1, -(-max(planned, stop) // most))
        return cls(together, -(-stop // together))

    def means(self, values: NDArray[np.floating[Any]], first: int = 0) -> NDArray[np.float64]:
        """The means over the rounds of each bin from `first` on, (members, bins); NaN where none is known."""
        part = values[:, first * self.together : self.count * self.together].astype(np.float64)
        missing = (self.count - first) * self.together - part.shape[1]
        padded = np.pad(part, ((0, 0), (0, missing)), constant_values=np.nan)
        grouped = padded.reshape(len(part), self.count - first, self.together)
        finite = np.isfinite(grouped)
        counts = finite.sum(axis=2)
        sums = np.where(finite, grouped, 0.0).sum(axis=2)
        means: NDArray[np.float64] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        return means

    def of_line(self, values: Sequence[float]) -> list[float]:
        """The means of one line."""
        means: list[float] = self.means(np.array([values], dtype=np.float64))[0].tolist()
        return means

    def rounds(self, first: int = 0) -> list[int]:
        """The last round of each bin from `first` on."""
        return [(at + 1) * self.together - 1 for at in range(first, self.count)]
