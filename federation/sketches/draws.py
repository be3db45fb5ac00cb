"""Seeds of sketches, and random numbers that never change: raw words of Philox, whose bits NumPy guarantees."""

import numpy as np
from numpy.typing import NDArray

from federation.digests import derived_seed


def shared_seed(seed: int, round_: int) -> int:
    """The seed of all clients in a round, 0 to 2^63 - 1, from the run's seed and the round, from 0."""
    return derived_seed(f"fedpareto/sketch\0shared\0{seed}\0{round_}")


def own_seed(seed: int, round_: int, client_id: str) -> int:
    """The seed of one client in a round, 0 to 2^63 - 1."""
    return derived_seed(f"fedpareto/sketch\0own\0{seed}\0{round_}\0{client_id}")


def words(seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` words of a seed's stream, uniform over 64 bits."""
    drawn: NDArray[np.uint64] = np.random.Philox(key=seed % 2**128).random_raw(count)
    return drawn


def signs(raw: NDArray[np.uint64], count: int) -> NDArray[np.int8]:
    """`count` values of -1 or 1, one from each bit."""
    bits = np.unpackbits(raw.astype("<u8").view(np.uint8), count=count)
    return 2 * bits.astype(np.int8) - 1


def uniform(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [-1, 1), one from each word."""
    drawn: NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    return drawn
