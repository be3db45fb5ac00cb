"""The blur of a member's update: from DEAL on, a member uses v in place of its vector u (section 2c).

    b_j = u_j (1 + c z_j / sqrt(n_min - t)),    v = b ||u|| / ||b||

z_j is nearly normal with mean 0 and variance 1: the sum of four 32-bit words less its mean, over its standard
deviation. The words are those of a stream of the member's secret. So nobody else knows z, the same question gets the
same bytes, and nothing is stored. The noise of n_min members, of whom t subtract their own, is c times the coordinates
of a sum of n_min - t vectors.
"""

import math
from collections.abc import Iterator

import numpy as np

from federation.secure.blocks import Blocks
from federation.secure.derivation import Purpose, own
from federation.secure.fields import Reals
from federation.secure.streams import Stream
from federation.secure.thresholds import Thresholds

_WORDS = 4
_MEAN = 2.0 * (2**32 - 1)  # of the sum of four words
_UNIT = math.sqrt(3) / 2.0**32  # its standard deviation is 2^32 / sqrt(3), up to 2^-64


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
        yield block * (1.0 + size * normal(stream, len(block)))


def normal(stream: Stream, count: int) -> Reals:
    """The next numbers of a stream with mean 0 and variance 1, (count,), from four words each."""
    words = stream.words(_WORDS * count).reshape(count, _WORDS)
    total = words[:, 0].astype(np.float64)
    for column in range(1, _WORDS):
        total += words[:, column]  # below 2^34: exact
    return (total - _MEAN) * _UNIT
