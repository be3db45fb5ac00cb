"""Every key and seed of a private round (section 2a, the table of labels).

KDF(secret, label, context) = HKDF-SHA256 without salt, 32 bytes, info = "fedpareto/v1/secure/" label 0x00 H(context).

Each function below is one row of the table. Pairs of ids stand in the order of their UTF-8 bytes. Where the table says
"other randomness, its purpose, the latest view", the purposes are those of `Purpose`: all that a member draws at DEAL
(`SHARES`, view1; first for the mask secrets, then for the sketch), the noise of an opening (`NOISE`,
view_open), all that it draws at CONFIRM (`CHECK_SHARES`, final), its training (`TRAINING`, session), its direction
after a failed one (`FAILED`, session), the blur of its update (`BLUR`, view1) and its noise on an evaluation
(`EVALUATION`, view_mask).
"""

from collections.abc import Sequence
from enum import StrEnum

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federation.secure.hashing import digests, hash_parts, members

_INFO = b"fedpareto/v1/secure/"


class Purpose(StrEnum):
    """The purposes of values that a member derives from its secret of a session; the value is the label."""

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
    info = _INFO + label.encode() + b"\0" + hash_parts(*context)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def own(secret: bytes, purpose: Purpose, view: bytes) -> bytes:
    """Derives a value from a member's own secret, 32 bytes; `view` is the session for keys and training."""
    return derive(secret, purpose, view)


def pair_key(sigma_s: bytes, session: bytes) -> bytes:
    """The private key s_i, from the member's second mask secret."""
    return derive(sigma_s, "pair-key", session)


def deal_key(shared: bytes, view1: bytes, sender: str, receiver: str) -> bytes:
    """Of a ciphertext of DEAL; `shared` is DH(c_i, c_j)."""
    return derive(shared, "deal", view1, sender.encode(), receiver.encode())


def confirm_key(shared: bytes, final: bytes, sender: str, receiver: str) -> bytes:
    """Of a ciphertext of CONFIRM; `shared` is DH(c_i, c_j)."""
    return derive(shared, "deal-T", final, sender.encode(), receiver.encode())


def open_key(shared: bytes, view_open: bytes, one: str, other: str) -> bytes:
    """Of PRG_ij, which two members add to and subtract from their answers to OPEN; `shared` is DH(c_i, c_j)."""
    return derive(shared, "open", view_open, *_pair(one, other))


def pair_mask_key(shared: bytes, view_mask: bytes, one: str, other: str) -> bytes:
    """Of the mask that two members add and subtract; `shared` is DH(s_i, s_j)."""
    return derive(shared, "pair-mask", view_mask, *_pair(one, other))


def self_mask_key(sigma_b: bytes, view_mask: bytes) -> bytes:
    """Of a member's own mask."""
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
    context = (view_mask, *members(V), *digests(inputs))
    return derive(key, "tau1", *context), derive(key, "tau2", *context)


def _pair(one: str, other: str) -> tuple[bytes, bytes]:
    smaller, larger = sorted((one.encode(), other.encode()))
    return smaller, larger
