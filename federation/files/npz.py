"""Reads the arrays of an .npz file. Nothing is unpickled, since a pickle runs code."""

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.errors import Error
from federation.files.file_kinds import FileKind, file_kind

# What NumPy and its archive raise for damaged files.
_DAMAGED = (ValueError, EOFError, KeyError, TypeError, SyntaxError, OverflowError, RuntimeError, zipfile.BadZipFile)


class NpzError(Error, ValueError):
    """A file that is no .npz file of plain arrays, or lacks one of them; the message says why, without its path."""


def read_npz(path: Path, names: Iterable[str] | None = None) -> Mapping[str, NDArray[Any]]:
    """The arrays of these names, by default all.

    The messages are our own: NumPy's tell to unpickle the file.

    Raises:
        NpzError: it is no .npz file, or an array is missing, damaged, of Python objects or too large for the memory.
        OSError: it cannot be read.
    """
    kind = file_kind(path)
    if kind is not FileKind.NPZ:
        raise NpzError(f"it is {kind}, not an .npz file: np.savez writes one")
    with np.load(path, allow_pickle=False) as archive:
        wanted = archive.files if names is None else tuple(names)
        if missing := [name for name in wanted if name not in archive.files]:
            raise NpzError(f"it has no array {missing[0]!r}; there are {', '.join(archive.files)}")
        return {name: _array(archive, name) for name in wanted}


def _array(archive: Any, name: str) -> NDArray[Any]:
    try:
        array = archive[name]
    except MemoryError:
        raise NpzError(f"its array {name!r} is too large for the memory of this machine") from None
    except (*_DAMAGED, zlib.error) as error:
        if str(error).startswith("Object arrays"):
            raise NpzError(
                f"its array {name!r} holds Python objects, which are not read, since they can run code; save numbers: "
                "np.asarray(values, dtype=float)"
            ) from None
        raise NpzError(f"its array {name!r} is damaged") from None
    if not isinstance(array, np.ndarray):
        raise NpzError(f"its array {name!r} is damaged")
    return array
