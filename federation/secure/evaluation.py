"""The vector of a private evaluation: the entries that all members compute, and each member's noise on them.

    y_i = a_i (x_i / C + s z_i / C)    s = sigma / sqrt(n_min - t),    C = sqrt(n) (1 + 3 sigma)

x_i has n entries in [0, 1], z_i is standard normal. So the noise of n_min members, of whom t subtract their own, has a
standard deviation of sigma in each entry of the sum of all x_i. Entries that a member of W does not compute are 0 for
all members, without noise.
"""

import math
from collections.abc import Collection
from statistics import NormalDist

import numpy as np

from federation.secure.derivation import Purpose, own
from federation.secure.fields import Reals
from federation.secure.streams import Stream
from federation.secure.thresholds import Thresholds

_BITS = 52  # of a word: (w + 1/2) / 2^52 is exact in float64, and neither 0 nor 1


def clip(length: int, sigma: float) -> float:
    """C: no sum of vectors with noise is longer than the checks of a sum allow."""
    # Section 2b: room for the noise. Without it, honest vectors with noise would fail the check of the sum's length.
    return math.sqrt(length) * (1 + 3 * sigma)


def deviation(sigma: float, cohort: Thresholds) -> float:
    """s, the standard deviation of one member's noise on an entry in [0, 1]."""
    # Section 2b: n_min - t is the fewest honest members. Divided by more, the noise in the sum would be below sigma.
    return sigma / math.sqrt(cohort.n_min - cohort.t)


def deviation_of_mean(sigma: float, cohort: Thresholds, members: int) -> float:
    """The standard deviation of the noise on the mean of an entry over this many members."""
    return deviation(sigma, cohort) / math.sqrt(members)


def common(measured: Collection[bytes]) -> bytes:
    """A byte for each entry: 1 if every member computes it. `measured` has these bytes of each member."""
    # Section 2b: 1 only if all compute it. A metric of few members, summed over all, would be that of those few.
    return bytes(min(column) for column in zip(*measured, strict=True))


def noise(secret: bytes, view_mask: bytes, length: int) -> Reals:
    """The noise z of a member, (n,): standard normal.

    The same session and the same view give the same noise, so a repeated question shows nothing more.

    Args:
        secret: the member's own secret of the session, which nobody else can derive.
        view_mask: the view of MASK.
        length: n.
    """
    # Section 2b: from view_mask: other lists get other noise, and the same question the same, so asking again averages
    # nothing away.
    words = np.frombuffer(Stream(own(secret, Purpose.EVALUATION, view_mask)).read(8 * length), "<u8")
    normal = NormalDist()
    lowest = [int(word) % 2**_BITS for word in words]
    return np.array([normal.inv_cdf((word + 0.5) / 2**_BITS) for word in lowest])
