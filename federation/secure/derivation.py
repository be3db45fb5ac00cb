"""Every key and seed of a private round (section 2a, the table of labels).

KDF(secret, label, context) = HKDF-SHA256 without salt, 32 bytes, info = "fedpareto/v1/secure/" label 0x00 H(context).

Each function below is one row of the table. Pairs of ids stand in the order of their UTF-8 bytes. `Purpose` has
the rows of the member's own secret: its keys and mask secrets (session), all that it draws at DEAL (`SHARES`, view1;
first for the mask secrets, then for the sketch), the noise of an opening (`NOISE`, view_open), all that it draws at
CONFIRM (`CHECK_SHARES`, final), its training (`TRAINING`, session), its direction after a failed one (`FAILED`,
session), the blur of its update (`BLUR`, view1) and its noise on an evaluation (`EVALUATION`, view_mask).
"""

from collections.abc import Sequence
from enum import StrEnum

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federation.secure.hashing import digests, hash_parts, members

_INFO = b"fedpareto/v1/secure/"


class Purpose(StrEnum):
    """The purposes of values that a member derives from its secret of a session; the value is the label."""

    # Section 2a: no two alike. With one label for two purposes, one stream would hide two things, and their difference
    # would show.
    C = "c"
    SIGMA_B = "sigma-b"
    SIGMA_S = "sigma-s"
    TRAINING = "training"
    FAILED = "failed"
    SHARES = "shares"
    NOISE = "noise"
    CHECK_SHARES = "check-shares"
    EVALUATION = "evaluation"
    BLUR = "blur"


def derive(secret: bytes, label: str, *context: bytes) -> bytes:
    """KDF(secret, label, context), 32 bytes."""
    # Section 2a: the zero byte ends the label, so no label and context read like those of another row of the table.
    info = _INFO + label.encode() + b"\0" + hash_parts(*context)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def own(secret: bytes, purpose: Purpose, view: bytes) -> bytes:
    """Derives a value from a member's own secret, 32 bytes; `view` is the session for keys and training."""
    return derive(secret, purpose, view)


def pair_key(sigma_s: bytes, session: bytes) -> bytes:
    """The private key s_i, from the member's second mask secret."""
    # Section 2.2: s_i follows from sigma_s, so the coordinator can compare what it reconstructs with the public key.
    return derive(sigma_s, "pair-key", session)


def deal_key(shared: bytes, view1: bytes, sender: str, receiver: str) -> bytes:
    """Of a ciphertext of DEAL; `shared` is DH(c_i, c_j)."""
    # Section 2a: sender before receiver. One key for both directions would encrypt two plaintexts with the same nonce.
    return derive(shared, "deal", view1, sender.encode(), receiver.encode())


def confirm_key(shared: bytes, final: bytes, sender: str, receiver: str) -> bytes:
    """Of a ciphertext of CONFIRM; `shared` is DH(c_i, c_j)."""
    # Section 2a: another label than at DEAL. Its key has encrypted a plaintext with this nonce already.
    return derive(shared, "deal-T", final, sender.encode(), receiver.encode())


def open_key(shared: bytes, view_open: bytes, one: str, other: str) -> bytes:
    """Of PRG_ij, which two members add to and subtract from their answers to OPEN; `shared` is DH(c_i, c_j)."""
    # Section 2.4: from view_open: with the same masks in openings 1 and 2, the difference of two answers would be bare.
    return derive(shared, "open", view_open, *_pair(one, other))


def pair_mask_key(shared: bytes, view_mask: bytes, one: str, other: str) -> bytes:
    """Of the mask that two members add and subtract; `shared` is DH(s_i, s_j)."""
    # Section 2.1: from view_mask, so members that were told other lists or coefficients make masks that do not cancel.
    return derive(shared, "pair-mask", view_mask, *_pair(one, other))


def self_mask_key(sigma_b: bytes, view_mask: bytes) -> bytes:
    """Of a member's own mask."""
    # Section 2.1: from the view, too: under one self mask, two vectors would show their difference.
    return derive(sigma_b, "self-mask", view_mask)


def count_key(seed: bytes) -> bytes:
    """Of the buckets of a sketch; the seed is the session, or tau1."""
    return derive(seed, "count")


def dense_key(seed: bytes) -> bytes:
    """Of the signs of a sketch; the seed is the session, or tau1."""
    return derive(seed, "dense")


def challenge_key(tau2: bytes) -> bytes:
    """Of rho and s, with which the coordinator tests the shares of CONFIRM."""
    return derive(tau2, "challenge")


def taus(key: bytes, view_mask: bytes, V: Sequence[str], inputs: Sequence[bytes]) -> tuple[bytes, bytes]:
    """tau1 and tau2, from the coordinator's challenge key when all masked updates are in.

    Args:
        key: the challenge key, which is not the signing key.
        view_mask: the view of MASK.
        V: the members whose masked updates arrived, sorted.
        inputs: the digests of these, 32 bytes each, in the order of V.

    Raises:
        Malformed: V is not sorted, or a digest has another length.
    """
    # Section 2.7: from the digests of all masked vectors, so no challenge exists before they are fixed. A cheat that
    # knew it could choose a vector that passes.
    context = (view_mask, *members(V), *digests(inputs))
    return derive(key, "tau1", *context), derive(key, "tau2", *context)


def _pair(one: str, other: str) -> tuple[bytes, bytes]:
    # Section 2a: both members must get the same key; in the order "me, other" their masks would not cancel.
    smaller, larger = sorted((one.encode(), other.encode()))
    return smaller, larger
