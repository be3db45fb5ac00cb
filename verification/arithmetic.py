"""The arithmetic of a round, written a second time: K from the updates, and the new model from the coefficients.

Rows are read in place and in pieces, so that memory depends on the number of rows alone. Sums of float64 depend on
their order in the last bits, and so on the processor. Therefore K is compared with a tolerance. Each number of a
model must be the float32 rounding of a value within the error of the arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.interface import Coordinates
from federation.aggregation.server_optimizers import Optimizer
from federation.aggregation.streaming import Source, Space, in_order, widened
from federation.vectors import RowFile
from verification.errors import VerificationError

GRAM_TOLERANCE = 1e-10  # of K_ij, relative to the lengths of both rows
_ERROR = 1e-12  # of a sum of float64, relative to the sum of the magnitudes

Matrix = NDArray[np.float64]
T = TypeVar("T")


def panels(work: Callable[[slice, Matrix], T], rows: Sequence[RowFile]) -> Iterator[T]:
    """Yields the results of `work` on some columns of all rows, (m, columns) in float64, in the order of the columns.

    Threads share the panels. The array is valid until `work` returns.

    Raises:
        VerificationError: the rows have different lengths, or are not numbers that can be combined.
    """
    try:
        with Source.opened(rows) as source:

            def results_of(panel: slice, space: Space) -> list[T]:
                blocks = widened(source.read(panel, space), space, products=True)
                return [work(slice(panel.start + part.start, panel.start + part.stop), block) for part, block in blocks]

            for results in in_order(results_of, source.panels(), None):
                yield from results
    except ValueError as error:
        raise VerificationError(str(error)) from error


def gram(rows: Sequence[RowFile]) -> Matrix:
    """K = U U^T of m rows, (m, m)."""
    return sum(panels(lambda _, block: block @ block.T, rows), np.zeros((len(rows), len(rows))))


def check_gram(signed: Matrix, computed: Matrix) -> None:
    """Compares a signed K with the K of the rows.

    Raises:
        VerificationError: an entry differs by more than `GRAM_TOLERANCE` of the product of the rows' lengths.
    """
    if signed.shape != computed.shape:
        raise VerificationError(f"K has the shape {signed.shape}; there are {len(computed)} rows")
    lengths = np.sqrt(np.diagonal(computed))
    # Verify, 6: relative to both lengths: a bound by the longest row would let products of short ones be anything.
    off = np.abs(signed - computed) > GRAM_TOLERANCE * np.outer(lengths, lengths)
    # NaN is above no bound, so it needs a check of its own.
    if off.any() or not np.isfinite(signed).all():
        i, j = np.argwhere(off | ~np.isfinite(signed))[0]
        raise VerificationError(f"K[{i}, {j}] is {signed[i, j]!r}; the updates give {computed[i, j]!r}")


def check_squares(signed: Matrix, computed: Matrix, rows: Sequence[int]) -> None:
    """Compares signed squared lengths with those of the rows, which have these places.

    Raises:
        VerificationError: one differs by more than `GRAM_TOLERANCE`.
    """
    off = ~(np.abs(signed - computed) <= GRAM_TOLERANCE * computed)  # NaN is off, too
    if off.any():
        first = int(np.argmax(off))
        raise VerificationError(
            f"the squared length of row {rows[first]} is {signed[first]!r} on record; {computed[first]!r} follows"
        )


@dataclass(frozen=True, kw_only=True)
class StepVectors:
    """The vectors that a signed step names, each of d elements: its inputs and its results.

    Attributes:
        base: the model before.
        result: the model after; None where the step left the model as it was.
        rate: the server's learning rate.
        rows: the combined rows, the noise included.
        coefficients: of the rows; None for a direction that is computed coordinate by coordinate.
        coordinates: describes how such a direction is computed; None otherwise.
        optimizer: computes the step from the direction.
        before: the optimiser's vectors and the mean of models before the step; a missing one has its initial value.
        after: the same vectors after the step.
        average: the name of the mean of models among them.
        models: the number of models in that mean before the step; None if no mean is kept.
        compared: the places of the rows of which K is; none: all.
    """

    base: RowFile
    result: RowFile | None
    rate: float
    rows: Sequence[RowFile]
    coefficients: Matrix | None
    coordinates: Coordinates | None
    optimizer: Optimizer
    before: dict[str, RowFile] = field(default_factory=dict)
    after: dict[str, RowFile] = field(default_factory=dict)
    average: str = ""
    models: int | None = None
    compared: tuple[int, ...] = ()


def gram_and_squares(rows: Sequence[RowFile], compared: Sequence[int]) -> tuple[Matrix, Matrix]:
    """K of the rows in these places, of all if there are none; and the squared lengths of all m rows, (m,)."""
    K, squares = np.zeros((len(compared or rows),) * 2), np.zeros(len(rows))
    for block_gram, block_squares in panels(lambda _, block: _products(block, compared), rows):
        K += block_gram
        squares += block_squares
    return K, squares


def _products(block: Matrix, compared: Sequence[int]) -> tuple[Matrix, Matrix]:
    """K and the squared lengths, as `gram_and_squares`, of some columns of the rows."""
    some = block[list(compared)] if compared else block
    K: Matrix = some @ some.T
    return K, np.einsum("ij,ij->i", block, block) if compared else np.diagonal(K)


def check_follows(signed: StepVectors) -> tuple[int, Matrix, Matrix]:
    """Computes the new model and the vectors that are kept with it, and compares each of their numbers.

    Returns:
        The number of compared numbers; K of the rows, and their squared lengths, as `gram_and_squares`, from the same
        reading.

    Raises:
        VerificationError: a number differs from the computed one; the message names the vector and the position.
    """
    slots = signed.optimizer.slots
    inputs = {**{f"before {name}": row for name, row in signed.before.items()}, "base": signed.base}
    outputs = {f"after {name}": row for name, row in signed.after.items()}
    if signed.result is not None:
        outputs["result"] = signed.result
    names = [*inputs, *outputs]

    def compare(columns: slice, piece: Matrix) -> tuple[int, tuple[Matrix, Matrix]]:
        updates = piece[: len(signed.rows)]
        vectors = dict(zip(names, piece[len(signed.rows) :], strict=True))
        direction = _direction(signed, updates)
        magnitude = cache(lambda: _magnitude(signed, updates))  # of the sums; needed if a number is not the nearest
        state = {
            slot: vectors.get(f"before {slot}", np.full(len(direction), signed.optimizer.initial(slot)))
            for slot in slots
        }
        step, state = signed.optimizer.apply(direction, state)
        moved = vectors["base"] - signed.rate * step
        model = vectors["base"] if signed.result is None else vectors["result"]
        compared = len(model)

        def of_model() -> Matrix:
            scale: Matrix = np.abs(vectors["base"]) + abs(signed.rate) * gain * (magnitude() + np.abs(step))
            return scale

        if signed.result is not None:
            _check_rounding(model, moved, of_model, "the model", columns)
            for slot, value in state.items():

                def of_slot(value: Matrix = value) -> Matrix:
                    return np.abs(value) + magnitude() + magnitude() ** 2

                _check_rounding(vectors[f"after {slot}"], value, of_slot, slot, columns)
                compared += len(model)
        if signed.models is not None:
            mean = vectors.get(f"before {signed.average}", np.zeros(len(model)))
            mean = mean + (model - mean) / (signed.models + 1)
            _check_rounding(
                vectors[f"after {signed.average}"], mean, lambda: np.abs(mean), "the mean of the models", columns
            )
            compared += len(model)
        return compared, _products(updates, signed.compared)

    gain = 1.0 / getattr(signed.optimizer, "tau", 1.0)
    count, K = 0, np.zeros((len(signed.compared or signed.rows),) * 2)
    squares = np.zeros(len(signed.rows))
    for compared, (block_gram, block_squares) in panels(compare, [*signed.rows, *inputs.values(), *outputs.values()]):
        count += compared
        K += block_gram
        squares += block_squares
    return count, K, squares


def check_average(rows: Sequence[RowFile], result: RowFile) -> int:
    """Compares each number of a vector with the mean of some rows, and returns the count of numbers.

    Raises:
        VerificationError: a number differs from the mean.
    """

    def compare(columns: slice, piece: Matrix) -> int:
        _check_rounding(
            piece[-1],
            piece[:-1].mean(axis=0),
            lambda: np.asarray(np.abs(piece[:-1]).max(axis=0)),
            "the averaged buffers",
            columns,
        )
        return len(piece[-1])

    return sum(panels(compare, [*rows, result]))


def check_unchanged(before: RowFile, after: RowFile) -> int:
    """Compares the fixed tensors of two models, and returns the count of numbers.

    Raises:
        VerificationError: a number differs.
    """

    def compare(columns: slice, piece: Matrix) -> int:
        if (differs := np.flatnonzero(piece[0] != piece[1])).size:
            at = differs[0]
            raise VerificationError(
                f"the fixed tensors: number {columns.start + at} is {piece[1][at]:.9g}, and was {piece[0][at]:.9g}"
            )
        return len(piece[0])

    return sum(panels(compare, [before, after]))


def _direction(signed: StepVectors, updates: Matrix) -> Matrix:
    """The direction on some columns."""
    if signed.coordinates is None:
        return np.zeros(updates.shape[1]) if signed.coefficients is None else signed.coefficients @ updates
    return _along(signed.coordinates, updates)


def _along(coordinates: Coordinates, updates: Matrix) -> Matrix:
    values = np.sort(coordinates.matrix @ updates, axis=0)
    kept: Matrix = values[coordinates.trim : len(values) - coordinates.trim].mean(axis=0)
    return kept


def products_along(made: Coordinates | Matrix, rows: Sequence[RowFile]) -> Matrix:
    """The products of m rows with the direction made of them, by coordinates or coefficients; its squared length.

    Shape (m + 1,).
    """

    def products_of(_: slice, piece: Matrix) -> Matrix:
        direction = _along(made, piece) if isinstance(made, Coordinates) else made @ piece
        return np.append(piece @ direction, direction @ direction)

    return sum(panels(products_of, rows), np.zeros(len(rows) + 1))


def _magnitude(signed: StepVectors, updates: Matrix) -> Matrix:
    """The sum of the magnitudes of the terms of the direction."""
    if signed.coordinates is None:
        return (
            np.zeros(updates.shape[1]) if signed.coefficients is None else np.abs(signed.coefficients) @ np.abs(updates)
        )
    largest: Matrix = np.abs(signed.coordinates.matrix).sum(axis=1).max() * np.abs(updates).max(axis=0)
    return largest


def _check_rounding(given: Matrix, value: Matrix, magnitude: Callable[[], Matrix], vector: str, columns: slice) -> None:
    """Checks that given float32 numbers are rounded values within the error of such sums. Raises VerificationError."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.array_equal(given, value.astype(np.float32)):
            return
        error = _ERROR * magnitude()
        low, high = (value - error).astype(np.float32), (value + error).astype(np.float32)
    # Verify, 7: `not inside` and not `outside`: NaN is neither below nor above.
    off = ~((low <= given) & (given <= high))
    if off.any():
        first = int(np.argmax(off))
        raise VerificationError(
            f"{vector}: number {columns.start + first} is {given[first]:.9g}; "
            f"{value[first]:.9g} follows from the record"
        )
