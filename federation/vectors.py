"""A model as one flat float32 vector, kept in safetensors files.

A model file holds the trainable parameters in layout order, float32, without holes: its data section is the flat vector
(d,) itself, and can be mapped or streamed as such. An update file holds one one-dimensional tensor per row of the
update matrix, named by its objective. Our header is a function of the layout alone, so equal vectors are equal files.

The format: 8 bytes little-endian length N, N bytes of JSON (name -> dtype, shape, data_offsets), the data. What
arrives from others is parsed strictly here: it is about to be mapped.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.digests import DEFAULT_ALGORITHM, hasher
from federation.refusals import Refusal

MAX_HEADER_BYTES = 1_000_000
FLOAT_BYTES = 4
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 2**48
# Small enough to stay in a core's cache between the digest and the look at the values, large enough for a wide BLAKE3.
_CHECK_BYTES = 1 << 17
# Elements that are squared at a time: below the length from which the linear algebra library starts threads.
_SQUARED_AT_A_TIME = 1 << 12

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Tensor:
    """One float32 tensor of a layout; `shape` () is a scalar."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a file, in the order of their data.

    Raises:
        ValueError: no tensor, an empty or repeated name, or a tensor without elements.
    """

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if not names:
            raise ValueError("a layout needs at least one tensor")
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"tensor {repeated!r} appears twice in the layout")
        for tensor in self.tensors:
            if not tensor.name or tensor.name == "__metadata__":
                raise ValueError(f"{tensor.name!r} cannot name a tensor")
            if any("\ud800" <= character <= "\udfff" for character in tensor.name):
                raise ValueError(f"{tensor.name[:80]!r} cannot name a tensor: it is no Unicode text")
            if any(length < 1 for length in tensor.shape):
                raise ValueError(f"tensor {tensor.name!r} of shape {list(tensor.shape)} has no elements")

    @cached_property
    def size(self) -> int:
        """Number of elements of all tensors: d."""
        return sum(tensor.size for tensor in self.tensors)

    def header(self) -> bytes:
        """The bytes in front of the data: length and JSON, padded with spaces to a multiple of 8.

        Raises:
            ValueError: more than `MAX_HEADER_BYTES` bytes of names and shapes.
        """
        return self._header

    @cached_property
    def _header(self) -> bytes:
        entries: dict[str, Any] = {}
        begin = 0
        for tensor in self.tensors:
            end = begin + FLOAT_BYTES * tensor.size
            entries[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"the header takes {len(text)} bytes; at most {MAX_HEADER_BYTES} are accepted anywhere")
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @property
    def file_bytes(self) -> int:
        """Size of a file of this layout, header included."""
        return len(self.header()) + FLOAT_BYTES * self.size


@dataclass(frozen=True)
class RowFile:
    """One row of the update matrix (or a whole model) inside a file.

    Attributes:
        path: the file.
        offset: where the row starts, in bytes.
        length: d, in elements.
    """

    path: Path
    offset: int
    length: int

    def read(self) -> Vector:
        """The row, mapped read-only, shape (length,)."""
        return np.memmap(self.path, dtype="<f4", mode="r", offset=self.offset, shape=(self.length,))


def parse_header(prefix: bytes | memoryview) -> tuple[Layout, int]:
    """Reads the header of a safetensors file.

    Args:
        prefix: the file's first bytes, at least to the end of its header.

    Returns:
        The layout, and where the data begins, in bytes.

    Raises:
        Refusal: `limit:header` (longer than `MAX_HEADER_BYTES`), `dtype` (anything but F32), `layout` (not a
            safetensors header; holes, overlaps, repeated names, shapes that do not fit; a tensor without elements).
    """
    length = _header_length(prefix)
    end = _LENGTH_BYTES + length
    if len(prefix) < end:
        raise Refusal("layout", f"the file ends inside its header of {length} bytes, after {len(prefix)} bytes")
    try:
        document = json.loads(bytes(prefix[_LENGTH_BYTES:end]).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Refusal("layout", f"the header is not the JSON of a safetensors file: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise Refusal("layout", "the header of a safetensors file is a JSON object; this one is not")
    document.pop("__metadata__", None)
    placed = sorted((_entry(name, entry) for name, entry in document.items()), key=lambda item: item[1:])
    position = 0
    for tensor, begin, stop in placed:
        if begin != position:
            kind = "a hole" if begin > position else "an overlap"
            raise Refusal("layout", f"{kind} before tensor {tensor.name[:80]!r}: data at {begin}, expected {position}")
        position = stop
    try:
        return Layout(tuple(tensor for tensor, _, _ in placed)), end
    except ValueError as error:
        raise Refusal("layout", str(error)[:300]) from None


def model_layout(path: Path) -> Layout:
    """The layout of a model or update file.

    Raises:
        Refusal: as `parse_header`, and `layout` when the file is shorter or longer than its header says.
    """
    return _open(path)[0]


def update_layout(rows: Sequence[tuple[str, int]]) -> Layout:
    """The layout of an update file: one one-dimensional tensor for each (objective, length), in this order."""
    return Layout(tuple(Tensor(objective, (length,)) for objective, length in rows))


def to_bytes(layout: Layout, vector: Vector) -> bytes:
    """The file that holds `vector` (d,) in this layout.

    Raises:
        ValueError: not a float32 vector of the layout's size.
    """
    return layout.header() + _data(layout, vector).tobytes()


def write_vectors(path: Path, layout: Layout, vector: Vector) -> None:
    """Writes `vector` (d,) as a file of this layout.

    Raises:
        ValueError: not a float32 vector of the layout's size.
    """
    data = _data(layout, vector)
    with path.open("wb") as file:
        file.write(layout.header())
        file.write(data.data)


def read_vector(path: Path) -> tuple[Layout, Vector]:
    """A file's layout and its data as one vector (d,), mapped read-only.

    Raises:
        Refusal: as `model_layout`.
    """
    layout, offset = _open(path)
    return layout, RowFile(path, offset, layout.size).read()


def model_row(path: Path) -> RowFile:
    """A model file as one row (d,).

    Raises:
        Refusal: as `model_layout`.
    """
    layout, offset = _open(path)
    return RowFile(path, offset, layout.size)


def update_rows(path: Path) -> dict[str, RowFile]:
    """The rows of an update file by objective, in file order.

    Raises:
        Refusal: as `model_layout`, and `layout` for a tensor that is not one-dimensional.
    """
    layout, offset = _open(path)
    rows = {}
    for tensor in layout.tensors:
        if len(tensor.shape) != 1:
            raise Refusal("layout", f"row {tensor.name[:80]!r} has shape {list(tensor.shape)}; a row is a vector")
        rows[tensor.name] = RowFile(path, offset, tensor.size)
        offset += FLOAT_BYTES * tensor.size
    return rows


class PayloadCheck:
    """Checks an arriving payload in one pass: digest, layout, finite values, and the norm of each row.

    A problem with the content does not stop the reading: it is kept in `problem`, so that the digest of the whole is
    known first, and a damaged transfer is told from a bad update. Memory: the header, three bytes, and a small buffer.

    Attributes:
        problem: what is wrong with the content: `limit:header`, `layout`, `dtype` or `non-finite`; None while nothing
            is. Complete after `finish`.
        norms: the Euclidean norm of each tensor by its name, computed in float64, in the order of the layout. Zero
            exactly where every element is zero. Complete after `finish` where there is no problem. Whether a norm is a
            fault is the caller's policy.
    """

    def __init__(self, layout: Layout, algorithm: str = DEFAULT_ALGORITHM) -> None:
        """Expects a file of `layout`; the digest is made with `algorithm` (see federation.digests)."""
        self.problem: Refusal | None = None
        self.norms: dict[str, float] = {}
        self._layout = layout
        self._algorithm = algorithm
        self._hasher = hasher(algorithm)
        self._header: bytearray | None = bytearray()  # None once it has been read
        self._split = b""  # the first bytes of an element whose rest is in the next chunk
        self._row = 0
        self._left = layout.tensors[0].size  # elements still missing from the current row
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
                    self._look(piece)
                except Refusal as problem:
                    self.problem = problem

    def finish(self) -> str:
        """Ends the payload.

        Returns:
            The digest of everything fed, with its algorithm in front.
        """
        if self.problem is None and (self._header is not None or self._row < len(self._layout.tensors) or self._split):
            self.problem = Refusal("layout", "the payload ends before its last tensor does")
        return f"{self._algorithm}:{self._hasher.hexdigest()}"

    def _look(self, piece: memoryview) -> None:
        if self._header is not None:
            piece = self._look_at_header(self._header, piece)
        if self._split:
            missing = FLOAT_BYTES - len(self._split)
            self._split += bytes(piece[:missing])
            piece = piece[missing:]
            if len(self._split) < FLOAT_BYTES:
                return
            self._look_at_values(np.frombuffer(self._split, dtype="<f4"))
        whole = len(piece) // FLOAT_BYTES * FLOAT_BYTES
        self._split = bytes(piece[whole:])
        if whole:
            self._look_at_values(np.frombuffer(piece[:whole], dtype="<f4"))

    def _look_at_header(self, header: bytearray, piece: memoryview) -> memoryview:
        # First the length alone, so that an absurd one is refused before anything is kept for it.
        piece = _move(piece, header, _LENGTH_BYTES)
        if len(header) < _LENGTH_BYTES:
            return piece
        end = _LENGTH_BYTES + _header_length(header)
        piece = _move(piece, header, end)
        if len(header) < end:
            return piece
        layout, _ = parse_header(bytes(header))
        if layout != self._layout:
            raise Refusal("layout", _difference(layout, self._layout))
        self._header = None
        return piece

    def _look_at_values(self, values: Vector) -> None:
        while len(values):
            if self._row == len(self._layout.tensors):
                raise Refusal("layout", "the payload goes on after its last tensor")
            name = self._layout.tensors[self._row].name
            part = values[: self._left]
            low, high = float(part.min()), float(part.max())  # NaN wins in both
            if not (math.isfinite(low) and math.isfinite(high)):
                raise Refusal("non-finite", f"row {name[:80]!r} holds NaN or infinite values")
            self._squares += self._sum_of_squares(part)
            self._left -= len(part)
            values = values[len(part) :]
            if self._left == 0:
                self.norms[name] = math.sqrt(self._squares)
                self._row += 1
                self._squares = 0.0
                if self._row < len(self._layout.tensors):
                    self._left = self._layout.tensors[self._row].size

    def _sum_of_squares(self, values: Vector) -> float:
        # A float32 squared is between 2**-298 and 2**256: float64 neither loses nor overflows.
        total = 0.0
        for start in range(0, len(values), _SQUARED_AT_A_TIME):
            part = values[start : start + _SQUARED_AT_A_TIME]
            wide = self._buffer[: len(part)]
            wide[:] = part
            total += float(wide @ wide)
        return total


def _move(piece: memoryview, header: bytearray, wanted: int) -> memoryview:
    missing = max(0, wanted - len(header))
    header += piece[:missing]
    return piece[missing:]


def _header_length(prefix: bytes | bytearray | memoryview) -> int:
    if len(prefix) < _LENGTH_BYTES:
        raise Refusal("layout", f"{len(prefix)} bytes are no safetensors file")
    length = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise Refusal("limit:header", f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are accepted")
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _entry(name: str, entry: Any) -> tuple[Tensor, int, int]:
    shown = name[:80]
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refusal("layout", f"tensor {shown!r} needs exactly dtype, shape and data_offsets")
    if entry["dtype"] != "F32":
        raise Refusal("dtype", f"tensor {shown!r} is {str(entry['dtype'])[:20]!r}; only F32 is accepted")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        raise Refusal("layout", f"tensor {shown!r} has an impossible shape")
    if not _naturals(offsets) or len(offsets) != 2:
        raise Refusal("layout", f"tensor {shown!r} has impossible data_offsets")
    tensor = Tensor(name, tuple(shape))
    begin, end = offsets
    if tensor.size > _MAX_ELEMENTS or end - begin != FLOAT_BYTES * tensor.size:
        raise Refusal("layout", f"tensor {shown!r}: its shape does not fill its {end - begin} bytes")
    return tensor, begin, end


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= 8 * _MAX_ELEMENTS for item in value)


def _difference(found: Layout, expected: Layout) -> str:
    if len(found.tensors) != len(expected.tensors):
        return f"{len(found.tensors)} tensors; the assignment asks for {len(expected.tensors)}"
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        if mine != theirs:
            return (
                f"tensor {mine.name[:80]!r} of shape {list(mine.shape)}; "
                f"the assignment asks for {theirs.name!r} of shape {list(theirs.shape)}"
            )
    raise AssertionError("the layouts are equal")


def _open(path: Path) -> tuple[Layout, int]:
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        prefix += file.read(_header_length(prefix))
        layout, offset = parse_header(prefix)
        found = file.seek(0, 2)
    if found != offset + FLOAT_BYTES * layout.size:
        expected = offset + FLOAT_BYTES * layout.size
        raise Refusal("layout", f"the file has {found} bytes; its header describes {expected}")
    return layout, offset


def _data(layout: Layout, vector: Vector) -> Vector:
    if vector.dtype != np.float32 or vector.shape != (layout.size,):
        raise ValueError(f"{vector.dtype} {vector.shape} is not the float32 ({layout.size},) of the layout")
    return np.ascontiguousarray(vector, dtype="<f4")
