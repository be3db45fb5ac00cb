"""Sketches: short messages from which the server estimates the Gram matrix of the objectives.

>>> import numpy as np
>>> from federation.sketches.base import ClientSketch
>>> left_and_right = sketch("count", d=1000, objectives=("left", "right"), budget=0.1)
>>> left_and_right.rows(("left", "right"))
(('sums', 100),)
>>> rows = left_and_right.compress(np.eye(2, 1000), shared_seed=1, own_seed=2)
>>> own = ClientSketch(("left", "right"), np.ones(2), rows)
>>> left_and_right.gram([own], ("left", "right"), shared_seed=1).tolist()
[[1.0, 0.0], [0.0, 1.0]]
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType

from federation.plugins import CodeOrigin, PluginError, Plugins
from federation.sketches.base import Sketch, SketchError
from federation.sketches.grams import GramSum
from federation.sketches.linear import CountSketch, Exact, RandomMask
from federation.sketches.svd import Svd, TwoWaySvd
from federation.sketches.top_k import TopK

SKETCHES: Mapping[str, type[Sketch]] = MappingProxyType(
    {kind.name: kind for kind in (CountSketch, Svd, TwoWaySvd, TopK, RandomMask, GramSum, Exact)}
)


_PLUGINS: Plugins[Sketch] = Plugins("sketch", "fedpareto.sketches", Sketch, "fedpareto.Sketch", tuple(SKETCHES))


def load(name: str) -> type[Sketch]:
    """The class of a sketch: one of `SKETCHES`, of an entry point of `fedpareto.sketches`, or `module:Class`.

    Raises:
        SketchError: there is none, or its code raises an exception.
    """
    if name in SKETCHES:
        return SKETCHES[name]
    try:
        return _PLUGINS.find(name)
    except PluginError as error:
        raise SketchError(str(error)) from error


def origin(name: str) -> CodeOrigin | None:
    """The code of a plug-in; None for a built-in sketch. Raises SketchError where there is no such sketch."""
    return None if name in SKETCHES else _PLUGINS.origin(name, load(name))


def sketch(name: str, *, d: int, objectives: tuple[str, ...], budget: float = 1.0) -> Sketch:
    """A sketch by its name, as in `load`; the other arguments are the fields of `Sketch`.

    The name may come from another machine, so it imports no module: `module:Class` must have been given to `load` in
    this process before.

    Raises:
        SketchError: no such sketch, or a value that it cannot have.
    """
    if ":" in name and name.partition(":")[0] not in sys.modules:
        raise SketchError(f"sketch {name!r} is not allowed here: a worker allows it with sketches in worker.toml")
    kind = load(name)
    try:
        with _PLUGINS.code(name, f"making {kind.__name__}", SketchError):
            instance = kind(d=d, objectives=objectives, budget=budget)
    except PluginError as error:
        raise SketchError(str(error)) from error
    object.__setattr__(instance, "name", name)  # it is frozen, and a plug-in has the name in the specification
    return instance
