"""DEAL: shares of a member's mask secrets and of its sketch (sections 2.2, 2.3, 2a).

A ciphertext holds 5 shares of sigma_b and 5 of sigma_s (F_q, degree t_mask - 1), then k of the sketch (F_p, degree t).
In mode `sum` there is no sketch: k = 0.
"""

from dataclasses import dataclass

from federation.secure.derivation import Purpose, own
from federation.secure.encryption import TAG
from federation.secure.fields import F_P, F_Q, Elements
from federation.secure.hashing import exactly
from federation.secure.member_keys import SIGMA, SIGMA_BYTES, MemberKeys
from federation.secure.shamir import share
from federation.secure.streams import Stream
from federation.secure.thresholds import Thresholds
from federation.secure.wire import pack, unpack


@dataclass(frozen=True, eq=False)
class DealShares:
    """The shares of one member from a dealer after DEAL.

    Attributes:
        sigma_b: shares of the dealer's first mask secret, (5,) in F_q.
        sigma_s: of the second one, (5,) in F_q.
        sketch: of its sketch, (k,) in F_p.
    """

    sigma_b: Elements
    sigma_s: Elements
    sketch: Elements

    def to_bytes(self) -> bytes:
        """The plaintext."""
        return pack(F_Q, self.sigma_b) + pack(F_Q, self.sigma_s) + pack(F_P, self.sketch)

    @classmethod
    def from_bytes(cls, plaintext: bytes, rows: int) -> "DealShares":
        """Reads a plaintext of a sketch of k rows.

        Raises:
            Malformed: a wrong length, or an element at or above the modulus.
        """
        # Section 2.4: a dealer may encrypt anything. A plaintext of another length would be cut into shares of
        # something else.
        exactly(plaintext, deal_bytes(rows) - TAG, "a plaintext of DEAL")
        sigma = unpack(F_Q, plaintext[: 2 * SIGMA_BYTES], 2 * SIGMA)
        return cls(sigma[:SIGMA], sigma[SIGMA:], unpack(F_P, plaintext[2 * SIGMA_BYTES :], rows))


def deal_bytes(rows: int) -> int:
    """The length of a ciphertext of DEAL for a sketch of k rows."""
    return 2 * SIGMA_BYTES + rows * F_P.width + TAG


def deal_shares(
    keys: MemberKeys, sketch: Elements, thresholds: Thresholds, secret: bytes, view1: bytes
) -> tuple[DealShares, ...]:
    """The shares that a member deals, one for each point 1 ... m.

    Args:
        keys: the member's own.
        sketch: S u, (k,) in F_p.
        thresholds: of the cohort.
        secret: the member's own secret of the session, from which all coefficients follow.
        view1: the view after READY.
    """
    # Section 2: points from 1 on. The share at 0 is the secret itself.
    points, stream = range(1, thresholds.m + 1), Stream(own(secret, Purpose.SHARES, view1))
    sigma = unpack(F_Q, keys.sigma_b + keys.sigma_s, 2 * SIGMA)
    # Section 2.2: degree t_mask - 1, so fewer than t_mask members open no mask. Mask secrets come first in the stream
    # (section 2a).
    masks = share(F_Q, sigma, thresholds.t_mask - 1, points, stream)
    # Section 2.3: degree t, so t colluders learn nothing of a sketch; a higher one would need more members to open the
    # products.
    sketches = share(F_P, sketch, thresholds.t, points, stream)
    return tuple(DealShares(row[:SIGMA], row[SIGMA:], part) for row, part in zip(masks, sketches, strict=True))
