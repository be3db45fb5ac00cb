"""A random direction, which takes the place of one that a member does not have (section 2d)."""

import numpy as np
from numpy.typing import NDArray

from federation.secure.blocks import BLOCK
from federation.secure.derivation import Purpose, own
from federation.secure.streams import Stream


def random_direction(secret: bytes, session: bytes, length: int) -> NDArray[np.float32]:
    """A vector (n,) of nearly normal coordinates, of variance 1. The same session gives the same one.

    Its coordinates are the numbers of `Stream.normal`, rounded to float32.

    Args:
        secret: the member's own secret of the session, which nobody else can derive.
        session: its digest.
        length: n.
    """
    # Section 2d: from the member's secret: who could derive it would see that the computation failed. From the session,
    # so a repeated question gets the same bytes.
    stream, vector = Stream(own(secret, Purpose.FAILED, session)), np.empty(length, np.float32)
    for start in range(0, length, BLOCK):
        part = vector[start : start + BLOCK]
        part[:] = stream.normal(len(part))
    return vector
