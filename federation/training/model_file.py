"""A file that somebody names as the initial model of a run: safetensors of any types and order."""

from pathlib import Path

import numpy as np

from federation.errors import Error
from federation.files.file_kinds import FileKind, no_safetensors
from federation.refusals import Refusal
from federation.vectors import (
    FOREIGN_DTYPES,
    LENGTH_BYTES,
    MAX_EXPORTED_BYTES,
    Array,
    Tensor,
    Vector,
    foreign_tensors,
    header_length,
    widen,
)

_FROM_PYTORCH = """\
    import torch, safetensors.torch
    safetensors.torch.save_file(torch.load({old!r}, weights_only=True), {new!r})"""
_FROM_NUMPY = """\
    import numpy, safetensors.numpy
    safetensors.numpy.save_file(dict(numpy.load({old!r}, allow_pickle=False)), {new!r})"""
_CONVERTING: dict[str, str] = {
    FileKind.PYTORCH: _FROM_PYTORCH,
    FileKind.PICKLE: _FROM_PYTORCH,
    FileKind.NPZ: _FROM_NUMPY,
}


class GivenModelError(Error, ValueError):
    """A file that cannot be the initial model of a run; the message names it, and says why and what to do."""


class ModelFile:
    """A safetensors file of any element types and order, mapped read-only.

    Attributes:
        path: its path.
        tensors: by name, in the order of their data.

    Raises:
        GivenModelError: it is a file of another kind, is damaged, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            placed, begin = self._header()
            self._data = np.memmap(path, np.uint8, "r", begin)
        except OSError as error:
            raise GivenModelError(f"cannot read {path}: {error.strerror or error}") from None
        except Refusal as refusal:
            raise self.unfit(f"{refusal.message} [{refusal.reason}]") from None
        self.tensors = {tensor.name: tensor for tensor, _ in placed}
        self._offsets = {tensor.name: offset for tensor, offset in placed}

    def unfit(self, why: str) -> GivenModelError:
        """The error of this file."""
        return GivenModelError(f"{self.path} cannot be the initial model: {why}")

    @property
    def vector(self) -> Vector:
        """The data as one vector (d,), if all tensors are float32."""
        return self._data.view(FOREIGN_DTYPES["F32"])

    def array(self, name: str) -> Array:
        """A tensor as NumPy has it, with its shape; bfloat16 as float32, and 8-bit floats as bits."""
        tensor, offset = self.tensors[name], self._offsets[name]
        values = self._data[offset : offset + tensor.bytes].view(FOREIGN_DTYPES[tensor.dtype]).reshape(tensor.shape)
        return widen(values) if tensor.dtype == "BF16" else values

    def _header(self) -> tuple[list[tuple[Tensor, int]], int]:
        """The tensors with their offsets, and the offset of the data. Raises OSError, Refusal, GivenModelError."""
        with self.path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            try:
                prefix += file.read(header_length(prefix, MAX_EXPORTED_BYTES))
                placed, begin = foreign_tensors(prefix, FOREIGN_DTYPES, MAX_EXPORTED_BYTES)
            except Refusal:
                self._check_ours()
                raise
            size = file.seek(0, 2)
        expected = begin + sum(tensor.bytes for tensor, _ in placed)
        if size != expected or size == begin:
            raise Refusal("layout", f"the file has {size} bytes; its header describes {expected}")
        return placed, begin

    def _check_ours(self) -> None:
        """Raises GivenModelError if it is a file of another kind, with the two lines that convert it."""
        if not (kind := no_safetensors(self.path)):
            return
        why = f"it is {kind}; a safetensors file is needed"
        if lines := _CONVERTING.get(kind):
            new = str(self.path.with_suffix(".safetensors"))
            why += (
                ". Files of this kind can run code when they are read, so fedpareto does not read them. "
                f"Convert it, if you know where it comes from:\n{lines.format(old=str(self.path), new=new)}"
            )
        raise self.unfit(why)
