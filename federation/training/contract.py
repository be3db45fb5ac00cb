"""The contract of a trainer's methods: what they return is read where it leaves no doubt, and else refused in words.

It is the same for a trainer in this process, for the program of an external trainer, and in `trainer_process`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.owners_code import headline
from federation.spec.objective_names import OBJECTIVE
from federation.spec.task_metrics import NAME
from federation.tensor_names import size_difference
from federation.value_words import in_words
from federation.vectors import Layout, Vector
from federation.work.base import WorkError

REASON = "trainer:result"
# The names of metrics: an objective may follow a loss, a key another metric.
_METRIC = rf"(loss|accuracy)(/{OBJECTIVE})?|{NAME}(/[a-z0-9.-]{{1,32}})?"
_NUMBERS = "fiub"  # kinds of NumPy's element types
_HINT = (
    "return a vector like the model that it was given: self.module_vector(module) of a PyTorch module, self.vector({}) "
    "of tensors by name"
)


def refused(method: str, problem: str) -> WorkError:
    """The error of a method of a trainer, such as "train()". Others are not told what it returned."""
    wire = f"{method} of the trainer did what its contract does not allow"
    return WorkError(f"{method} of the trainer {problem}", reason=REASON, wire=wire)


def plain(value: Any) -> NDArray[Any]:
    """The numbers of an array, of a tensor on any device, with gradients or without, or of a list; as float32.

    Raises:
        TypeError: there are other things in it, or it is masked.
    """
    if hasattr(value, "detach"):  # a tensor of PyTorch, which may not be installed
        value = value.detach().cpu()
        value = value if value.is_complex() else value.float().numpy()
    if np.ma.is_masked(value):
        raise TypeError("some of its values are masked")
    array = np.asarray(value)
    if array.dtype.kind not in _NUMBERS and array.dtype.name != "bfloat16":
        raise TypeError(f"its values are {array.dtype.name}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def model_of(returned: Any, layout: Layout, buffers: Collection[str], method: str) -> Vector:
    """The model (d,) that a method returned: as a vector, as tensors by name, or as tensors in the model's order.

    Args:
        returned: by the method.
        layout: of a model.
        buffers: the names of its buffers.
        method: such as "train()".

    Raises:
        WorkError: it is something else; the message names what came, and what is needed.
    """
    try:
        if isinstance(returned, Mapping):
            return layout.join({str(name): plain(value) for name, value in returned.items()}, buffers)
        if isinstance(returned, Sequence) and any(getattr(part, "shape", ()) != () for part in returned):
            parts = [plain(part) for part in returned]
            if [part.shape for part in parts] == [tensor.shape for tensor in layout.tensors]:
                return np.concatenate([part.reshape(-1) for part in parts])
            shapes = ", ".join(str(list(part.shape)) for part in parts[:8])
            raise TypeError(f"they are {len(parts)} arrays of the shapes {shapes}; a model has {_listed(layout)}")
        vector: Vector = plain(returned)
    except Exception as error:  # of Python, NumPy and PyTorch, of many classes
        cause = str(error) if type(error) in (TypeError, ValueError) else headline(error)
        hint = _HINT.format("tensors")
        if returned is None:
            raise refused(method, f"returned None; {hint}") from None
        raise refused(method, f"returned {in_words(returned)} that is no model: {cause}; {hint}") from error
    if vector.shape != (layout.size,):
        own_shapes = {name: shape for name, shape in layout.shapes.items() if name in buffers}
        parameters = layout.size - sum(int(np.prod(shape)) for shape in own_shapes.values())
        expected = size_difference(vector.size, parameters, own_shapes)
        raise refused(method, f"has the shape {vector.shape}; {expected}")
    return vector


def gradients_of(
    returned: Any, objectives: Sequence[str], layout: Layout, buffers: Collection[str]
) -> dict[str, Vector]:
    """The gradient (d,) of each objective, from what `gradients` returned. Raises WorkError as `model_of`."""
    if not isinstance(returned, Mapping) or not set(objectives) <= set(returned):
        needed = f"a mapping with a gradient for {' and '.join(objectives)} is needed"
        raise refused("gradients()", f"returned {in_words(returned)}; {needed}")
    return {name: model_of(returned[name], layout, buffers, f"gradients()[{name!r}]") for name in objectives}


def scores_of(returned: Any, requested: Collection[str], needed: Sequence[str]) -> dict[str, float]:
    """The requested scores of what `evaluate` returned; NaN for one that is None.

    Args:
        returned: by the method.
        requested: the names of metrics, without objectives or keys; others are left out.
        needed: the names of the scores that must be there.

    Raises:
        WorkError: it is no mapping from names to numbers, a score is missing, or a name cannot be that of a metric.
    """
    if not isinstance(returned, Mapping):
        example = '{"loss": 0.4, "accuracy": 0.8}'
        raise refused("evaluate()", f"returned {in_words(returned)}; numbers by name are needed, such as {example}")
    scores: dict[str, float] = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            raise refused("evaluate()", f"has a score with the name {str(name)[:80]!r}, which is {in_words(name)}")
        if name.partition("/")[0] not in requested:
            continue
        if re.fullmatch(_METRIC, name) is None:
            raise refused("evaluate()", f"has a metric {name[:120]!r}")
        scores[name] = _number(name, value)
    if missing := [name for name in needed if name not in scores]:
        raise refused("evaluate()", f"has no {missing[0]!r}")
    return scores


def no_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The accuracies among the metrics of a reply that are no shares from 0 to 1, which nobody counts."""
    return {
        name: value
        for name, value in metrics.items()
        if "accuracy" in name.split("/")[:2] and np.isfinite(value) and not 0 <= value <= 1
    }


def no_share_in_words(name: str, value: float) -> str:
    """One of `no_shares`, for its owner."""
    return (
        f"{name} is {value:g}, and an accuracy is a share in [0, 1], so it is left out"
        + "; evaluate() or correct() may return per cent" * (1 < value <= 100)
    )


def _number(name: str, value: Any) -> float:
    """One score. Raises WorkError if it is no number."""
    if value is None:
        return float("nan")
    number = value.item() if hasattr(value, "item") and np.prod(value.shape) == 1 else value
    try:
        if not isinstance(number, bool | str):
            return float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise refused("evaluate()", f"has the score {name!r}, which is {in_words(value)}: a number or None is needed")


def _listed(layout: Layout) -> str:
    shown = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in layout.tensors[:8])
    more = len(layout.tensors) - 8
    return shown + (f" and {more} more" if more > 0 else "")
