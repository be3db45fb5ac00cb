"""The operations that touch d numbers.

`gram` is K = U U^T, `squared_norms` its diagonal alone, `combine` the direction c U, `combine_all` both of these,
`trimmed_mean` a direction made coordinate by coordinate, and `apply_step` the new model.

They stream over rows in panels of columns, each panel in sub-blocks that stay in a core's cache, widened to float64
there (`federation.aggregation.streaming`): memory depends neither on m nor on d, and the same inputs give the same
bytes on any number of threads (`workers`; None is one for each core). `device` is "cpu", or "cuda" to do the arithmetic
on the GPU. Rows of different lengths raise ValueError; a file that cannot be read, or ends inside its row, OSError.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.interface import Matrix, Vector
from federation.aggregation.server_optimizers import Optimizer, Sgd
from federation.aggregation.streaming import BLOCK, Row, Source, Space, in_order, sub_blocks, widened

Write = Callable[[memoryview], object]
_NETWORK_ROWS = 24  # the most rows that are sorted by comparing whole rows; of more, each column is sorted


def gram(rows: Sequence[Row], *, device: str = "cpu", workers: int | None = None) -> Matrix:
    """K = U U^T, shape (m, m), in float64 in one pass over m rows of d elements; finite (not checked here)."""
    K = np.zeros((len(rows), len(rows)))
    arithmetic = _arithmetic(device)
    with Source.opened(rows) as source:

        def partial(panel: slice, space: Space) -> Matrix:
            return arithmetic.gram(source.read(panel, space), space)

        for part in in_order(partial, source.panels(), workers):
            K += part
    upper = np.triu(K)
    return upper + np.triu(K, 1).T


def squared_norms(rows: Sequence[Row], *, workers: int | None = None) -> Vector:
    """||u_i||^2, shape (m,), in float64 in one pass over m rows of d elements; finite (not checked here)."""
    nothing = np.zeros(len(rows))
    return sum((part.squares for part in combine_all(nothing, rows, workers=workers)), np.zeros(len(rows)))


class Combined(NamedTuple):
    """Some columns of a direction, with numbers of the same columns of every row.

    Attributes:
        block: of the direction, float64.
        total: the sum of the squared lengths of all rows; not finite where a row is not, or is too large.
        squares: the squared lengths of the rows, shape (m,); zeros where they were not asked for.
        products: of the rows with the direction, shape (m,); zeros where they were not asked for.
    """

    block: Vector
    total: float
    squares: Vector
    products: Vector


def combine_all(
    coefficients: Matrix,
    rows: Sequence[Row],
    *,
    lengths: bool = True,
    products: bool = False,
    workers: int | None = None,
) -> Iterator[Combined]:
    """As `combine`, on the CPU, with the squared lengths of all rows, and their products with the direction.

    All is of one pass. For `products`, the columns of the rows are read twice, the second time from the caches of the
    processor or the system. Rows whose coefficient is zero are read, too.
    """
    with Source.opened(rows) as source:

        def part(panel: slice, space: Space) -> Combined:
            direction, squares, along = np.zeros(panel.stop - panel.start), np.zeros(len(rows)), np.zeros(len(rows))
            total = 0.0
            for strip in source.strips(panel):
                found = direction[strip.start - panel.start : strip.stop - panel.start]
                for some, block in source.pieces(strip, space):
                    if coefficients[some].any():
                        found += np.dot(coefficients[some], block)
                    if lengths:
                        squares[some] += np.einsum("ij,ij->i", block, block)
                    else:
                        total += float(np.dot(block.ravel(), block.ravel()))
                if products:
                    for some, block in source.pieces(strip, space):
                        along[some] += np.dot(block, found)
            return Combined(direction, float(squares.sum()) if lengths else total, squares, along)

        yield from in_order(part, source.panels(), workers)


def combine(
    coefficients: Matrix, rows: Sequence[Row], *, device: str = "cpu", workers: int | None = None
) -> Iterator[Matrix]:
    """Yields consecutive blocks of the direction c U, float64, d elements altogether.

    Rows whose coefficient is zero are not read.

    Raises:
        ValueError: not as many coefficients as rows.
    """
    c = np.asarray(coefficients, dtype=np.float64)
    if c.shape != (len(rows),):
        raise ValueError(f"coefficients of shape {c.shape} for {len(rows)} rows")
    used = np.flatnonzero(c).tolist()
    arithmetic = _arithmetic(device)
    every = Source(rows)  # never opened: for its length and panels
    with Source.opened([rows[i] for i in used]) as source:

        def part(panel: slice, space: Space) -> Matrix:
            if not used:
                return np.zeros(panel.stop - panel.start)
            return arithmetic.combine(c[used], source.read(panel, space), space)

        yield from in_order(part, source.panels() if used else every.panels(), workers)


def trimmed_mean(
    matrix: Matrix,
    trim: int,
    rows: Sequence[Row],
    *,
    products: bool = True,
    device: str = "cpu",
    workers: int | None = None,
) -> Iterator[Combined]:
    """Column by column, the mean of the values of `matrix @ U` without the `trim` lowest and the `trim` highest.

    The order of the rows does not change a bit of it, if the matrix treats them alike.

    Args:
        matrix: shape (m', m); with the identity the rows are used as they are.
        trim: values to leave out at each end, less than m' / 2.
        rows: m of them.
        products: make those of the rows with the direction: their sums are U times the direction.
        device: see above.
        workers: see above.

    Yields:
        Consecutive blocks of the direction, d elements altogether, without squared lengths. `total` is exact to a half:
        it is a sum of float32 where the rows are, and 0 for squares that vanish there, below 1e-38.

    Raises:
        ValueError: not as many rows as the matrix has columns, or no value is left to average.
    """
    if matrix.shape[1] != len(rows):
        raise ValueError(f"a matrix of shape {matrix.shape} for {len(rows)} rows")
    if not 0 <= 2 * trim < len(matrix):
        raise ValueError(f"of {len(matrix)} values, {trim} cannot be left out at each end")
    mixing = None if np.array_equal(matrix, np.eye(len(rows))) else matrix
    arithmetic = _arithmetic(device)
    with Source.opened(rows) as source:

        def part(panel: slice, space: Space) -> Combined:
            values = source.read(panel, space)
            with np.errstate(over="ignore", invalid="ignore"):
                total = float(np.dot(values.ravel(), values.ravel()))
            direction, along = arithmetic.trimmed_mean(mixing, trim, values, space, products=products)
            return Combined(direction, total, np.zeros(len(rows)), along)

        yield from in_order(part, source.panels(), workers)


@dataclass(frozen=True)
class Average:
    """The running mean of the models after each step.

    Attributes:
        models: the number of models in it before this step.
        row: their mean, d elements; None for none.
        write: takes the next piece of the mean after this step.
    """

    models: int
    row: Row | None
    write: Write


def apply_step(
    base: Row,
    rate: float,
    direction: Iterable[Matrix],
    write: Write,
    *,
    optimizer: Optimizer | None = None,
    before: Mapping[str, Row] = MappingProxyType({}),
    after: Mapping[str, Write] = MappingProxyType({}),
    average: Average | None = None,
) -> float:
    """Streams the new model, base - rate * step, as little-endian float32, and the vectors that are kept with it.

    Args:
        base: w_t, d elements.
        rate: eta_t, the server's learning rate.
        direction: blocks of float64, d elements altogether; see `combine` and `trimmed_mean`.
        write: takes the next piece of the new model; the piece is valid during the call only.
        optimizer: makes the step from the direction; None takes the direction as it is.
        before: the optimiser's state vectors, each of d elements; a missing one has its initial values.
        after: takes the next piece of each of them after the step.
        average: the running mean of the models, where one is kept.

    Returns:
        ||direction||.

    Raises:
        ValueError: a direction or rows of another length than the base.
        FloatingPointError: the new model, or a state vector, would not be finite in float32. Some pieces have been
            written by then.
    """
    optimizer = optimizer or Sgd()
    known = [slot for slot in optimizer.slots if slot in before]
    means = [average.row] if average is not None and average.row is not None else []
    squares, position, space = 0.0, 0, Space()
    with Source.opened([base, *(before[slot] for slot in known), *means]) as source:
        for block in direction:
            panel = slice(position, position + len(block))
            if panel.stop > source.length:
                break
            parts = (block[start : start + BLOCK] for start in range(0, len(block), BLOCK))
            squares += sum(float(np.dot(part, part)) for part in parts)
            values = source.read(panel, space).astype(np.float64)
            slots = {slot: np.full(len(block), optimizer.initial(slot)) for slot in optimizer.slots}
            slots |= dict(zip(known, values[1:], strict=False))
            with np.errstate(over="ignore", invalid="ignore"):
                step, slots = optimizer.apply(block, slots)
                moved = values[0] - rate * step
            model = _narrow("the model", moved, panel)
            write(model.data.cast("B"))
            for slot, vector in slots.items():
                after[slot](_narrow(slot, vector, panel).data.cast("B"))
            if average is not None:
                mean = values[-1] if means else 0.0
                mean = mean + (model - mean) / (average.models + 1)
                average.write(_narrow("average", mean, panel).data.cast("B"))
            position = panel.stop
        if position != source.length:
            raise ValueError(f"rows of one matrix have one length; the direction has another than {source.length}")
    return float(np.sqrt(squares))


def _narrow(name: str, values: Matrix, panel: slice) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype("<f4")
    if not np.isfinite(narrow).all():
        raise FloatingPointError(
            f"{name} leaves the range of float32 between elements {panel.start} and {panel.stop}: up to "
            f"{np.abs(values).max():g}"
        )
    return narrow


def _arithmetic(device: str) -> "_Cpu | _Cuda":
    return _Cuda() if device == "cuda" else _Cpu(device)


class _Cpu:
    def __init__(self, device: str) -> None:
        if device != "cpu":
            raise ValueError(f"device {device!r}: gram and combine run on 'cpu' or 'cuda'")

    def gram(self, panel: NDArray[Any], space: Space) -> Matrix:
        m = len(panel)
        K = np.zeros((m, m))
        part = np.empty((m, m))
        for _, block in widened(panel, space, products=True):
            K += np.dot(block, block.T, out=part)  # a syrk; np.matmul would keep the interpreter lock for small m
        return K

    def combine(self, c: Matrix, panel: NDArray[Any], space: Space) -> Matrix:
        direction = np.empty(panel.shape[1])
        for columns, block in widened(panel, space):
            np.dot(c, block, out=direction[columns])
        return direction

    def trimmed_mean(
        self, matrix: Matrix | None, trim: int, panel: NDArray[Any], space: Space, *, products: bool
    ) -> tuple[Matrix, Matrix]:
        direction, along = np.empty(panel.shape[1]), np.zeros(len(panel))
        for columns in sub_blocks(panel):
            piece = panel[:, columns]
            mixed = piece if matrix is None else np.dot(matrix, piece.astype(np.float64))
            _mean_of_middle(mixed, trim, space, direction[columns])
            if products:
                along += np.dot(piece.astype(np.float64), direction[columns])
        return direction, along


def _mean_of_middle(values: NDArray[Any], trim: int, space: Space, out: Vector) -> None:
    """The mean of each column, (m, n), without its `trim` lowest and highest values, into `out`.

    Sorting whole is several times faster than selecting here, and float32 faster than float64.
    """
    m, n = values.shape
    rows = space.array("sorted", (m + 1, n), values.dtype)
    np.copyto(rows[:m], values)  # the rows of a panel are pages apart
    if m > _NETWORK_ROWS:  # each column side by side in memory
        columns = space.array("columns", (n, m), values.dtype)
        np.copyto(columns, rows[:m].T)
        columns.sort(axis=1)
        columns[:, trim : m - trim].mean(axis=1, dtype=np.float64, out=out)
        return
    places, free = list(rows[:m]), rows[m]
    for low, high in _comparisons(m):  # whole rows at once
        np.minimum(places[low], places[high], out=free)
        np.maximum(places[low], places[high], out=places[high])
        places[low], free = free, places[low]
    out[:] = places[trim]
    for row in places[trim + 1 : m - trim]:
        out += row
    out /= m - 2 * trim


@cache
def _comparisons(m: int) -> tuple[tuple[int, int], ...]:
    """Pairs of places; to exchange those out of order, one after the other, sorts m values (Batcher, 1968)."""
    found: list[tuple[int, int]] = []
    most = 1 << ((m - 1).bit_length() - 1) if m > 1 else 0
    step = most
    while step:
        distance, part, far = step, 0, most
        while True:
            found += [(i, i + distance) for i in range(m - distance) if i & step == part]
            if far == step:
                break
            distance, part, far = far - step, step, far // 2
        step //= 2
    return tuple(found)


class _Cuda:
    """The same on the GPU, panel by panel: float32 across the bus, float64 arithmetic there."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - a coordinator needs torch for this alone

        self._torch = torch

    def gram(self, panel: NDArray[Any], space: Space) -> Matrix:
        block = self._torch.from_numpy(panel).to("cuda").double()
        K: Matrix = (block @ block.T).cpu().numpy()
        return K

    def combine(self, c: Matrix, panel: NDArray[Any], space: Space) -> Matrix:
        block = self._torch.from_numpy(panel).to("cuda").double()
        direction: Matrix = (self._torch.from_numpy(c).to("cuda") @ block).cpu().numpy()
        return direction

    def trimmed_mean(
        self, matrix: Matrix | None, trim: int, panel: NDArray[Any], space: Space, *, products: bool
    ) -> tuple[Matrix, Matrix]:
        block = self._torch.from_numpy(panel).to("cuda").double()
        values = block if matrix is None else self._torch.from_numpy(matrix).to("cuda") @ block
        values = values.sort(dim=0).values
        direction = values[trim : len(values) - trim].mean(dim=0)
        along = (block @ direction).cpu().numpy() if products else np.zeros(len(panel))
        return direction.cpu().numpy(), along
