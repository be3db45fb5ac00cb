"""The direction of a combination: streamed once, with or without noise, and measured without it."""

from collections.abc import Iterator, Sequence

import numpy as np

from federation.aggregation.diagnostics import entropy, measure
from federation.aggregation.gram import combine, combine_all, squared_norms, trimmed_mean
from federation.aggregation.interface import UNREAD, Combination, Coordinates, Matrix, Vector
from federation.aggregation.qp import STATIONARY_TOLERANCE
from federation.aggregation.streaming import Row

_VANISHING = 1e-20  # a sum of squares, in float32, of which those that vanished could be a part


class Direction:
    """c U, or the direction of `combination.coordinates`; the attributes hold once all blocks have been taken.

    Attributes:
        norm: ||direction|| without noise; 0 where it is zero but for rounding.
        products: of every row with the direction without noise, shape (m,); 0 where the norm is. Not known for a
            combination of rows of none of which K is known, nor for one with noise whose K is not of all rows.
        squares: the squared lengths of the rows, shape (m,). Not known, (0,), where neither K nor the products are, all
            rows are finite, and they do not cancel.
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
        if coordinates is None:
            if not self._gram.size:
                self.squares = squared_norms(self._rows)
            coefficients, rows = self._combination.coefficients, self._rows
            if self._noise is not None:
                scale, row = self._noise
                coefficients, rows = np.append(coefficients, scale), [*rows, row]
            yield from combine(coefficients, rows, device=self._device)
            return
        yield from self._by_coordinates(coordinates)

    def _by_coordinates(self, coordinates: Coordinates) -> Iterator[Vector]:
        """The blocks of a direction that is made coordinate by coordinate."""
        square, total, known = 0.0, 0.0, bool(self._gram.size or self._some.size)
        matrix, trim = coordinates.matrix, coordinates.trim
        for part in trimmed_mean(matrix, trim, self._rows, products=known, device=self._device):
            square += float(part.block @ part.block)
            total += part.total
            self.products += part.products
            yield part.block
        if not self._gram.size:
            longest = float(np.abs(matrix).sum(axis=1).max())
            if not known and total > _VANISHING and self._moves(square, 2 * longest**2 * total):
                return
            self.squares = squared_norms(self._rows)
        lengths = _lengths(coordinates.matrix, self._gram, self.squares)
        # Without the `trim` longest, so that one huge update does not count.
        self._measure(square, float(np.sort(lengths)[: len(lengths) - coordinates.trim].mean()))

    def _measured(self, coefficients: Vector) -> Iterator[Vector]:
        """The blocks of a combination of rows whose K is not known."""
        square, total, squares, known = 0.0, 0.0, np.zeros(len(self._rows)), bool(self._some.size)
        for part in combine_all(coefficients, self._rows, lengths=known, products=known):
            square += float(part.block @ part.block)
            total += part.total
            squares += part.squares
            self.products += part.products
            yield part.block
        if not known and self._moves(square, float(coefficients @ coefficients) * total):
            return
        self.squares = squares if known else squared_norms(self._rows)
        self._measure(square, float(np.abs(coefficients) @ np.sqrt(self.squares)))

    def _moves(self, square: float, most: float) -> bool:
        """True if the direction is not zero, whatever the lengths of the rows are; its length is then measured.

        `most` is at least the square of the length that it had if the rows did not cancel; not finite if a row is not.
        """
        moves = square > STATIONARY_TOLERANCE * most  # no, if any of these is not a number
        self.stationary, self.norm = False, float(np.sqrt(square)) if moves else 0.0
        return moves

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
