"""What a file is that cannot be read, told from its first bytes, for the message to the person who named it.

Nothing is unpickled: the list of the files in an archive is enough.
"""

import re
import zipfile
from enum import StrEnum
from pathlib import Path

_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_STARTS = 512  # bytes


class FileKind(StrEnum):
    """A kind of file, in words for people."""

    SAFETENSORS = "a safetensors file"
    PYTORCH = "a PyTorch file"
    NPZ = "an .npz file of NumPy"
    NPY = "a single array of NumPy (.npy)"
    PICKLE = "a pickle, as older versions of PyTorch and joblib write them"
    ARCHIVE = "a zip archive of other files"
    DAMAGED = "a zip archive that is damaged or incomplete, as a copy of a .pt or .npz file that broke off"
    HDF5 = "an HDF5 file"
    GGUF = "a GGUF file"
    TEXT = "a text"
    EMPTY = "empty"
    UNKNOWN = "of no kind that is known here"


def file_kind(path: Path) -> FileKind:
    """The kind of a file that is not of the expected one. Raises OSError."""
    with path.open("rb") as file:
        start = file.read(_STARTS)
    if start.startswith(b"PK"):
        return _archive(path)
    marks = {b"\x93NUMPY": FileKind.NPY, b"\x89HDF": FileKind.HDF5, b"GGUF": FileKind.GGUF}
    for mark, kind in marks.items():
        if start.startswith(mark):
            return kind
    if start[8:9] == b"{":  # after the length of the header
        return FileKind.SAFETENSORS
    if _PICKLE.match(start):
        return FileKind.PICKLE
    if not start:
        return FileKind.EMPTY
    return FileKind.TEXT if _is_text(start) else FileKind.UNKNOWN


def no_safetensors(path: Path) -> str:
    """The kind of a file, if it is certain that it is no safetensors file; empty otherwise. Raises OSError."""
    kind = file_kind(path)
    return "" if kind in (FileKind.SAFETENSORS, FileKind.UNKNOWN) else kind


def _archive(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return FileKind.DAMAGED
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return FileKind.PYTORCH
    return FileKind.NPZ if names and all(name.endswith(".npy") for name in names) else FileKind.ARCHIVE


def _is_text(start: bytes) -> bool:
    text = start.decode(errors="replace").removesuffix("\ufffd")  # the last character may be cut
    return "\ufffd" not in text and all(letter.isprintable() or letter in "\t\r\n" for letter in text)
