"""The differences between the tensors of two models, as text for the author of the code of one model."""

import math
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import zip_longest

BUFFER_NAMES = ("*.running_mean", "*.running_var", "*.num_batches_tracked")  # of PyTorch's normalisations
_SHOWN = 8  # names in a message

Shapes = Mapping[str, tuple[int, ...]]


def tensor_differences(given: Shapes, expected: Shapes, buffers: Collection[str] = ()) -> str:
    """The tensors that are missing, too many or of another shape, as text; empty if there are none.

    `buffers` are the names of known buffers. Names as PyTorch's normalisations give them are buffers, too.
    """
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    shapes = [
        f"{name} {list(given[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    is_buffer = {name: _is_buffer(name, buffers) for name in (*missing, *unknown)}
    parts = {
        "missing parameters": [name for name in missing if not is_buffer[name]],
        "missing buffers": [name for name in missing if is_buffer[name]],
        "parameters too many": [name for name in unknown if not is_buffer[name]],
        "buffers too many": [name for name in unknown if is_buffer[name]],
        "other shapes": shapes,
    }
    return "; ".join(f"{title}: {listed(names)}" for title, names in parts.items() if names)


def first_difference(given: Shapes, expected: Shapes) -> str:
    """The first place at which two models, each in its order, have different tensors, as text; empty if they are equal.

    `given` is the model of a run, `expected` that of the task here.
    """
    pairs = zip_longest(given.items(), expected.items())
    for number, (theirs, ours) in enumerate(pairs, start=1):
        if theirs != ours:
            return f"tensor {number} is {_tensor(theirs)} in the model of the run, and {_tensor(ours)} in this task"
    return ""


def size_difference(size: int, parameters: int, buffers: Shapes) -> str:
    """The reason why a vector of `size` elements is not a model of these parameters and buffers, as text.

    `size` is not that of a whole model.
    """
    if not buffers:
        return f"the model has {parameters} parameters"
    elements = sum(math.prod(shape) for shape in buffers.values())
    text = f"the model has {parameters + elements} elements, {parameters} of parameters and {elements} of buffers"
    missing = "; missing buffers" if size == parameters else ""
    return f"{text}{missing}: {listed(buffers)}"


def _tensor(entry: tuple[str, tuple[int, ...]] | None) -> str:
    """A tensor as text, its name shortened and without line breaks, since others may choose it."""
    return "missing" if entry is None else f"{entry[0][:120]!r} {list(entry[1])}"


def _is_buffer(name: str, buffers: Collection[str]) -> bool:
    return name in buffers or any(fnmatchcase(name, pattern) for pattern in BUFFER_NAMES)


def listed(names: Iterable[str], shown: int = _SHOWN) -> str:
    """The first names as text, each shortened, since others may choose them."""
    texts = [name[:120] for name in names]
    more = len(texts) - shown
    return ", ".join(texts[:shown]) + (f" and {more} more" if more > 0 else "")
