"""Rows of one length, read in panels of columns: what the operations on d numbers are made of.

Rows are files (or arrays). Files are read with pread into fixed buffers: pages of a mapping would count as resident
memory, cost a fault each, and turn a truncated file into a SIGBUS instead of an exception. So memory depends neither
on m nor on d.

The same inputs give the same bytes: panels and sub-blocks are cut by m and d alone, partial results are handed out in
panel order whoever computed them, and the library below works with one thread (`one_thread`): with more, OpenBLAS cuts
products of matrices, and long dot products, by their number.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it has no stubs

from federation.vectors import DTYPES, FLOATS, File, RowFile, widen

Row = RowFile | NDArray[np.float32] | NDArray[np.float64]
Matrix = NDArray[np.float64]
T = TypeVar("T")

BLOCK = 8192  # columns of a sub-block at most
_PANEL_ELEMENTS = 1 << 21  # m x columns of a panel: 8 MiB of float32, shared caches hold it
_PANEL_COLUMNS = (1 << 12, 1 << 16)  # pieces of 16 to 256 KiB of a file: fewer, longer reads
_BLOCK_ELEMENTS = 1 << 16  # m x columns of a sub-block: 512 KiB of float64, a core's own cache
_OPEN_FILES = 256  # with more rows than this, files are opened anew for each read
_WORKERS = 8  # reading and arithmetic are bound by memory long before this


class Source(AbstractContextManager["Source"]):
    """Rows of one length, read panel by panel."""

    def __init__(self, rows: Sequence[Row]) -> None:
        lengths = {row.length if isinstance(row, RowFile) else len(row) for row in rows}
        if len(lengths) > 1:
            raise ValueError(f"rows of one matrix have one length; these have {sorted(lengths)}")
        for row in rows:
            if isinstance(row, RowFile) and row.dtype not in FLOATS:
                raise ValueError(f"rows of {row.dtype} are no numbers to aggregate: {row.file}")
        self.length = lengths.pop() if lengths else 0
        self._rows = rows
        self._open: dict[File, FileIO] = {}
        # Arrays that are wider than float32 keep their precision.
        wide = any(isinstance(row, np.ndarray) and row.dtype != np.float32 for row in rows)
        self._dtype = np.dtype(np.float64 if wide else np.float32)

    def __enter__(self) -> "Source":
        files = {row.file for row in self._rows if isinstance(row, RowFile)}
        if len(files) <= _OPEN_FILES:
            try:
                for file in files:
                    self._open[file] = file.open("rb", 0)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def panels(self) -> list[slice]:
        """Column ranges, cut by m and d alone."""
        least, most = _PANEL_COLUMNS
        columns = min(most, max(least, _PANEL_ELEMENTS // max(1, len(self._rows))))
        return [slice(start, min(start + columns, self.length)) for start in range(0, self.length, columns)]

    def read(self, panel: slice, space: "Space") -> NDArray[Any]:
        """The columns `panel` of all rows, shape (m, columns); in `space`, valid until the next call with it."""
        values = space.array("panel", (len(self._rows), panel.stop - panel.start), self._dtype)
        for row, out in zip(self._rows, values, strict=True):
            if isinstance(row, np.ndarray):
                out[:] = row[panel]
            else:
                narrow = row.dtype == "F32" and self._dtype == np.float32
                # Widened on the way, unless the file holds what the panel does.
                target = out if narrow else np.empty(len(out), dtype=DTYPES[row.dtype])
                self._read_file(row, panel.start, target)
                if not narrow:
                    out[:] = widen(target) if row.dtype == "BF16" else target
        return values

    def _read_file(self, row: RowFile, start: int, out: NDArray[Any]) -> None:
        file = self._open.get(row.file)
        if file is None:
            with row.file.open("rb", 0) as file:
                _pread(file, row, start, out)
        else:
            _pread(file, row, start, out)


class Space:
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


def widened(panel: NDArray[Any], space: Space) -> Iterator[tuple[slice, Matrix]]:
    """Sub-blocks of a panel and their columns, in float64; each is valid until the next."""
    m, columns = panel.shape
    width = min(BLOCK, max(256, _BLOCK_ELEMENTS // m))
    for start in range(0, columns, width):
        piece = panel[:, start : start + width]
        block = space.array("block", piece.shape, np.float64)
        np.copyto(block, piece)
        yield slice(start, start + piece.shape[1]), block


def in_order(work: Callable[[slice, Space], T], panels: Sequence[slice], workers: int | None) -> Iterator[T]:
    """Does the work on several threads; yields the results in order, a few panels ahead at most."""
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
        # Threads of BLAS below threads of ours would wait for each other besides, much longer than the work takes.
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
    """The linear algebra library that NumPy has loaded, and how many want it to work with one thread just now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._libraries = ThreadpoolController().select(user_api="blas")
        self._limits: Any = None

    def single(self) -> None:
        with self._lock:
            if self._wanted == 0:
                self._limits = self._libraries.limit(limits=1)
            self._wanted += 1

    def release(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                self._limits.restore_original_limits()


_BLAS = _Blas()


@contextmanager
def one_thread() -> Iterator[None]:
    """Products of matrices come out the same, bit by bit, however many threads the library below could use.

    The setting is the whole process's; it lasts until the last of those that overlap has ended.
    """
    _BLAS.single()
    try:
        yield
    finally:
        _BLAS.release()


def _pread(file: FileIO, row: RowFile, start: int, out: NDArray[Any]) -> None:
    view = out.data.cast("B")
    offset = row.offset + row.itemsize * start
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if count == 0:
            raise OSError(f"{row.file} ends at byte {offset}, inside a row of {row.length} elements")
        view = view[count:]
        offset += count
