"""Proofs of possession: signatures of a client's request with the Ed25519 key that it registers.

The key signs everything that must be provable later. A proof covers a context string, so that it is valid for one
purpose only.
"""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from federation.trust.keys import IdentityError

ENROLLMENT_CONTEXT = b"fedpareto/v1/enrollment\0"
RENEWAL_CONTEXT = b"fedpareto/v1/renewal\0"
UNSIGNED = bytes(32)  # the recorded signing key of a simulated client, which has none; enrollment refuses it

# The encodings of Ed25519 points of small order, sign bit cleared; they include p - 1, p and p + 1. With such a key, a
# signature can be valid for messages that were never signed, so its holder could deny every signature.
_SMALL_ORDER = frozenset(
    bytes.fromhex(point)
    for point in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


def signing_public_key(raw: bytes) -> Ed25519PublicKey:
    """Parses the Ed25519 key that a new client asks to register.

    Raises:
        IdentityError: not 32 bytes, or a point of small order.
    """
    if len(raw) != 32:
        raise IdentityError(f"an Ed25519 public key has 32 bytes, not {len(raw)}")
    if raw[:31] + bytes([raw[31] & 0x7F]) in _SMALL_ORDER:
        raise IdentityError("a point of small order cannot be an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw)


def prove_possession(key: Ed25519PrivateKey, secret: bytes, csr: bytes) -> bytes:
    """Signs the request to enroll, the join string's secret and the CSR, with the key that it registers."""
    return key.sign(ENROLLMENT_CONTEXT + secret + csr)


def proves_possession(key: Ed25519PublicKey, proof: bytes, secret: bytes, csr: bytes) -> bool:
    """True if `prove_possession` made `proof` with this key, secret and request."""
    return _verifies(key, proof, ENROLLMENT_CONTEXT + secret + csr)


def prove_renewal(key: Ed25519PrivateKey, csr: bytes) -> bytes:
    """Signs the CSR for a client's next certificate with the client's signing key."""
    return key.sign(RENEWAL_CONTEXT + csr)


def proves_renewal(key: Ed25519PublicKey, proof: bytes, csr: bytes) -> bool:
    """True if `prove_renewal` made `proof` with this key and request."""
    return _verifies(key, proof, RENEWAL_CONTEXT + csr)


def _verifies(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True
