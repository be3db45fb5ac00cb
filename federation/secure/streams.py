"""Streams: AES-256-CTR from a zero counter block, read as words and as elements (section 2a).

Elements are the lowest 31 or 61 bits of a word, skipped when equal to the modulus, so they are exactly uniform.
How many words are skipped is visible in the time; it says nothing of the words that are kept.
"""

import math

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from federation.secure.fields import Elements, Field, Integers, Reals
from federation.secure.wire import Words

_WORDS = 4  # of a nearly normal number; their sum is
_MEAN = 2.0 * (2**32 - 1)
_UNIT = math.sqrt(3) / 2.0**32  # over the standard deviation, up to 2^-64


class Stream:
    """The bytes of one key, in order. A key is used for one stream.

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        # Section 2a: from a zero counter, so each key may be used once: a second stream of it would make two equal
        # masks.
        self._cipher = Cipher(AES(key), CTR(bytes(16))).encryptor()

    def read(self, count: int) -> bytes:
        """The next bytes."""
        return self._cipher.update(bytes(count))

    def words(self, count: int) -> Words:
        """The next words of Z_2^32, (count,), not writable."""
        return np.frombuffer(self.read(4 * count), "<u4")

    def elements(self, field: Field, count: int) -> Elements:
        """The next uniform elements of a field, (count,)."""
        return self._below(field.modulus, field.bits, field.width, count)

    def centred(self, bound: int, count: int) -> Integers:
        """The next uniform integers from -bound to bound, (count,); bound is below 2^31.

        Each is the lowest bits of a 4-byte word, as many as 2 bound has, skipped when above 2 bound, less the bound.
        """
        bits = (2 * bound).bit_length()
        return self._below(2 * bound + 1, bits, 4, count).astype(np.int64) - bound

    def normal(self, count: int) -> Reals:
        """The next numbers of mean 0 and variance 1, nearly normal, (count,), float64, at most 3.47 in absolute value.

        Each is the sum of four words, less 2 (2^32 - 1), times sqrt(3) / 2^32.
        """
        words = self.words(_WORDS * count).reshape(count, _WORDS)
        total = words[:, 0].astype(np.float64)
        for column in range(1, _WORDS):
            total += words[:, column]  # below 2^34: exact
        return (total - _MEAN) * _UNIT

    def _below(self, limit: int, bits: int, width: int, count: int) -> Elements:
        """Words whose lowest bits are below the limit; no word after the last of them is read."""
        accepted = np.empty(0, np.uint64)
        while len(accepted) < count:
            # Section 2a: only as many words as are missing: what follows belongs to the next value, and another reader
            # would draw others.
            words = np.frombuffer(self.read(width * (count - len(accepted))), f"<u{width}").astype(np.uint64)
            words &= np.uint64(2**bits - 1)
            # Section 2a: skipped, not reduced. A remainder would make small values more likely, and shares would tell
            # of secrets.
            accepted = np.concatenate([accepted, words[words < np.uint64(limit)]])
        return accepted
