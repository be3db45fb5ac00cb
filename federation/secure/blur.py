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
    # Section 2c: n_min - t is the fewest honest members of a sum. Divided by more, their noise together would be below
    # `blur`.
    return blur / math.sqrt(cohort.n_min - cohort.t)


def blurred(vector: Blocks, secret: bytes, view1: bytes, size: float) -> Iterator[Reals]:
    """The blocks of b, in float64.

    Args:
        vector: u, or any multiple of it, in blocks.
        secret: the member's own secret of the session.
        view1: the view after READY.
        size: `deviation`.
    """
    # Section 2c: from the member's own secret, or others could subtract it. From view1, so a repeated question gets the
    # same noise and not a second sample to average.
    stream = Stream(own(secret, Purpose.BLUR, view1))
    for block in vector:
        # Section 2c: in proportion to the coordinate. Equal noise of the same energy would leave the large coordinates
        # bare.
        yield block * (1.0 + size * stream.normal(len(block)))
