"""Data files as they are published, packed or not."""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from federation.tasks.errors import DataError
from federation.text_files import EncodingError, decoded

# What reading a file that is missing, cut short or not what its name says may raise.
BROKEN = (OSError, EOFError, ValueError, zlib.error)


def found(path: Path) -> Path | None:
    """The file itself, or as it is published (.gz); None where there is neither."""
    packed = path.with_name(path.name + ".gz")
    return next((file for file in (path, packed) if file.is_file()), None)


def read(path: Path, wanted: str) -> bytes:
    """The content of a file, or of its compressed form (.gz), unpacked.

    `wanted` is the text of the error about the expected file and its source. Raises DataError if it is missing or
    damaged.
    """
    file = found(path)
    if file is None:
        raise DataError(f"no file {path}, nor {path.name}.gz beside it; {wanted}")
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except BROKEN as error:
        raise DataError(f"cannot read {file} ({error}); {wanted}") from error


def lines(path: Path, wanted: str) -> Iterator[tuple[int, str]]:
    """The lines of a text, UTF-8, with their numbers from 1. Arguments and errors as of `read`."""
    try:
        text = decoded(read(path, wanted))
    except EncodingError as error:
        raise DataError(f"{path} is no text ({error}); {wanted}") from error
    return enumerate(text.split("\n"), start=1)


def read_idx(path: Path, axes: int, wanted: str) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, type 8, the number of axes, big-endian sizes, the data. Read-only.

    Arguments and errors as of `read`; DataError also if it has another number of axes.
    """
    content = read(path, wanted)
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < 4 + 4 * axes:
        raise DataError(f"{path} is no idx file of bytes with {axes} axes; {wanted}")
    shape = np.frombuffer(content, ">u4", count=axes, offset=4).tolist()
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if len(data) != math.prod(shape):
        raise DataError(f"{path} announces {'x'.join(map(str, shape))} bytes and holds {len(data)}; {wanted}")
    return data.reshape(shape)
