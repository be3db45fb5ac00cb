"""Rows of one length, read in panels of columns, for the operations on d numbers.

Rows are files (or arrays). Files are read with pread into fixed buffers: pages of a mapping would count as resident
memory, cost a fault each, and turn a truncated file into a SIGBUS instead of an exception. So memory depends neither
on m nor on d.

The same inputs give the same bytes: panels and sub-blocks are cut by m and d alone, partial results are yielded in
panel order, and the linear algebra library works with one thread (`one_thread`): with more, OpenBLAS cuts products of
matrices, and long dot products, by the number of threads.
"""

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from io import FileIO
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from federation.aggregation.interface import Matrix
from federation.vectors import DTYPES, FLOATS, File, RowFile, widen

Row = RowFile | NDArray[np.float32] | NDArray[np.float64]
T = TypeVar("T")

BLOCK = 8192  # columns of a sub-block at most
_PANEL_ELEMENTS = 1 << 21  # m x columns of a panel: 8 MiB of float32, shared caches hold it
_PANEL_COLUMNS = (1 << 12, 1 << 16)  # pieces of 16 to 256 KiB of a file: fewer, longer reads
_BLOCK_ELEMENTS = 1 << 16  # m x columns of a sub-block: 512 KiB of float64, a core's own cache
_STRIP = 1 << 12  # columns of a piece: 16 rows of them fill a sub-block
_MANY_ROWS = 256
_PRODUCT_ELEMENTS = 1 << 22  # m x columns of a sub-block of more rows whose products are made: 32 MiB of float64
_OPEN_FILES = 256  # with more rows than this, files are opened anew for each read
_WORKERS = 8  # reading and arithmetic are bound by memory long before this


class Source:
    """Rows of one length, read panel by panel inside `opened`."""

    def __init__(self, rows: Sequence[Row]) -> None:
        lengths = {row.length if isinstance(row, RowFile) else len(row) for row in rows}
        if len(lengths) > 1:
            raise ValueError(f"rows of one matrix have one length; these have {sorted(lengths)}")
        for row in rows:
            if isinstance(row, RowFile) and row.dtype not in FLOATS:
                raise ValueError(f"rows of {row.dtype} are not numbers to aggregate: {row.file}")
        self.length = lengths.pop() if lengths else 0
        self._rows = rows
        self._open: dict[File, FileIO] = {}
        # Arrays that are wider than float32 keep their precision.
        wide = any(isinstance(row, np.ndarray) and row.dtype != np.float32 for row in rows)
        self._dtype = np.dtype(np.float64 if wide else np.float32)

    @classmethod
    @contextmanager
    def opened(cls, rows: Sequence[Row]) -> Iterator["Source"]:
        """The rows with their files open, unless there are too many."""
        source = cls(rows)
        files = {row.file for row in rows if isinstance(row, RowFile)}
        with ExitStack() as stack:
            if len(files) <= _OPEN_FILES:
                source._open = {file: stack.enter_context(file.open("rb", 0)) for file in files}
            yield source

    def panels(self) -> list[slice]:
        """Column ranges, cut by m and d alone."""
        least, most = _PANEL_COLUMNS
        columns = min(most, max(least, _PANEL_ELEMENTS // max(1, len(self._rows))))
        return [slice(start, min(start + columns, self.length)) for start in range(0, self.length, columns)]

    def read(self, panel: slice, space: "Space") -> NDArray[Any]:
        """The columns `panel` of all rows, shape (m, columns); in `space`, valid until the next call with it."""
        values = space.array("panel", (len(self._rows), panel.stop - panel.start), self._dtype)
        self._fill(values, self._rows, panel, space)
        return values

    def pieces(self, panel: slice, space: "Space") -> Iterator[tuple[slice, Matrix]]:
        """Some rows at a time, and their columns `panel` in float64; each is valid until the next."""
        columns = panel.stop - panel.start
        count = max(1, _BLOCK_ELEMENTS // columns)
        for start in range(0, len(self._rows), count):
            some = slice(start, min(start + count, len(self._rows)))
            block = space.array("block", (some.stop - start, columns), np.float64)
            self._fill(block, self._rows[some], panel, space)
            yield some, block

    @staticmethod
    def strips(panel: slice) -> list[slice]:
        """The columns of a panel in ranges of which `pieces` takes several rows at a time."""
        ends = [*range(panel.start, panel.stop, _STRIP), panel.stop]
        return [slice(start, stop) for start, stop in itertools.pairwise(ends)]

    def _fill(self, values: NDArray[Any], rows: Sequence[Row], panel: slice, space: "Space") -> None:
        for row, out in zip(rows, values, strict=True):
            if isinstance(row, np.ndarray):
                out[:] = row[panel]
            else:
                same = row.dtype == "F32" and values.dtype == np.float32  # as in the panel: read without a copy
                target = out if same else space.array("piece", (len(out),), DTYPES[row.dtype])
                self._read_file(row, panel.start, target)
                if not same:
                    out[:] = widen(target) if row.dtype == "BF16" else target

    def _read_file(self, row: RowFile, start: int, out: NDArray[Any]) -> None:
        view, offset = out.data.cast("B"), row.offset + row.itemsize * start
        open_file = self._open.get(row.file)
        with row.file.open("rb", 0) if open_file is None else nullcontext(open_file) as file:
            while view:
                count = os.preadv(file.fileno(), [view], offset)
                if count == 0:
                    raise OSError(f"{row.file} ends at byte {offset}, inside a row of {row.length} elements")
                view = view[count:]
                offset += count


class Space:
    """Buffers of one thread, kept from panel to panel: fresh pages would cost more than the arithmetic."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array with arbitrary content; the next one of the same name takes its memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = np.empty(size, dtype=np.uint8)
        array: NDArray[Any] = self._buffers[name][:size].view(dtype).reshape(shape)
        return array


def widened(panel: NDArray[Any], space: Space, *, products: bool = False) -> Iterator[tuple[slice, Matrix]]:
    """Sub-blocks of a panel and their columns, in float64; each is valid until the next.

    With `products`, those of many rows are wide: to add m x m products takes as long as to make some columns of them.
    """
    for columns in sub_blocks(panel, products=products):
        piece = panel[:, columns]
        block = space.array("block", piece.shape, np.float64)
        np.copyto(block, piece)
        yield columns, block


def sub_blocks(panel: NDArray[Any], *, products: bool = False) -> list[slice]:
    """The ranges of columns of the sub-blocks of a panel, as of `widened`."""
    m, columns = panel.shape
    width = max(256, _BLOCK_ELEMENTS // m)
    if products and m > _MANY_ROWS:
        width = max(m, _PRODUCT_ELEMENTS // m)
    width = min(BLOCK, width)
    return [slice(start, min(start + width, columns)) for start in range(0, columns, width)]


def in_order(work: Callable[[slice, Space], T], panels: Sequence[slice], workers: int | None) -> Iterator[T]:
    """Does the work on several threads, a few panels ahead at most; yields the results in order."""
    count = workers or min(_WORKERS, len(os.sched_getaffinity(0)))
    if count == 1 or len(panels) < 2:
        space = Space()
        for panel in panels:
            with one_thread():
                result = work(panel, space)
            yield result
        return
    spaces: SimpleQueue[Space] = SimpleQueue()
    for _ in range(count):
        spaces.put(Space())

    def in_a_space(panel: slice) -> T:
        space = spaces.get_nowait()
        try:
            return work(panel, space)
        finally:
            spaces.put(space)

    pool = ThreadPoolExecutor(count, thread_name_prefix="aggregation")
    try:
        # Threads of BLAS below these threads would also wait for each other, much longer than the work takes.
        with one_thread():
            ahead: deque[Future[T]] = deque()
            for panel in panels:
                ahead.append(pool.submit(in_a_space, panel))
                if len(ahead) > count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class _Blas:
    """The linear algebra library that NumPy has loaded, and the number of callers that need it to use one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers = 0
        self._libraries = ThreadpoolController().select(user_api="blas")
        self._limits: Any = None

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Inside, products of matrices are the same, bit by bit, on machines with any number of cores.

        The setting holds for the whole process. If calls overlap, it holds until the last one has ended.
        """
        with self._lock:
            if self._callers == 0:
                self._limits = self._libraries.limit(limits=1)
            self._callers += 1
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                if self._callers == 0:
                    self._limits.restore_original_limits()


one_thread = _Blas().one_thread
