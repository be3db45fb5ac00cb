"""Random numbers for differential privacy: from the operating system's entropy, never from a seed.

An attacker who knows the noise can subtract it. An attacker who knows the drawn samples learns the facts that sampling
hides. So neither may follow from the seed of a run. A random seed for PyTorch is not enough: its generator on a CPU
uses 32 bits of the seed, and an attacker can try all of these.
"""

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


class Noise:
    """A stream of independent draws: AES-256 in counter mode under a key from `os.urandom`.

    It takes no seed, so no draw can be repeated. The draws are double precision numbers, not reals: when a sum with
    them is rounded to float32, their own spacing is far below that of the result. This is a precaution, not a proof.
    """

    def __init__(self) -> None:
        self._cipher = Cipher(AES(os.urandom(32)), CTR(bytes(16))).encryptor()

    def uniform(self, count: int) -> Doubles:
        """Uniform multiples of 2^-53 in (0, 1], (count,)."""
        integers = np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")
        return ((integers >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53

    def gaussian(self, count: int) -> Doubles:
        """Standard normal numbers, (count,), by Box and Muller's method."""
        half = -(-count // 2)
        radius, angle = np.sqrt(-2.0 * np.log(self.uniform(half))), 2.0 * np.pi * self.uniform(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
