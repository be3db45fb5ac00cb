"""A model in a PyTorch module that a trainer of one's own trains."""

from collections.abc import Collection

import torch
from torch import nn

from federation.tasks import parameters as flat
from federation.tensor_names import tensor_differences
from federation.vectors import Vector


def load(module: nn.Module, arrays: dict[str, Vector], buffers: Collection[str] = ()) -> None:
    """Copies these tensors, by name, into a module's trainable parameters and buffers; integers are rounded.

    `buffers` are the names of those that an error calls buffers.

    Raises:
        ValueError: the module has other tensors; nothing is copied.
    """
    targets = dict(flat.trainable(module)) | flat.buffers(module)
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    expected = {name: array.shape for name, array in arrays.items()}
    if difference := tensor_differences(shapes, expected, {*buffers, *flat.buffers(module)}):
        raise ValueError(f"the module has other tensors than the model: {difference}")
    with torch.no_grad():
        for name, target in targets.items():
            source = torch.tensor(arrays[name])
            target.copy_(source if target.is_floating_point() else source.round())
