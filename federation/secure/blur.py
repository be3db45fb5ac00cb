"""The blur of a member's update: from DEAL on, a member uses v in place of its vector u (section 2c).

    b_j = u_j (1 + c z_j / sqrt(n_min - t)),    v = b ||u|| / ||b||

z_j is nearly normal with mean 0 and variance 1, from a stream of the member's secret. So nobody else knows z, the same
question gets the same bytes, and nothing of it is stored. The noise of n_min members with equal coefficients, of whom t
subtract their own, has c times the length of one member's part on a coordinate that all use alike.
"""

import math
from collections.abc import Iterator

from federation.secure.blocks import Blocks
from federation.secure.derivation import Purpose, own
from federation.secure.fields import Reals
from federation.secure.streams import Stream
from federation.secure.thresholds import Thresholds


def deviation(blur: float, cohort: Thresholds) -> float:
    """C / sqrt(n_min - t): the standard deviation of a member's noise on a coordinate, relative to the coordinate."""
    return blur / math.sqrt(cohort.n_min - cohort.t)


def blurred(vector: Blocks, secret: bytes, view1: bytes, size: float) -> Iterator[Reals]:
    """The blocks of b, in float64.

    Args:
        vector: u, or any multiple of it, in blocks.
        secret: the member's own secret of the session.
        view1: the view after READY.
        size: `deviation`.
    """
    stream = Stream(own(secret, Purpose.BLUR, view1))
    for block in vector:
        yield block * (1.0 + size * stream.normal(len(block)))
