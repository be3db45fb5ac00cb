"""Openings 1 and 2: products of shares, which add up to the Gram matrix (section 2.4).

    o_ab = L_i <X_a(i), X_b(i)> + noise + sum_{j > i} PRG_ij - sum_{j < i} PRG_ij  mod p    for a <= b in W

X_w(i) are the shares that i holds of w's sketch, L_i is the Lagrange weight at 0 over all of W, PRG_ij comes from
DH(c_i, c_j) and view_open. The answers of all of W add up to 2^28 G + noise. The noise is uniform on the integers
[-B, B], independent for each pair (a, b) and each opening, derived from the member's secret under view_open; equal
noise in both openings would open a colluder's number exactly. B = floor(2^28 sqrt(3 / (k |W|)) / 4), computed in
integers: the noise of all is a quarter of the sketch's own error.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from federation.secure.derivation import Purpose, open_key, own
from federation.secure.fields import F_P, Elements, Integers, Reals
from federation.secure.masks import MaskStream
from federation.secure.member_keys import shared_secret
from federation.secure.payloads import pair_count
from federation.secure.shamir import weights
from federation.secure.streams import Stream
from federation.secure.thresholds import S_BITS


def noise_bound(rows: int, members: int) -> int:
    """B, for a sketch of k rows and |W| members."""
    return math.isqrt(3 * 2 ** (4 * S_BITS - 4) // (rows * members))


def noise(secret: bytes, view_open: bytes, rows: int, members: int) -> Integers:
    """The noise of a member in one opening, for each pair, (|W| (|W| + 1) / 2,).

    Args:
        secret: the member's own secret of the session.
        view_open: the view of the opening.
        rows: k of the sketch.
        members: |W|.
    """
    # Section 2.4: other noise in each opening. With equal noise, the difference of both would show a colluder's number
    # exactly.
    stream = Stream(own(secret, Purpose.NOISE, view_open))
    return stream.centred(noise_bound(rows, members), pair_count(members))


def open_masks(
    me: str, private: X25519PrivateKey, publics: Mapping[str, bytes], view_open: bytes
) -> tuple[MaskStream, ...]:
    """The masks of a member's elements.

    Args:
        me: the member's id.
        private: its c_i.
        publics: c_j of each member of W, by id; the member's own is not used.
        view_open: the view of the opening.

    Raises:
        Malformed: a public key is refused.
    """
    return tuple(
        MaskStream(open_key(shared_secret(private, public), view_open, me, other), 1 if me < other else -1)
        for other, public in sorted(publics.items())
        if other != me
    )


def opening(
    shares: Elements, points: Mapping[str, int], me: str, noise: Integers, masks: Iterable[MaskStream]
) -> Elements:
    """A member's elements, (|W| (|W| + 1) / 2,), the upper triangle by rows.

    Args:
        shares: X_w(i) for each w of W in order, (|W|, k).
        points: x_j of each member of W.
        me: the member's id.
        noise: its noise in this opening.
        masks: its masks in this opening.
    """
    ids = sorted(points)
    # Section 2.4: over all of W. If one answer is missing, the others do not add up to products, so fewer members need
    # an opening of their own.
    weight = weights(F_P, [points[name] for name in ids])[ids.index(me)]
    products = F_P.matmul(shares, shares.T)[np.triu_indices(len(ids))]
    # Section 2.4: noise on each entry, before the masks. Masks cancel in the sum, and G would be exact without it.
    elements = F_P.add(F_P.mul(products, np.full_like(products, weight)), F_P.encode(noise))
    # Section 2.4: without the masks, each answer would show the products of one member's shares.
    for mask in masks:
        words = Stream(mask.key).elements(F_P, len(elements))
        elements = F_P.add(elements, words) if mask.sign > 0 else F_P.sub(elements, words)
    return elements


def gram(answers: Iterable[Elements], members: int) -> Reals:
    """G with its noise, (|W|, |W|), symmetric, from the elements of all members of W."""
    total = np.zeros(pair_count(members), np.uint64)
    for elements in answers:
        total = F_P.add(total, elements)
    G = np.zeros((members, members))
    # Decoded after the sum: single answers are uniform elements, and the sum of what they stand for would be noise.
    G[np.triu_indices(members)] = np.ldexp(F_P.decode(total).astype(np.float64), -2 * S_BITS)
    return G + np.triu(G, 1).T
