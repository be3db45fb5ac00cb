"""A model's parameters and their gradients in flat buffers, and what else the model keeps."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from federation.tasks import parameters as flat
from federation.vectors import Layout

# Each parameter in the buffer is aligned to this number of elements (128 bytes), for fast kernels.
_ALIGNMENT = 32
# Dimensions of the kernels of a convolution: (out, in, height, width).
_KERNEL = 4


class ParameterBuffers:
    """The trainable parameters w and their gradients as two buffers, so that a step is a few operations for any d.

    The parameters are views into `values`, their gradients into `gradient`; `start` is w_t. On a CPU, the kernels of
    convolutions have their channels last in them (`channels_last`), which is up to 1.6 times as fast.
    """

    def __init__(self, model: torch.nn.Module, layout: Layout, device: torch.device) -> None:
        self._size = layout.size
        self._shapes = [parameter.shape for _, parameter in flat.trainable(model)]
        self._places: list[tuple[slice, slice]] = []  # where a parameter is in the flat vector, and in the buffer
        self.channels_last = device.type == "cpu" and any(len(shape) == _KERNEL for shape in self._shapes)
        offset = padded = 0
        for tensor in layout.tensors:
            self._places.append((slice(offset, offset + tensor.size), slice(padded, padded + tensor.size)))
            offset += tensor.size
            padded += -(-tensor.size // _ALIGNMENT) * _ALIGNMENT
        self.values = torch.zeros(padded, device=device)
        self.gradient = torch.zeros(padded, device=device)
        self.start = torch.zeros(padded, device=device)
        views = zip(flat.trainable(model), self.parameters(self.values), self.parameters(self.gradient), strict=True)
        for (_, parameter), value, gradient in views:
            parameter.data, parameter.grad = value, gradient

    def parameters(self, buffer: Tensor) -> list[Tensor]:
        """The content of a buffer, as views with the parameters' shapes."""
        views = []
        for (_, place), shape in zip(self._places, self._shapes, strict=True):
            if self.channels_last and len(shape) == _KERNEL:
                out, channels, height, width = shape
                views.append(buffer[place].view(out, height, width, channels).permute(0, 3, 1, 2))
            else:
                views.append(buffer[place].view(shape))
        return views

    def load(self, base: NDArray[np.float32]) -> None:
        """Starts from a model (d,)."""
        if base.shape != (self._size,):
            raise ValueError(f"the model has {self._size} trainable parameters, the base {base.shape}")
        self._fill(self.start, np.array(base, dtype=np.float32))  # a copy: the base may be a read-only file
        self.reset()

    def mask(self, columns: Sequence[slice]) -> Tensor:
        """A buffer that is true in these columns of the model (d,)."""
        chosen = np.zeros(self._size, dtype=np.float32)
        for part in columns:
            chosen[part] = 1.0
        buffer = torch.zeros_like(self.values)
        self._fill(buffer, chosen)
        return buffer > 0

    def _fill(self, buffer: Tensor, vector: NDArray[np.float32]) -> None:
        """Copies a flat vector (d,) into a buffer."""
        source = torch.from_numpy(vector)
        for (place, _), view in zip(self._places, self.parameters(buffer), strict=True):
            view.copy_(source[place].view(view.shape))

    def reset(self) -> None:
        """Back to w_t."""
        self.values.copy_(self.start)

    def flat(self, buffer: Tensor) -> NDArray[np.float32]:
        """The content of a buffer without its gaps, (d,)."""
        row = torch.empty(self._size)
        for (target, _), view in zip(self._places, self.parameters(buffer.cpu()), strict=True):
            row[target].view(view.shape).copy_(view)
        return row.numpy()


class ModelState:
    """The state of a model besides its parameters, such as BatchNorm's running statistics: (size,) float32."""

    def __init__(self, model: torch.nn.Module) -> None:
        buffers = flat.buffers(model)
        self.names = tuple(buffers)
        self._buffers = tuple(buffers.values())
        self._modules = [model.get_submodule(name.rpartition(".")[0]) for name in buffers]
        self.size = sum(buffer.numel() for buffer in self._buffers)

    def load(self, values: NDArray[np.float32]) -> None:
        """Sets it; integers are rounded."""
        offset = 0
        for buffer in self._buffers:
            part = torch.from_numpy(np.array(values[offset : offset + buffer.numel()])).view(buffer.shape)
            buffer.copy_(part if buffer.is_floating_point() else part.round())
            offset += buffer.numel()

    def flat(self) -> NDArray[np.float32]:
        """The present state, (size,)."""
        parts = [buffer.detach().cpu().numpy().astype(np.float32).reshape(-1) for buffer in self._buffers]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)

    def within(self, columns: Sequence[slice], start: int) -> frozenset[str]:
        """The names of the buffers in these columns of a model (d,), whose buffers begin at `start`."""
        named, offset = set(), start
        for name, buffer in zip(self.names, self._buffers, strict=True):
            if any(part.start <= offset < part.stop for part in columns):
                named.add(name)
            offset += buffer.numel()
        return frozenset(named)

    def freeze(self, names: Collection[str]) -> None:
        """Puts the modules that keep these into evaluation mode: they use them in training, and do not change them."""
        for name, module in zip(self.names, self._modules, strict=True):
            if name in names:
                module.eval()


@contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Gives all buffers of a model the values back that they had before."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, values in kept:
            buffer.copy_(values)
