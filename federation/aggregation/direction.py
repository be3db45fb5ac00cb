"""The direction of a combination: streamed once, with or without noise, and measured without it."""

from collections.abc import Iterator, Sequence

import numpy as np

from federation.aggregation.diagnostics import measure
from federation.aggregation.gram import combine, trimmed_mean
from federation.aggregation.interface import Combination, Coordinates, Matrix, Vector
from federation.aggregation.qp import STATIONARY_TOLERANCE
from federation.aggregation.streaming import Row


class Direction:
    """c U, or the direction of `combination.coordinates`; the attributes hold once all blocks have been taken.

    Attributes:
        norm: ||direction|| without noise; 0 where it is zero but for rounding.
        products: of every row with the direction without noise, shape (m,); 0 where the norm is.
        stationary: there is no step to take: the direction is zero but for rounding. With noise every step is taken,
            since a missing step would reveal something of the updates.
    """

    def __init__(
        self,
        combination: Combination,
        rows: Sequence[Row],
        K: Matrix,
        *,
        noise: tuple[float, Row] | None = None,
        device: str = "cpu",
    ) -> None:
        """Of these rows, whose Gram matrix is K, shape (m, m).

        `noise` is a factor and a row (d,): their product is added to c U.
        """
        self._combination, self._rows, self._gram, self._device = combination, rows, K, device
        self._noise = noise
        self.products: Vector = np.zeros(len(rows))
        self.norm = 0.0
        self.stationary = noise is None and bool(combination.diagnostics.get("stationary", 0.0))
        if combination.coordinates is None:
            self.products = K @ combination.coefficients
            self.norm = float(np.sqrt(max(float(combination.coefficients @ self.products), 0.0)))

    def __iter__(self) -> Iterator[Vector]:
        """Consecutive blocks, float64, d elements altogether; to be taken once."""
        coordinates = self._combination.coordinates
        if coordinates is None:
            coefficients, rows = self._combination.coefficients, self._rows
            if self._noise is not None:
                scale, row = self._noise
                coefficients, rows = np.append(coefficients, scale), [*rows, row]
            yield from combine(coefficients, rows, device=self._device)
            return
        square = 0.0
        for block, products in trimmed_mean(coordinates.matrix, coordinates.trim, self._rows, device=self._device):
            square += float(block @ block)
            self.products += products
            yield block
        self.stationary = square <= STATIONARY_TOLERANCE * _length(coordinates, self._gram) ** 2
        self.norm = 0.0 if self.stationary else float(np.sqrt(square))
        self.products *= not self.stationary

    @property
    def diagnostics(self) -> dict[str, float]:
        """The diagnostics of the combination, completed for a coordinate-wise one."""
        if self._combination.coordinates is None:
            return self._combination.diagnostics
        measured = measure(self._gram, self.products, self.norm, self._combination.weights)
        return self._combination.diagnostics | measured | {"stationary": float(self.stationary)}


def _length(coordinates: Coordinates, K: Matrix) -> float:
    """The mean length of the averaged rows without the `trim` longest, so that one huge update does not count."""
    squares = (coordinates.matrix @ K * coordinates.matrix).sum(axis=1)
    lengths = np.sqrt(np.maximum(squares, 0.0))
    return float(np.sort(lengths)[: len(lengths) - coordinates.trim].mean())
