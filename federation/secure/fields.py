"""The fields F_p and F_q: integers mod the Mersenne primes p = 2^31 - 1 and q = 2^61 - 1, exactly (section 1).

Elements are uint64 arrays with values below the modulus. A product of matrices cuts both factors into limbs of 21 bits
and multiplies limbs in float64 with BLAS, at most 2^11 terms in a sum: each sum is an integer of at most
2^11 (2^21 - 1)^2 < 2^53, which float64 holds exactly in any order of summation, with any number of threads.
Values above half the modulus stand for negative numbers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.secure.errors import Fault, Malformed

Elements = NDArray[np.uint64]
Integers = NDArray[np.int64]
Reals = NDArray[np.float64]

_LIMB = 21
_TERMS = 1 << 11
_HALF_WORD = np.uint64(31)
_LOW_HALF = np.uint64(2**31 - 1)


@dataclass(frozen=True)
class Field:
    """Integers mod 2^bits - 1.

    Attributes:
        bits: 31 or 61.
        width: bytes of an element on the wire and in a stream.
    """

    bits: int
    width: int

    @property
    def modulus(self) -> int:
        """2^bits - 1."""
        return (1 << self.bits) - 1

    @property
    def word(self) -> str:
        """The NumPy type of an element on the wire: little-endian, unsigned."""
        return f"<u{self.width}"

    def reduce(self, x: Elements) -> Elements:
        """Any uint64 values mod the modulus."""
        p = np.uint64(self.modulus)
        for _ in range(2):  # the second fold is for p: 64 bits are more than twice 31
            x = (x & p) + (x >> np.uint64(self.bits))
        # Section 2a: one word for each element. p and 0 would be two words for the same share, and payloads with p are
        # refused.
        return np.where(x >= p, x - p, x)

    def add(self, x: Elements, y: Elements) -> Elements:
        """The sums x + y."""
        return self.reduce(x + y)

    def sub(self, x: Elements, y: Elements) -> Elements:
        """The differences x - y."""
        # The modulus first: x - y below 0 would wrap around 2^64, which is not 0 mod p.
        return self.reduce(x + (np.uint64(self.modulus) - y))

    def mul(self, x: Elements, y: Elements) -> Elements:
        """The products x y, element by element: halves of 31 bits, whose products are below 2^62."""
        x1, x0, y1, y0 = x >> _HALF_WORD, x & _LOW_HALF, y >> _HALF_WORD, y & _LOW_HALF
        high, low = self._rotate(self.reduce(x1 * y1), 62), self.reduce(x0 * y0)
        middle = self._rotate(self.reduce(x1 * y0 + x0 * y1), 31)
        return self.reduce(high + middle + low)

    def matmul(self, A: Elements, B: Elements) -> Elements:
        """A B, (n, r) of (n, l) and (l, r)."""
        limbs = -(-self.bits // _LIMB)
        total = np.zeros((A.shape[0], B.shape[1]), np.uint64)
        # At most 2^11 terms: a longer sum is rounded by float64, and the shares of two machines would differ.
        for start in range(0, A.shape[1], _TERMS):
            left = [_limb(A[:, start : start + _TERMS], i) for i in range(limbs)]
            right = [_limb(B[start : start + _TERMS], i) for i in range(limbs)]
            for place in range(2 * limbs - 1):
                pairs = [(i, place - i) for i in range(limbs) if 0 <= place - i < limbs]
                products = [(left[i] @ right[j]).astype(np.uint64) for i, j in pairs]  # below 2^53 each
                total = self.add(total, self._rotate(self.reduce(np.add.reduce(products)), _LIMB * place))
        return total

    def inverse(self, x: int) -> int:
        """1 / x of a Python integer, whose time depends on x: for public points only.

        Raises:
            ZeroDivisionError: x is 0.
        """
        if not x % self.modulus:
            raise ZeroDivisionError("0 has no inverse")
        return pow(x, -1, self.modulus)

    def encode(self, x: Integers) -> Elements:
        """Integers, each at most half the modulus in absolute value, as elements.

        Raises:
            Malformed: one is larger.
        """
        half = self.modulus // 2
        # Beyond half the modulus, a number would be decoded with the other sign.
        if x.size and not -half <= int(x.min()) <= int(x.max()) <= half:
            raise Malformed(Fault.RANGE, f"an integer is above {half} in absolute value")
        return np.where(x < 0, x + self.modulus, x).astype(np.uint64)

    def decode(self, x: Elements) -> Integers:
        """The integers nearest to 0 that elements stand for."""
        signed = x.astype(np.int64)
        return np.where(signed > self.modulus // 2, signed - self.modulus, signed)

    def _rotate(self, x: Elements, by: int) -> Elements:
        """2^by x: a rotation of the bits, since 2^bits = 1."""
        by %= self.bits
        if not by:
            return x
        return ((x << np.uint64(by)) & np.uint64(self.modulus)) | (x >> np.uint64(self.bits - by))


F_P = Field(31, 4)
"""Shares of the first sketch, and their products; 14 fractional bits."""
F_Q = Field(61, 8)
"""Shares of mask secrets, and of the second sketch with 16 fractional bits."""


def fixed(x: Reals, bits: int) -> Integers:
    """Reals as integers 2^bits x, rounded half to even.

    Raises:
        Malformed: a value that is not finite, or 2^62 or more.
    """
    scaled = np.rint(x * 2.0**bits)
    # Before the conversion: as an integer, NaN is an arbitrary number that would be shared and summed like any other.
    if not np.isfinite(scaled).all():
        raise Malformed(Fault.NON_FINITE, "a value is not finite")
    # Beyond 2^63 int64 wraps, and a vector that is too long would look short.
    if (np.abs(scaled) >= 2.0**62).any():
        raise Malformed(Fault.RANGE, f"a value does not fit into 62 bits with {bits} fractional bits")
    return scaled.astype(np.int64)


def _limb(x: Elements, i: int) -> Reals:
    return ((x >> np.uint64(_LIMB * i)) & np.uint64(2**_LIMB - 1)).astype(np.float64)
