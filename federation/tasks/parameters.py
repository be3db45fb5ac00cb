"""A model's trainable parameters, and its buffers after them, as one flat float32 vector, and back."""

from collections.abc import Collection, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from federation.statistics.scale import ScaleLayer
from federation.tasks.errors import TaskError, task_code
from federation.tasks.standardise import Standardise
from federation.value_words import in_words
from federation.vectors import Layout
from federation.vectors import Tensor as Shape


class _HasModel(Protocol):
    """A task, as far as it is needed here."""

    name: str

    def model(self) -> nn.Module: ...


def build(task: _HasModel, seed: int = 0) -> nn.Module:
    """The task's model with the initial values that `seed` gives, on the CPU, checked to fit a flat vector.

    Torch's global generator keeps its state. Members build with the default seed: untrained tensors, such as a frozen
    random projection, are then the same everywhere, and trained ones come from the coordinator.

    Raises:
        TaskError: the model has no trainable float32 parameters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with task_code(task.name or type(task).__name__, "making its model"):
            model = task.model()
    _check(model, task)
    return model


def layout(model: nn.Module) -> Layout:
    """The names and shapes of the trainable parameters, then of the buffers, in the model's order; d elements."""
    return Layout(
        tuple(Shape(name, tuple(tensor.shape)) for name, tensor in (*trainable(model), *buffers(model).items()))
    )


def values(model: nn.Module) -> dict[str, NDArray[np.float32]]:
    """The trainable parameters by name, in the model's order, as views; then copies of the buffers."""
    found = {name: parameter.detach().cpu().numpy() for name, parameter in trainable(model)}
    return found | {name: buffer.cpu().numpy().astype(np.float32) for name, buffer in buffers(model).items()}


def trainable(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The trainable parameters with their names, each once, in the model's order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model, such as BatchNorm's running statistics, by name; those of a layer Standardise come last.

    Integers alone are none. Constant tables (such as positions) are registered with persistent=False, and are not among
    them.
    """
    state, layer = model.state_dict(), scale_layer(model)
    scale = () if layer is None else layer.tensors
    everything = {name: buffer for name, buffer in model.named_buffers() if name in state}
    found = {name: buffer for name, buffer in everything.items() if name not in scale}
    kept = found if any(buffer.is_floating_point() for buffer in found.values()) else {}
    return {**kept, **{name: everything[name] for name in scale}}


def scale_layer(model: nn.Module) -> ScaleLayer | None:
    """The layer Standardise of a model; None without one. Raises ValueError if there are several."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Standardise)]
    if len(layers) > 1:
        raise ValueError(f"a model has one layer Standardise; this one has {', '.join(name for name, _ in layers)}")
    return ScaleLayer(layers[0][0], layers[0][1].columns) if layers else None


def further_names(model: nn.Module) -> dict[str, str]:
    """The further names of tied parameters, such as an output's that are the embedding's, each with the first one."""
    first: dict[int, str] = {}
    names = (
        (name, first.setdefault(id(parameter), name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    return {name: known for name, known in names if name != known}


def untrained(model: nn.Module, but: Collection[str]) -> dict[str, NDArray[np.float32]]:
    """The tensors of a model's state dict by name, such as those of a frozen base, without the names in `but`."""
    state = model.state_dict()
    return {
        name: value.detach().cpu().float().numpy()
        for name, value in state.items()
        if isinstance(value, Tensor) and name not in but
    }


def _check(model: object, task: _HasModel) -> None:
    where = f"task {task.name or type(task).__name__!r}"
    if not isinstance(model, nn.Module):
        raise TaskError(f"{where}: model() returned {in_words(model)}; needed: a torch.nn.Module")
    parameters = dict(trainable(model))
    if lazy := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise TaskError(f"{where}: the size of parameter {lazy[0]} follows from data: give it in model(), without Lazy")
    if not parameters:
        raise TaskError(f"{where}: its model has no trainable parameters")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise TaskError(f"{where}: parameter {name} is {parameter.dtype}; trainable parameters are float32")
        if parameter.numel() == 0:
            raise TaskError(f"{where}: parameter {name} of shape {tuple(parameter.shape)} has no elements")
