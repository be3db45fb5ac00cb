"""Sketches: what a client sends of its Jacobian, so that the server knows the objectives' Gram matrix.

>>> import numpy as np
>>> left_and_right = sketch("count", d=1000, objectives=("left", "right"), budget=0.1)
>>> left_and_right.rows(("left", "right"))
(('sums', 100),)
>>> rows = left_and_right.compress(np.eye(2, 1000), shared_seed=1, own_seed=2)
>>> part = Part(("left", "right"), np.ones(2), rows)
>>> left_and_right.gram([part], ("left", "right"), shared_seed=1).tolist()
[[1.0, 0.0], [0.0, 1.0]]
"""

from collections.abc import Mapping
from types import MappingProxyType

from federation.sketches.base import Linear, Part, Sketch, SketchError, clip_to_psd
from federation.sketches.count import CountSketch
from federation.sketches.exact import Exact
from federation.sketches.grams import GramSum
from federation.sketches.mask import Mask
from federation.sketches.svd import Svd, TwoWaySvd
from federation.sketches.top_k import TopK

__all__ = ["SKETCHES", "Linear", "Part", "Sketch", "SketchError", "TwoWaySvd", "clip_to_psd", "sketch"]

SKETCHES: Mapping[str, type[Sketch]] = MappingProxyType(
    {kind.name: kind for kind in (CountSketch, Svd, TwoWaySvd, TopK, Mask, GramSum, Exact)}
)


def sketch(name: str, *, d: int, objectives: tuple[str, ...], budget: float = 1.0) -> Sketch:
    """A sketch by its name.

    Args:
        name: one of `SKETCHES`.
        d: columns of a Jacobian.
        objectives: all objectives of the task.
        budget: floats of the first upload of a client that serves all of them, as a share of d.

    Raises:
        SketchError: no such sketch, or a value that it cannot have.
    """
    kind = SKETCHES.get(name)
    if kind is None:
        raise SketchError(f"no sketch {name!r}: there are {', '.join(SKETCHES)}")
    return kind(d=d, objectives=objectives, budget=budget)
