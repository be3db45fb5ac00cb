"""The arithmetic of a round, written a second time: K from the updates, and the new model from the coefficients.

Rows are read in place and in pieces, so that memory depends on the number of rows alone. Sums of float64 depend on
their order in the last bits, and so on the processor. Therefore K is compared with a tolerance; of a model, each number
must be what float32 rounding makes of a value within the error of the arithmetic.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.interface import Coordinates
from coordinator.aggregation.server_optimisers import Optimiser
from coordinator.aggregation.streaming import Source, Space, in_order, widened
from federation.vectors import RowFile
from verification.errors import Wrong

GRAM_TOLERANCE = 1e-10  # of K_ij, relative to the lengths of both rows
_ERROR = 1e-12  # of a sum of float64, relative to the sum of the magnitudes

Matrix = NDArray[np.float64]
T = TypeVar("T")


def panels(work: Callable[[slice, Matrix], T], rows: Sequence[RowFile]) -> Iterator[T]:
    """What `work` makes of some columns of all rows, (m, columns) in float64, in the order of the columns.

    Threads share the panels. The array is valid until `work` returns.

    Raises:
        Wrong: the rows have different lengths, or are no numbers to combine.
    """
    try:
        with Source.opened(rows) as source:

            def part(panel: slice, space: Space) -> list[T]:
                blocks = widened(source.read(panel, space), space)
                return [work(slice(panel.start + at.start, panel.start + at.stop), block) for at, block in blocks]

            for found in in_order(part, source.panels(), None):
                yield from found
    except ValueError as error:
        raise Wrong(str(error)) from error


def gram(rows: Sequence[RowFile]) -> Matrix:
    """K = U U^T of m rows, (m, m)."""
    return sum(panels(lambda _, block: block @ block.T, rows), np.zeros((len(rows), len(rows))))


def must_be_gram(signed: Matrix, found: Matrix) -> None:
    """Compares a signed K with the one that rows give.

    Raises:
        Wrong: an entry differs by more than `GRAM_TOLERANCE` of the product of the rows' lengths.
    """
    if signed.shape != found.shape:
        raise Wrong(f"K has the shape {signed.shape}; there are {len(found)} rows")
    lengths = np.sqrt(np.diagonal(found))
    off = np.abs(signed - found) > GRAM_TOLERANCE * np.outer(lengths, lengths)
    if off.any() or not np.isfinite(signed).all():
        i, j = np.argwhere(off | ~np.isfinite(signed))[0]
        raise Wrong(f"K[{i}, {j}] is {signed[i, j]!r}; the updates give {found[i, j]!r}")


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a step says that it made, and from what: vectors of d elements.

    Attributes:
        base: the model before.
        result: the model after; None where the step left the model as it was.
        rate: the server's learning rate.
        rows: that were combined, the noise included.
        coefficients: of the rows; None for a direction that is made coordinate by coordinate.
        coordinates: how such a direction is made; None otherwise.
        optimiser: makes the step from the direction.
        before: the optimiser's vectors and the mean of models before; a missing one is the first.
        after: those after the step.
        average: the name of the mean of models among them.
        models: how many models are in that mean before the step; None where none is kept.
    """

    base: RowFile
    result: RowFile | None
    rate: float
    rows: Sequence[RowFile]
    coefficients: Matrix | None
    coordinates: Coordinates | None
    optimiser: Optimiser
    before: dict[str, RowFile] = field(default_factory=dict)
    after: dict[str, RowFile] = field(default_factory=dict)
    average: str = ""
    models: int | None = None


def must_follow(made: Made) -> tuple[int, Matrix]:
    """Computes the new model and the vectors that are kept with it, and compares them number by number.

    Returns:
        How many numbers were compared; and K of the rows, from the same reading.

    Raises:
        Wrong: a number is not what follows; the message names the vector and the place.
    """
    slots = made.optimiser.slots
    inputs = {**{f"before {name}": row for name, row in made.before.items()}, "base": made.base}
    outputs = {f"after {name}": row for name, row in made.after.items()}
    if made.result is not None:
        outputs["result"] = made.result
    names = [*inputs, *outputs]

    def compare(where: slice, piece: Matrix) -> tuple[int, Matrix]:
        updates = piece[: len(made.rows)]
        known = dict(zip(names, piece[len(made.rows) :], strict=True))
        direction = _direction(made, updates)
        magnitude = cache(lambda: _magnitude(made, updates))  # of the sums; needed where a number is not the nearest
        state = {
            slot: known.get(f"before {slot}", np.full(len(direction), made.optimiser.initial(slot))) for slot in slots
        }
        step, state = made.optimiser.apply(direction, state)
        moved = known["base"] - made.rate * step
        model = known["base"] if made.result is None else known["result"]
        compared = len(model)

        def of_model() -> Matrix:
            scale: Matrix = np.abs(known["base"]) + abs(made.rate) * gain * (magnitude() + np.abs(step))
            return scale

        if made.result is not None:
            _must_round(model, moved, of_model, "the model", where)
            for slot, value in state.items():

                def of_slot(value: Matrix = value) -> Matrix:
                    return np.abs(value) + magnitude() + magnitude() ** 2

                _must_round(known[f"after {slot}"], value, of_slot, slot, where)
                compared += len(model)
        if made.models is not None:
            mean = known.get(f"before {made.average}", np.zeros(len(model)))
            mean = mean + (model - mean) / (made.models + 1)
            _must_round(known[f"after {made.average}"], mean, lambda: np.abs(mean), "the mean of the models", where)
            compared += len(model)
        return compared, updates @ updates.T

    gain = 1.0 / getattr(made.optimiser, "tau", 1.0)
    count, K = 0, np.zeros((len(made.rows), len(made.rows)))
    for compared, part in panels(compare, [*made.rows, *inputs.values(), *outputs.values()]):
        count += compared
        K += part
    return count, K


def must_average(rows: Sequence[RowFile], result: RowFile) -> int:
    """Compares a vector with the mean of some rows, number by number, and returns how many there are.

    Raises:
        Wrong: a number is not what follows.
    """

    def compare(where: slice, piece: Matrix) -> int:
        _must_round(
            piece[-1],
            piece[:-1].mean(axis=0),
            lambda: np.asarray(np.abs(piece[:-1]).max(axis=0)),
            "the averaged buffers",
            where,
        )
        return len(piece[-1])

    return sum(panels(compare, [*rows, result]))


def _direction(made: Made, updates: Matrix) -> Matrix:
    """The direction on some columns."""
    if made.coordinates is None:
        return np.zeros(updates.shape[1]) if made.coefficients is None else made.coefficients @ updates
    values = np.sort(made.coordinates.matrix @ updates, axis=0)
    kept: Matrix = values[made.coordinates.trim : len(values) - made.coordinates.trim].mean(axis=0)
    return kept


def _magnitude(made: Made, updates: Matrix) -> Matrix:
    """The sum of the magnitudes that the direction was made of."""
    if made.coordinates is None:
        return np.zeros(updates.shape[1]) if made.coefficients is None else np.abs(made.coefficients) @ np.abs(updates)
    largest: Matrix = np.abs(made.coordinates.matrix).sum(axis=1).max() * np.abs(updates).max(axis=0)
    return largest


def _must_round(given: Matrix, value: Matrix, magnitude: Callable[[], Matrix], what: str, where: slice) -> None:
    """Each given float32 number is what rounding makes of some value within the error of sums of this magnitude."""
    with np.errstate(over="ignore"):
        if np.array_equal(given, value.astype(np.float32)):
            return
        error = _ERROR * magnitude()
        low, high = (value - error).astype(np.float32), (value + error).astype(np.float32)
    off = ~((low <= given) & (given <= high))
    if off.any():
        place = int(np.argmax(off))
        raise Wrong(
            f"{what}: number {where.start + place} is {given[place]:.9g}; {value[place]:.9g} follows from the record"
        )
