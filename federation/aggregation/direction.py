"""The direction of a combination: streamed once, with or without noise, and measured without it."""

from collections.abc import Iterator, Sequence

import numpy as np

from federation.aggregation.diagnostics import entropy, measure
from federation.aggregation.gram import combine, combine_all, squared_norms, trimmed_mean
from federation.aggregation.interface import UNREAD, Combination, Matrix, Vector
from federation.aggregation.qp import STATIONARY_TOLERANCE
from federation.aggregation.streaming import Row


class Direction:
    """c U, or the direction of `combination.coordinates`; the attributes hold once all blocks have been taken.

    Attributes:
        norm: ||direction|| without noise; 0 where it is zero but for rounding.
        products: of every row with the direction without noise, shape (m,); 0 where the norm is. Not known for a
            combination of rows of none of which K is known, nor for one with noise whose K is not of all rows.
        squares: the squared lengths of the rows, shape (m,).
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
        some: Matrix = UNREAD,
    ) -> None:
        """Of these rows, whose Gram matrix is K, shape (m, m).

        K is (0, 0) where it is not known; then the arithmetic is done on the CPU. `noise` is a factor and a row (d,):
        their product is added to c U. `some` is the Gram matrix of some rows where K is not known: with it, all rows
        are compared with the direction, and these with each other.
        """
        self._combination, self._rows, self._gram, self._device = combination, rows, K, device
        self._noise, self._some = noise, some
        self.squares: Vector = np.diagonal(K)
        self.products: Vector = np.zeros(len(rows))
        self.norm = 0.0
        self.stationary = noise is None and bool(K.size and combination.diagnostics.get("stationary", 0.0))
        if combination.coordinates is None and K.size:
            self.products = K @ combination.coefficients
            self.norm = float(np.sqrt(max(float(combination.coefficients @ self.products), 0.0)))

    def __iter__(self) -> Iterator[Vector]:
        """Consecutive blocks, float64, d elements altogether; to be taken once."""
        coordinates = self._combination.coordinates
        if coordinates is None and not self._gram.size and self._noise is None:
            yield from self._measured(self._combination.coefficients)
            return
        if not self._gram.size:
            self.squares = squared_norms(self._rows)
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
        lengths = _lengths(coordinates.matrix, self._gram, self.squares)
        # Without the `trim` longest, so that one huge update does not count.
        self._measure(square, float(np.sort(lengths)[: len(lengths) - coordinates.trim].mean()))

    def _measured(self, coefficients: Vector) -> Iterator[Vector]:
        """The blocks of a combination of rows whose K is not known."""
        square, self.squares = 0.0, np.zeros(len(self._rows))
        for part in combine_all(coefficients, self._rows, products=bool(self._some.size)):
            square += float(part.block @ part.block)
            self.squares += part.squares
            self.products += part.products
            yield part.block
        self._measure(square, float(np.abs(coefficients) @ np.sqrt(self.squares)))

    def _measure(self, square: float, length: float) -> None:
        """From the square of the direction's length, and the length that it had if the rows did not cancel."""
        self.stationary = square <= STATIONARY_TOLERANCE * length**2
        self.norm = 0.0 if self.stationary else float(np.sqrt(square))
        self.products *= not self.stationary

    @property
    def diagnostics(self) -> dict[str, float]:
        """The diagnostics of the combination, completed by those of the direction.

        Without K, and without that of some rows, only its length and the entropy of the weights are known of them.
        """
        weights = self._combination.weights
        if self._some.size:
            measured = measure(self._some, self.products, self.norm, weights, self.squares)
        elif not self._gram.size:
            measured = {"direction_norm": self.norm, "entropy": entropy(weights)}
        elif self._combination.coordinates is None:
            return self._combination.diagnostics
        else:
            measured = measure(self._gram, self.products, self.norm, weights)
        return self._combination.diagnostics | measured | {"stationary": float(self.stationary)}


def _lengths(matrix: Matrix, K: Matrix, squares: Vector) -> Vector:
    """The lengths of the averaged rows `matrix @ U`; without K, those that they have if the rows do not cancel."""
    lengths: Vector
    if not K.size:
        lengths = np.abs(matrix) @ np.sqrt(squares)
        return lengths
    squares = (matrix @ K * matrix).sum(axis=1)
    lengths = np.sqrt(np.maximum(squares, 0.0))
    return lengths
