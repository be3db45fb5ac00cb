"""The operations that touch d numbers: `gram`, K = U U^T, and `combine`, the direction c U.

Rows are files (or arrays). They are read in panels of columns, each panel in sub-blocks that stay in a core's cache,
widened to float64 there. Files are read with pread into fixed buffers: pages of a mapping would count as resident
memory, cost a fault each, and turn a truncated file into a SIGBUS instead of an exception. So memory depends neither
on m nor on d.

The same inputs give the same bytes: panels and sub-blocks are cut by m and d alone, partial results are added in
panel order whoever computed them, and a sub-block is short enough (`_BLOCK`) that OpenBLAS never splits a sum among its
threads: it splits long dot products only, and matrix products by their outputs.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it has no stubs

from federation.vectors import FLOAT_BYTES, RowFile

Row = RowFile | NDArray[np.float32] | NDArray[np.float64]
Matrix = NDArray[np.float64]
T = TypeVar("T")

_PANEL_ELEMENTS = 1 << 21  # m x columns of a panel: 8 MiB of float32, shared caches hold it
_PANEL_COLUMNS = (1 << 12, 1 << 16)  # pieces of 16 to 256 KiB of a file: fewer, longer reads
_BLOCK = 8192  # at most; below the 10,000 from which OpenBLAS splits a dot product
_BLOCK_ELEMENTS = 1 << 16  # m x columns of a sub-block: 512 KiB of float64, a core's own cache
_OPEN_FILES = 256  # with more rows than this, files are opened anew for each read
_WORKERS = 8  # reading and arithmetic are bound by memory long before this


@dataclass(frozen=True)
class StepNorms:
    """What `apply_step` saw on its way.

    Attributes:
        direction_norm: ||c U||, from the rows themselves, not from K.
    """

    direction_norm: float


def gram(rows: Sequence[Row], *, device: str = "cpu", workers: int | None = None) -> Matrix:
    """K = U U^T, shape (m, m), accumulated in float64 in one pass over the rows.

    Args:
        rows: m rows of d elements each; finite (not checked here).
        device: "cpu", or "cuda" to do the arithmetic on the GPU.
        workers: threads; None takes what the machine has. The result does not depend on it.

    Raises:
        ValueError: rows of different lengths.
        OSError: a file that cannot be read, or ends before its row does.
    """
    K = np.zeros((len(rows), len(rows)))
    arithmetic = _Cuda() if device == "cuda" else _Cpu(device)
    with _Source(rows) as source:

        def partial(panel: slice, space: _Space) -> Matrix:
            return arithmetic.gram(source.read(panel, space), space)

        for part in _in_order(partial, source.panels(), workers):
            K += part
    upper = np.triu(K)
    return upper + np.triu(K, 1).T


def combine(
    coefficients: Matrix, rows: Sequence[Row], *, device: str = "cpu", workers: int | None = None
) -> Iterator[Matrix]:
    """The direction c U, block by block.

    Rows whose coefficient is zero are not read.

    Args:
        coefficients: c, shape (m,).
        rows: as in `gram`.
        device: as in `gram`.
        workers: as in `gram`.

    Yields:
        Consecutive blocks of the direction, float64, d elements altogether.

    Raises:
        ValueError: rows of different lengths, or not as many as coefficients.
        OSError: as in `gram`.
    """
    c = np.asarray(coefficients, dtype=np.float64)
    if c.shape != (len(rows),):
        raise ValueError(f"coefficients of shape {c.shape} for {len(rows)} rows")
    used = np.flatnonzero(c).tolist()
    arithmetic = _Cuda() if device == "cuda" else _Cpu(device)
    every = _Source(rows)  # never opened: for its length
    with _Source([rows[i] for i in used]) as source:

        def part(panel: slice, space: _Space) -> Matrix:
            if not used:
                return np.zeros(panel.stop - panel.start)
            return arithmetic.combine(c[used], source.read(panel, space), space)

        yield from _in_order(part, source.panels() if used else every.panels(), workers)


def apply_step(
    base: Row,
    rate: float,
    coefficients: Matrix,
    rows: Sequence[Row],
    write: Callable[[memoryview], object],
    *,
    device: str = "cpu",
    workers: int | None = None,
) -> StepNorms:
    """Streams the new model, base - rate * c U, as little-endian float32.

    Args:
        base: w_t, d elements.
        rate: eta_t, the server's step.
        coefficients: c, shape (m,).
        rows: as in `gram`.
        write: takes the next piece of the new model; the piece is valid during the call only.
        device: as in `gram`.
        workers: as in `gram`.

    Raises:
        ValueError: as in `combine`, or rows of another length than the base.
        FloatingPointError: the new model would not be finite in float32. Some pieces have been written by then.
        OSError: as in `gram`.
    """
    squares = 0.0
    space = _Space()
    length = _Source([base, *rows]).length  # never opened: for its length
    with _Source([base]) as source:
        position = 0
        blocks = combine(coefficients, rows, device=device, workers=workers) if rows else _zeros(length)
        for direction in blocks:
            panel = slice(position, position + len(direction))
            squares += sum(float(np.dot(part, part)) for part in _split(direction))
            with np.errstate(over="ignore", invalid="ignore"):
                model = (source.read(panel, space)[0] - rate * direction).astype("<f4")
            if not np.isfinite(model).all():
                raise FloatingPointError(
                    f"the step leaves the range of float32 between elements {panel.start} and {panel.stop}: "
                    f"rate {rate:g}, direction up to {np.abs(direction).max():g}"
                )
            write(model.data.cast("B"))
            position = panel.stop
    return StepNorms(direction_norm=float(np.sqrt(squares)))


class _Source(AbstractContextManager["_Source"]):
    """Rows of one length, read panel by panel."""

    def __init__(self, rows: Sequence[Row]) -> None:
        lengths = {row.length if isinstance(row, RowFile) else len(row) for row in rows}
        if len(lengths) > 1:
            raise ValueError(f"rows of one matrix have one length; these have {sorted(lengths)}")
        self.length = lengths.pop() if lengths else 0
        self._rows = rows
        self._open: dict[Path, int] = {}
        # Arrays that are wider than float32 keep their precision.
        wide = any(isinstance(row, np.ndarray) and row.dtype != np.float32 for row in rows)
        self._dtype = np.dtype(np.float64 if wide else np.float32)

    def __enter__(self) -> "_Source":
        paths = {row.path for row in self._rows if isinstance(row, RowFile)}
        if len(paths) <= _OPEN_FILES:
            try:
                for path in sorted(paths):
                    self._open[path] = os.open(path, os.O_RDONLY)
            except OSError:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def panels(self) -> list[slice]:
        """Column ranges, cut by m and d alone."""
        least, most = _PANEL_COLUMNS
        columns = min(most, max(least, _PANEL_ELEMENTS // max(1, len(self._rows))))
        return [slice(start, min(start + columns, self.length)) for start in range(0, self.length, columns)]

    def read(self, panel: slice, space: "_Space") -> NDArray[Any]:
        """The columns `panel` of all rows, shape (m, columns); in `space`, valid until the next call with it."""
        values = space.array("panel", (len(self._rows), panel.stop - panel.start), self._dtype)
        for row, out in zip(self._rows, values, strict=True):
            if isinstance(row, np.ndarray):
                out[:] = row[panel]
            else:
                # Widened on the way where an array of float64 stands beside it.
                target = out if self._dtype == np.float32 else np.empty(len(out), dtype=np.float32)
                self._read_file(row, panel.start, target)
                if target is not out:
                    out[:] = target
        return values

    def _read_file(self, row: RowFile, start: int, out: NDArray[np.float32]) -> None:
        descriptor = self._open.get(row.path)
        if descriptor is None:
            with row.path.open("rb", buffering=0) as file:
                _pread(file.fileno(), row, start, out)
        else:
            _pread(descriptor, row, start, out)


class _Space:
    """Buffers of one thread, kept from panel to panel: fresh pages cost more than what is computed in them."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array with arbitrary content; the next one of the same name takes its memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = np.empty(size, dtype=np.uint8)
        array: NDArray[Any] = self._buffers[name][:size].view(dtype).reshape(shape)
        return array


class _Cpu:
    def __init__(self, device: str) -> None:
        if device != "cpu":
            raise ValueError(f"device {device!r}: gram and combine run on 'cpu' or 'cuda'")

    def gram(self, panel: NDArray[Any], space: _Space) -> Matrix:
        m = len(panel)
        K = np.zeros((m, m))
        part = np.empty((m, m))
        for _, block in _widened(panel, space):
            K += np.dot(block, block.T, out=part)  # a syrk; np.matmul would keep the interpreter lock for small m
        return K

    def combine(self, c: Matrix, panel: NDArray[Any], space: _Space) -> Matrix:
        direction = np.empty(panel.shape[1])
        for columns, block in _widened(panel, space):
            np.dot(c, block, out=direction[columns])
        return direction


class _Cuda:
    """The same on the GPU, panel by panel: float32 across the bus, float64 arithmetic there."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - a coordinator needs torch for this alone

        self._torch = torch

    def gram(self, panel: NDArray[Any], space: _Space) -> Matrix:
        block = self._torch.from_numpy(panel).to("cuda").double()
        K: Matrix = (block @ block.T).cpu().numpy()
        return K

    def combine(self, c: Matrix, panel: NDArray[Any], space: _Space) -> Matrix:
        block = self._torch.from_numpy(panel).to("cuda").double()
        direction: Matrix = (self._torch.from_numpy(c).to("cuda") @ block).cpu().numpy()
        return direction


def _widened(panel: NDArray[Any], space: _Space) -> Iterator[tuple[slice, Matrix]]:
    """Sub-blocks of a panel and their columns, in float64; each is valid until the next."""
    m, columns = panel.shape
    width = min(_BLOCK, max(256, _BLOCK_ELEMENTS // m))
    for start in range(0, columns, width):
        piece = panel[:, start : start + width]
        block = space.array("block", piece.shape, np.float64)
        np.copyto(block, piece)
        yield slice(start, start + piece.shape[1]), block


def _split(direction: Matrix) -> Iterator[Matrix]:
    for start in range(0, len(direction), _BLOCK):
        yield direction[start : start + _BLOCK]


def _zeros(length: int) -> Iterator[Matrix]:
    for start in range(0, length, _PANEL_COLUMNS[1]):
        yield np.zeros(min(_PANEL_COLUMNS[1], length - start))


def _pread(descriptor: int, row: RowFile, start: int, out: NDArray[np.float32]) -> None:
    view = out.data.cast("B")
    offset = row.offset + FLOAT_BYTES * start
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError(f"{row.path} ends at byte {offset}, inside a row of {row.length} elements")
        view = view[count:]
        offset += count


def _in_order(work: Callable[[slice, _Space], T], panels: Sequence[slice], workers: int | None) -> Iterator[T]:
    """Does the work on several threads; yields the results in order, a few panels ahead at most."""
    count = workers or min(_WORKERS, len(os.sched_getaffinity(0)))
    if count == 1 or len(panels) < 2:
        space = _Space()
        yield from (work(panel, space) for panel in panels)
        return
    spaces: SimpleQueue[_Space] = SimpleQueue()
    for _ in range(count):
        spaces.put(_Space())

    def in_a_space(panel: slice) -> T:
        space = spaces.get_nowait()
        try:
            return work(panel, space)
        finally:
            spaces.put(space)

    pool = ThreadPoolExecutor(count, thread_name_prefix="aggregation")
    # Threads of BLAS below threads of ours wait for each other, many times longer than the work takes.
    single = threadpool_limits(1, user_api="blas")
    try:
        ahead: deque[Future[T]] = deque()
        for panel in panels:
            ahead.append(pool.submit(in_a_space, panel))
            if len(ahead) > count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        single.restore_original_limits()
