"""The number by which runs are compared: higher is better, and a difference of 2 is two points, or 2 % of a loss."""

import math

MOST = 100.0  # a loss above this, or one that is not finite, counts as this


def score(value: float | None, *, loss: bool) -> float:
    """An accuracy in percent as it is, and 0 if it is missing; of a loss -100 times its natural logarithm.

    So the difference of two scores of losses is the difference of the losses in percent, to first order. A loss of 0
    counts as 1e-9.
    """
    reached = value is not None and math.isfinite(value)
    if not loss:
        return value if reached and value is not None else 0.0
    return -100 * math.log(max(1e-9, min(MOST, value if reached and value is not None else MOST)))
