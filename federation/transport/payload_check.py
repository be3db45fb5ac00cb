"""Checks a payload while it arrives, so that it is read once and never held in memory."""

import math

import numpy as np

from federation.digests import DEFAULT_ALGORITHM, hasher
from federation.refusals import Refusal
from federation.vectors import (
    DTYPES,
    FLOATS,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Layout,
    Tensor,
    Vector,
    header_length,
    layout_difference,
    parse_header,
    widen,
)

# Small enough to stay in a core's cache between digest and check, large enough for BLAKE3's widest instructions.
_CHECK_BYTES = 1 << 17
# Elements that are squared at a time: below the length from which the linear algebra library starts threads.
_SQUARED_AT_A_TIME = 1 << 12
_MAX_ROWS_BYTES = 1_000_000  # of the header of a reply, which has a tensor for each row; many members send at once


class PayloadCheck:
    """Checks an arriving payload in one pass: digest, layout, finite values, and the norm of each row.

    A problem with the content does not stop the reading: it is kept in `problem`, so that the digest of the whole is
    known first. It distinguishes a damaged transfer from a bad update. Memory: the header, three bytes, and a small
    buffer.

    Attributes:
        layout: of the file; None until the header has been read, if none was expected.
        problem: the error of the content: `limit:header`, `layout`, `dtype` or `non-finite`; None without one.
            Complete after `finish`.
        norms: the Euclidean norm of each tensor of floating-point numbers by its name, in float64 and in the order of
            the layout. Zero exactly where every element is zero. Complete after `finish` if there is no problem.
    """

    def __init__(self, layout: Layout | None, algorithm: str = DEFAULT_ALGORITHM) -> None:
        """Expects a file of `layout`, or, if it is None, of float32 tensors; `algorithm` is that of the digest."""
        self.layout = layout
        self.problem: Refusal | None = None
        self.norms: dict[str, float] = {}
        self._tensors = layout.tensors if layout is not None else ()
        self._algorithm = algorithm
        self._hasher = hasher(algorithm)
        self._header: bytearray | None = bytearray()  # None once it has been read
        self._split = b""  # the first bytes of an element whose rest is in the next chunk
        self._row = 0
        self._left = 0  # missing bytes of the current row
        self._squares = 0.0  # the sum of the squares of the current row so far; at most 2**48 times 2**256
        self._buffer = np.empty(_SQUARED_AT_A_TIME)

    def feed(self, chunk: bytes | memoryview) -> None:
        """Takes in the next piece, of any size."""
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), _CHECK_BYTES):
            piece = view[start : start + _CHECK_BYTES]
            self._hasher.update(piece)
            if self.problem is None:
                try:
                    self._check(piece)
                except Refusal as problem:
                    self.problem = problem

    def finish(self) -> str:
        """Ends the payload; returns the digest of everything fed, with its algorithm in front."""
        if self.problem is None and (self._header is not None or self._row < len(self._tensors) or self._split):
            self.problem = Refusal("layout", "the payload ends before its last tensor does")
        return f"{self._algorithm}:{self._hasher.hexdigest()}"

    def _check(self, piece: memoryview) -> None:
        if self._header is not None:
            piece = self._check_header(self._header, piece)
        while len(piece):
            if self._row == len(self._tensors):
                raise Refusal("layout", "the payload goes on after its last tensor")
            width = DTYPES[self._tensors[self._row].dtype].itemsize
            count = width - len(self._split) if self._split else min(len(piece), self._left) // width * width or width
            values, piece = self._split + piece[:count] if self._split else piece[:count], piece[count:]
            if len(values) < width:
                self._split = bytes(values)
                return
            self._split = b""
            self._check_values(self._tensors[self._row], values)

    def _check_header(self, header: bytearray, piece: memoryview) -> memoryview:
        # First the length alone, so that a huge one is refused before any memory is used for it.
        piece = _move(piece, header, LENGTH_BYTES)
        if len(header) < LENGTH_BYTES:
            return piece
        end = LENGTH_BYTES + header_length(header, MAX_HEADER_BYTES if self.layout is None else _MAX_ROWS_BYTES)
        piece = _move(piece, header, end)
        if len(header) < end:
            return piece
        layout, _ = parse_header(bytes(header), {tensor.dtype for tensor in self._tensors} or {"F32"})
        if self.layout is not None and layout != self.layout:
            raise Refusal("layout", layout_difference(layout, self.layout))
        self.layout, self._tensors = layout, layout.tensors
        self._left = layout.tensors[0].bytes
        self._header = None
        return piece

    def _check_values(self, tensor: Tensor, data: bytes | memoryview) -> None:
        if tensor.dtype in FLOATS:
            values = np.frombuffer(data, dtype=DTYPES[tensor.dtype])
            values = widen(values) if tensor.dtype == "BF16" else values
            self._squares += self._sum_of_squares(values)
            if not math.isfinite(self._squares):  # the sum of the squares of finite numbers is finite
                raise Refusal("non-finite", f"row {tensor.name[:80]!r} holds NaN or infinite values")
        self._left -= len(data)
        if self._left == 0:
            if tensor.dtype in FLOATS:
                self.norms[tensor.name] = math.sqrt(self._squares)
            self._row += 1
            self._squares = 0.0
            if self._row < len(self._tensors):
                self._left = self._tensors[self._row].bytes

    def _sum_of_squares(self, values: Vector) -> float:
        # A float32 squared is between 2**-298 and 2**256: float64 neither loses nor overflows.
        total = 0.0
        with np.errstate(invalid="ignore"):  # NaN, which gives NaN
            for start in range(0, len(values), _SQUARED_AT_A_TIME):
                part = values[start : start + _SQUARED_AT_A_TIME]
                wide = self._buffer[: len(part)]
                wide[:] = part
                total += float(wide @ wide)
        return total


def _move(piece: memoryview, header: bytearray, length: int) -> memoryview:
    missing = max(0, length - len(header))
    header += piece[:missing]
    return piece[missing:]
