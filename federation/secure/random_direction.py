"""A random direction, which takes the place of one that a member does not have (section 2c)."""

import math

import numpy as np
from numpy.typing import NDArray

from federation.secure.blocks import BLOCK
from federation.secure.derivation import Purpose, own
from federation.secure.streams import Stream

_WORDS = 4
"""Words of a coordinate: their sum, less its mean, is nearly normal, and its steps are far below those of float32."""
_SCALE = math.sqrt(3) / 2**32


def random_direction(secret: bytes, session: bytes, length: int) -> NDArray[np.float32]:
    """A vector (n,) of nearly normal coordinates, of variance 1. The same session gives the same one.

    Coordinate j is the sum of words 4j to 4j + 3 of the stream, less 2 (2^32 - 1), times sqrt(3) / 2^32, in float64.

    Args:
        secret: the member's own secret of the session, which nobody else can derive.
        session: its digest.
        length: n.
    """
    stream, vector = Stream(own(secret, Purpose.FAILED, session)), np.empty(length, np.float32)
    for start in range(0, length, BLOCK):
        part = vector[start : start + BLOCK]
        words = stream.words(_WORDS * len(part)).reshape(-1, _WORDS)
        part[:] = (words.sum(axis=1, dtype=np.int64) - 2 * (2**32 - 1)) * np.float64(_SCALE)
    return vector
