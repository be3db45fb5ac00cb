"""Bounds on the gradients and updates of one client, for algorithms for objectives."""

from collections.abc import Mapping
from typing import Final, TypeVar

BOUNDS: Final = ("clip", "normalise", "none")

KeyT = TypeVar("KeyT")


def factors(norms: Mapping[KeyT, float], bound: str, multiple: float) -> dict[KeyT, float]:
    """What to multiply each contribution by.

    The median is the lower one of two, over the norms that are not zero: it lies within the norms of honest clients as
    long as these are more than half.

    Args:
        norms: of contributions that should be about equally long.
        bound: "clip" shortens longer ones to `multiple` medians; "normalise" gives all the median norm; "none".
        multiple: at least 1.
    """
    positive = sorted(norm for norm in norms.values() if norm > 0)
    if bound == "none" or not positive:
        return dict.fromkeys(norms, 1.0)
    median = positive[(len(positive) - 1) // 2]
    if bound == "clip":
        return {key: min(1.0, multiple * median / norm) if norm > 0 else 1.0 for key, norm in norms.items()}
    return {key: median / norm if norm > 0 else 1.0 for key, norm in norms.items()}
