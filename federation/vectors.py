"""A model as one flat float32 vector, kept in safetensors files.

A model file holds the trainable parameters in layout order, float32, without holes: its data section is the flat vector
(d,) itself. A payload file holds one one-dimensional tensor for each row of a reply: float32 (F32), bfloat16 (BF16),
unsigned integers (U32) or bytes (U8). Our header is a function of the layout alone, so equal vectors are equal files.

The format: 8 bytes little-endian length N, N bytes of JSON (name -> dtype, shape, data_offsets), the data. Foreign
files are parsed strictly, because they are mapped into memory afterwards.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from federation.files.json_entries import entries
from federation.refusals import Refusal
from federation.tensor_names import tensor_differences

MAX_HEADER_BYTES = 10_000_000  # of a model on record: about 70,000 tensors with names of 80 characters
MAX_EXPORTED_BYTES = MAX_HEADER_BYTES + 4096  # of the header of a file with metadata about the origin of its model
LENGTH_BYTES = 8  # of the length in front of a header
METADATA = "__metadata__"
_MAX_METADATA = 1_000_000  # characters
_MAX_ENTRY = 1000  # characters of dtype, shape and data_offsets of a tensor
_MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**48

Vector = NDArray[np.float32]
Array = NDArray[Any]

# The element types, as safetensors names them. NumPy has no bfloat16: its 16 bits are the upper half of a float32.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "U32": np.dtype("<u4"), "U8": np.dtype("u1")}
)
FLOATS = frozenset({"F32", "BF16"})  # those that aggregation reads
# The types of files that other programs wrote. The 8-bit floats are read as their bits, since NumPy has none.
FOREIGN_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        **DTYPES,
        **{"F64": np.dtype("<f8"), "F16": np.dtype("<f2"), "C64": np.dtype("<c8"), "BOOL": np.dtype("?")},
        **{f"I{8 * width}": np.dtype(f"<i{width}") for width in (1, 2, 4, 8)},
        **{f"U{8 * width}": np.dtype(f"<u{width}") for width in (2, 8)},
        **{name: np.dtype("u1") for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0")},
    }
)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a layout; `shape` () is a scalar."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        return self.size * FOREIGN_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Layout:
    """The tensors of a file, in the order of their data.

    Raises:
        ValueError: no tensor, an empty or repeated name, an unknown element type, or a tensor without elements.
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
            if not tensor.name or tensor.name == METADATA:
                raise ValueError(f"{tensor.name!r} cannot name a tensor")
            if not tensor.name.isascii() and any("\ud800" <= character <= "\udfff" for character in tensor.name):
                raise ValueError(f"{tensor.name[:80]!r} cannot name a tensor: it is no Unicode text")
            if tensor.dtype not in DTYPES:
                raise ValueError(f"tensor {tensor.name!r} is {tensor.dtype!r}; there are {', '.join(DTYPES)}")
            if any(length < 1 for length in tensor.shape):
                raise ValueError(f"tensor {tensor.name!r} of shape {list(tensor.shape)} has no elements")

    @cached_property
    def size(self) -> int:
        """Number of elements of all tensors: d."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def header(self) -> bytes:
        """The bytes in front of the data: length and JSON, padded with spaces to a multiple of 8.

        Raises:
            ValueError: more than `MAX_HEADER_BYTES` bytes of names and shapes.
        """
        entries: dict[str, Any] = {}
        begin = 0
        for tensor in self.tensors:
            end = begin + tensor.bytes
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(f"the header takes {len(text)} bytes; at most {MAX_HEADER_BYTES} are accepted anywhere")
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @property
    def file_bytes(self) -> int:
        """Size of a file of this layout, header included."""
        return len(self.header) + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """Size of the data of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    def split(self, vector: Vector) -> dict[str, Vector]:
        """The tensors of a flat vector (d,) by name: views with their shapes."""
        ends = np.cumsum([tensor.size for tensor in self.tensors])[:-1]
        parts = zip(self.tensors, np.split(vector, ends), strict=True)
        return {tensor.name: part.reshape(tensor.shape) for tensor, part in parts}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by name."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    def join(self, arrays: Mapping[str, Any], buffers: Collection[str] = ()) -> Vector:
        """The flat vector (d,) of these tensors, float32; `buffers` names those that an error calls buffers.

        Raises:
            ValueError: names or shapes are not the layout's; the message lists those that differ.
        """
        parts = {name: np.asarray(array, dtype=np.float32) for name, array in arrays.items()}
        given = {name: part.shape for name, part in parts.items()}
        if difference := tensor_differences(given, self.shapes, buffers):
            raise ValueError(f"these are not the tensors of the model: {difference}")
        return np.concatenate([parts[tensor.name].reshape(-1) for tensor in self.tensors])


class File(Protocol):
    """A file that can be opened for reading as often as needed: a path, or a stored blob."""

    def open(self, mode: Literal["rb"], buffering: Literal[0]) -> FileIO:
        """Opens it; the caller closes it. Its descriptor may be read with `pread` and mapped."""


@dataclass(frozen=True)
class RowFile:
    """One row of a reply, or a whole model, inside a file: `length` elements from byte `offset` on."""

    file: File
    offset: int
    length: int
    dtype: str = "F32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    def columns(self, part: slice) -> "RowFile":
        """Some consecutive elements of the row."""
        return replace(self, offset=self.offset + self.itemsize * part.start, length=part.stop - part.start)

    def read(self) -> Array:
        """The row, shape (length,): mapped read-only, and BF16 widened to float32."""
        with self.file.open("rb", 0) as file:
            raw = np.memmap(file, dtype=DTYPES[self.dtype], mode="r", offset=self.offset, shape=(self.length,))
        return widen(raw) if self.dtype == "BF16" else raw


def widen(raw: NDArray[np.uint16]) -> Vector:
    """The float32 values of bfloat16 numbers, which are exact."""
    wide: Vector = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


def narrow(values: Vector) -> tuple[NDArray[np.uint16], Vector]:
    """Finite numbers as bfloat16, rounded to nearest, ties to even; and the rounding errors, exact in float32.

    Raises:
        OverflowError: a number is rounded to infinity.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    raw = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    if ((raw & np.uint16(0x7F80)) == np.uint16(0x7F80)).any():
        raise OverflowError("a number leaves the range of bfloat16")
    return raw, values - widen(raw)


def parse_header(prefix: bytes | memoryview, dtypes: Collection[str] = ("F32",)) -> tuple[Layout, int]:
    """Reads the header of a safetensors file, of which `prefix` holds at least the header.

    Returns:
        The layout, and the offset of the data, in bytes.

    Raises:
        Refusal: `limit:header` (longer than `MAX_HEADER_BYTES`), `dtype` (not one of `dtypes`), `layout` (not a
            safetensors header; holes, overlaps, repeated names, shapes that do not fit; a tensor without elements).
    """
    placed, end = foreign_tensors(prefix, dtypes)
    try:
        return Layout(tuple(tensor for tensor, _ in placed)), end
    except ValueError as error:
        raise Refusal("layout", str(error)[:300]) from None


def foreign_tensors(
    prefix: bytes | memoryview, dtypes: Collection[str], most: int = MAX_HEADER_BYTES
) -> tuple[list[tuple[Tensor, int]], int]:
    """As `parse_header`, for element types of `FOREIGN_DTYPES`, and tensors without elements.

    Returns:
        The tensors in the order of their data, each with its offset in the data; the offset of the data, in bytes.
    """
    length = header_length(prefix, most)
    end = LENGTH_BYTES + length
    if len(prefix) < end:
        raise Refusal("layout", f"the file ends inside its header of {length} bytes, after {len(prefix)} bytes")
    found = (item for _, _, item in header_entries(prefix[LENGTH_BYTES:end], dtypes) if item is not None)
    placed = sorted(found, key=lambda item: (item[1], item[0].bytes))
    position = 0
    for tensor, begin in placed:
        if begin != position:
            kind = "a hole" if begin > position else "an overlap"
            raise Refusal("layout", f"{kind} before tensor {tensor.name[:80]!r}: data at {begin}, expected {position}")
        position += tensor.bytes
    return placed, end


def header_entries(
    header: bytes | memoryview, dtypes: Collection[str]
) -> Iterator[tuple[str, dict[str, Any], tuple[Tensor, int] | None]]:
    """The entries of a header, without its length, in its own order: name, JSON, and the tensor with its offset.

    Metadata have no tensor. One entry is read and checked at a time, so that a bad one takes no memory.

    Raises:
        Refusal: `dtype` and `layout`, as `parse_header`, for what is wrong with an entry.
    """
    try:
        for name, entry in entries(
            bytes(header).decode(), lambda name: _MAX_METADATA if name == METADATA else _MAX_ENTRY
        ):
            if not isinstance(entry, dict):
                raise ValueError(f"what {name[:80]!r} has is no JSON object")
            yield name, entry, None if name == METADATA else _placed(name, entry, dtypes)
    except (ValueError, RecursionError) as error:
        raise Refusal("layout", f"the header is not the JSON of a safetensors file: {str(error)[:200]}") from None


def model_layout(file: File) -> Layout:
    """The layout of a model file.

    Raises:
        Refusal: as `parse_header`, and `layout` when the file is shorter or longer than its header says.
    """
    return _open(file)[0]


def update_layout(rows: Iterable[tuple[str, int] | tuple[str, int, str]]) -> Layout:
    """The layout of a payload file: one-dimensional tensors of (name, length, dtype), F32 by default."""
    return Layout(tuple(Tensor(name, (length,), *dtype) for name, length, *dtype in rows))


def to_bytes(layout: Layout, vector: Vector) -> bytes:
    """The file that holds `vector` (d,) in this layout. Raises ValueError if it is not float32 of that size."""
    return layout.header + _data(layout, vector).tobytes()


def payload_bytes(layout: Layout, rows: Mapping[str, Array]) -> list[memoryview]:
    """The file of a reply, piece by piece: the header, then each row of the layout.

    A row is float32 for F32, and of integers for the other types; for BF16, the 16 bits.

    Raises:
        ValueError: a row is missing, or is not of its type and length.
    """
    pieces = [memoryview(layout.header)]
    for tensor in layout.tensors:
        row = rows.get(tensor.name)
        if row is None or row.dtype != DTYPES[tensor.dtype].newbyteorder("=") or row.shape != tensor.shape:
            actual = "missing" if row is None else f"{row.dtype} {row.shape}"
            raise ValueError(f"row {tensor.name!r} is {actual}; the layout has {tensor.dtype} {tensor.shape}")
        pieces.append(np.ascontiguousarray(row, dtype=DTYPES[tensor.dtype]).data.cast("B"))
    return pieces


def payload_rows(data: bytes | memoryview, expected: Layout) -> dict[str, Array]:
    """The rows of a payload in memory, by name.

    Raises:
        Refusal: as `parse_header`, and `layout` for another layout or length than expected.
    """
    layout, offset = parse_header(data, {tensor.dtype for tensor in expected.tensors})
    if layout != expected:
        raise Refusal("layout", layout_difference(layout, expected))
    if len(data) != layout.file_bytes:
        raise Refusal("layout", f"the file has {len(data)} bytes; its header describes {layout.file_bytes}")
    rows = {}
    for tensor in layout.tensors:
        rows[tensor.name] = np.frombuffer(data, DTYPES[tensor.dtype], tensor.size, offset).reshape(tensor.shape)
        offset += tensor.bytes
    return rows


def write_vectors(path: Path, layout: Layout, vector: Vector) -> None:
    """Writes `vector` (d,) as a file of this layout. Errors as of `to_bytes`."""
    data = _data(layout, vector)
    with path.open("wb") as file:
        file.write(layout.header)
        file.write(data.data)


def read_vector(file: File) -> tuple[Layout, Vector]:
    """A file's layout and its data as one vector (d,), mapped read-only. Errors as of `model_layout`."""
    layout, offset = _open(file)
    return layout, RowFile(file, offset, layout.size).read()


def model_row(file: File) -> RowFile:
    """A model file as one row (d,). Errors as of `model_layout`."""
    layout, offset = _open(file)
    return RowFile(file, offset, layout.size)


def update_rows(file: File) -> dict[str, RowFile]:
    """The rows of a payload file by name, in file order.

    Raises:
        Refusal: as `model_layout`, and `layout` for a tensor that is not one-dimensional.
    """
    layout, offset = _open(file, DTYPES)
    rows = {}
    for tensor in layout.tensors:
        if len(tensor.shape) != 1:
            raise Refusal("layout", f"row {tensor.name[:80]!r} has shape {list(tensor.shape)}; a row is a vector")
        rows[tensor.name] = RowFile(file, offset, tensor.size, tensor.dtype)
        offset += tensor.bytes
    return rows


def header_length(prefix: bytes | bytearray | memoryview, most: int = MAX_HEADER_BYTES) -> int:
    """The length of a header in bytes, from the first `LENGTH_BYTES` bytes of its file.

    Raises:
        Refusal: `layout` for fewer bytes than that, `limit:header` for a length above `most`.
    """
    if len(prefix) < LENGTH_BYTES:
        raise Refusal("layout", f"{len(prefix)} bytes are not a safetensors file")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > most:
        raise Refusal("limit:header", f"the header claims {length} bytes; at most {most} are accepted")
    return length


def _placed(name: str, entry: dict[str, Any], dtypes: Collection[str]) -> tuple[Tensor, int]:
    shown = name[:80]
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refusal("layout", f"tensor {shown!r} needs exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in dtypes:
        accepted = ", ".join(name for name in FOREIGN_DTYPES if name in dtypes)
        raise Refusal("dtype", f"tensor {shown!r} is {str(dtype)[:20]!r}; only {accepted} is accepted")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        raise Refusal("layout", f"tensor {shown!r} has an impossible shape")
    if not _naturals(offsets) or len(offsets) != 2:
        raise Refusal("layout", f"tensor {shown!r} has impossible data_offsets")
    tensor = Tensor(name, tuple(shape), dtype)
    begin, end = offsets
    if tensor.size > MAX_ELEMENTS or end - begin != tensor.bytes:
        raise Refusal("layout", f"tensor {shown!r}: its shape does not fill its {end - begin} bytes")
    return tensor, begin


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= 8 * MAX_ELEMENTS for item in value)


def layout_difference(found: Layout, expected: Layout) -> str:
    """The first difference between two layouts, as text. The layouts must differ."""
    if len(found.tensors) != len(expected.tensors):
        return f"{len(found.tensors)} tensors; the assignment asks for {len(expected.tensors)}"
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        if mine != theirs:
            return (
                f"tensor {mine.name[:80]!r}, {mine.dtype} of shape {list(mine.shape)}; "
                f"the assignment asks for {theirs.name!r}, {theirs.dtype} of shape {list(theirs.shape)}"
            )
    raise AssertionError("the layouts are equal")


def _open(file: File, dtypes: Collection[str] = ("F32",)) -> tuple[Layout, int]:
    with file.open("rb", 0) as content:
        prefix = content.read(LENGTH_BYTES)
        prefix += content.read(header_length(prefix))
        layout, offset = parse_header(prefix, dtypes)
        size = content.seek(0, 2)
    expected = offset + layout.data_bytes
    if size != expected:
        raise Refusal("layout", f"the file has {size} bytes; its header describes {expected}")
    return layout, offset


def _data(layout: Layout, vector: Vector) -> Vector:
    if vector.dtype != np.float32 or vector.shape != (layout.size,):
        raise ValueError(f"{vector.dtype} {vector.shape} is not the float32 ({layout.size},) of the layout")
    return np.ascontiguousarray(vector, dtype="<f4")
