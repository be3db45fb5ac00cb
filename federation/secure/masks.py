"""Masked updates, their sum, and what is subtracted from it (sections 2.5, 2.6, 2a).

    y_i = rint((u_i a_i) 2^28) + PRG(sigma_b) + sum_{j > i} PRG(DH(s_i, s_j)) - sum_{j < i} PRG(DH(s_i, s_j))  mod 2^32

over the members j of W, where every PRG depends on view_mask: members that were told different things make masks that
do not cancel. The order of members is that of their ids. u_i a_i and its rounding are float64, half to even, with
a_i = A_i 2^-32. The sum of the y of V holds the self masks of V and the pair masks between V and W without V.
All functions work block by block.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from federation.secure.blocks import BLOCK, Blocks
from federation.secure.derivation import pair_mask_key, self_mask_key
from federation.secure.errors import Fault, Malformed
from federation.secure.fields import Reals
from federation.secure.member_keys import shared_secret
from federation.secure.streams import Stream
from federation.secure.thresholds import COEFFICIENT_BITS, SUM_BITS
from federation.secure.wire import Words


@dataclass(frozen=True)
class MaskStream:
    """The words of a stream, added (+1) or subtracted (-1)."""

    key: bytes
    sign: int


def member_masks(
    me: str, private: X25519PrivateKey, publics: Mapping[str, bytes], sigma_b: bytes, view_mask: bytes
) -> tuple[MaskStream, ...]:
    """The masks of a member's y.

    Args:
        me: the member's id.
        private: its s_i.
        publics: s_j of each member of W, by id; the member's own is not used.
        sigma_b: the member's mask secret, 40 bytes.
        view_mask: the view of MASK.

    Raises:
        Malformed: a public key is refused.
    """
    pairs = (
        _pair_mask(private, me, other, public, view_mask) for other, public in sorted(publics.items()) if other != me
    )
    # Section 2.5: the self mask, too. If the vector of a member that counts as lost arrives late, its pair masks are
    # known, and this one alone hides it.
    return (MaskStream(self_mask_key(sigma_b, view_mask), 1), *pairs)


def masked(vector: Blocks, coefficient: int, masks: Sequence[MaskStream]) -> Iterator[Words]:
    """y, one block of words for each block of u.

    Args:
        vector: u in blocks, (d,) in all.
        coefficient: A = 2^32 a.
        masks: the member's masks.

    Raises:
        Malformed: u a is not finite, or above 8 in absolute value.
    """
    streams = [(Stream(mask.key), mask.sign) for mask in masks]
    a = np.float64(np.ldexp(coefficient, -COEFFICIENT_BITS))
    for block in vector:
        # Section 2a: float64, half to even. A restarted member must send the same bytes: two roundings under one mask
        # would show where they differ.
        rounded = np.rint(block.astype(np.float64) * a * 2.0**SUM_BITS)
        if len(rounded) and not -(2.0**31) <= rounded.min() <= rounded.max() < 2.0**31:  # or not a number
            raise Malformed(Fault.RANGE, "a coordinate of a u is not finite, or does not fit into the sum")
        # Through int64: a negative float becomes an undefined word if it is converted directly.
        words = rounded.astype(np.int64).astype(np.uint32)
        _apply(words, streams)
        yield words


def masked_integers(vector: NDArray[np.int64], masks: Sequence[MaskStream]) -> NDArray[np.uint64]:
    """Y of a sum of integers modulo 2^64: the vector, (n,), and the member's masks."""
    # Section 2e: whole words of 64 bits. In limbs, the sums of the limbs would tell more than the sum of the numbers.
    words: NDArray[np.uint64] = vector.astype(np.int64).view(np.uint64).copy()
    _apply(words, [(Stream(mask.key), mask.sign) for mask in masks])
    return words


def masks_of_sum(
    V: Collection[str],
    sigma_b: Mapping[str, bytes],
    lost: Mapping[str, X25519PrivateKey],
    publics: Mapping[str, bytes],
    view_mask: bytes,
) -> tuple[MaskStream, ...]:
    """The masks that the sum of the y of V holds.

    Args:
        V: the members whose y are in the sum.
        sigma_b: the mask secret of each member of V.
        lost: the private key s of each member of W without V.
        publics: s_j of each member of V.
        view_mask: the view of MASK.

    Raises:
        Malformed: a public key is refused.
    """
    # Section 2.6: self masks of V alone, pair keys of the lost alone. Both of one member would open its vector by
    # itself.
    self_masks = [MaskStream(self_mask_key(sigma_b[name], view_mask), 1) for name in sorted(V)]
    pair_masks = [
        MaskStream(mask.key, -mask.sign)  # computed from the lost member's side; the sum holds that of the other one
        for name, private in sorted(lost.items())
        for mask in (_pair_mask(private, name, other, publics[other], view_mask) for other in sorted(V))
    ]
    return (*self_masks, *pair_masks)


def unmask(total: Words, masks: Sequence[MaskStream]) -> None:
    """Subtracts masks from the sum of the y of V, (d,), in place; of integers modulo 2^32 or 2^64."""
    streams = [(Stream(mask.key), -mask.sign) for mask in masks]
    for start in range(0, len(total), BLOCK):
        _apply(total[start : start + BLOCK], streams)


def reals(words: Words) -> Reals:
    """R from unmasked words: the integers nearest to 0, divided by 2^28."""
    # Section 1: read as signed words: a sum of coordinates in 28 bits stays far below half of 2^32 (`failures_of_sum`
    # checks it).
    return words.astype(np.uint32).view(np.int32).astype(np.float64) * 2.0**-SUM_BITS


def _pair_mask(private: X25519PrivateKey, me: str, other: str, public: bytes, view_mask: bytes) -> MaskStream:
    """Of the member with this private key, with another one."""
    # Section 2.5: by the order of ids, so one of both adds what the other one subtracts.
    return MaskStream(pair_mask_key(shared_secret(private, public), view_mask, me, other), 1 if me < other else -1)


def _apply(words: Words, streams: Sequence[tuple[Stream, int]]) -> None:
    for stream, sign in streams:
        # Section 2a: little-endian words of the ring, 4 bytes or 8.
        masks = np.frombuffer(stream.read(words.nbytes), words.dtype.newbyteorder("<"))
        (np.add if sign > 0 else np.subtract)(words, masks, out=words)
