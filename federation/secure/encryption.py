"""Ciphertexts between members (section 2a).

ChaCha20-Poly1305 with a nonce of 12 zero bytes: every key is derived for one sender, one receiver and one view, and
encrypts one plaintext. The associated data is the view: view1 at DEAL, final at CONFIRM. `dealing` and `verified_mode`
say what the plaintexts hold.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from federation.secure.errors import Fault, Malformed

TAG = 16
"""Bytes by which a ciphertext is longer than its plaintext."""
# Section 2a: fixed, so a key that encrypts twice gives away the difference of both plaintexts.
_NONCE = bytes(12)


def encrypt(key: bytes, plaintext: bytes, view: bytes) -> bytes:
    """The ciphertext, 16 bytes longer than the plaintext. A key encrypts one plaintext."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, plaintext, view)


def decrypt(key: bytes, ciphertext: bytes, view: bytes) -> bytes:
    """The plaintext.

    Raises:
        Malformed: the ciphertext is not authentic for this key and view.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, ciphertext, view)
    # Section 2.4: a bad ciphertext is the dealer's fault, and has one reason. ValueError: it is shorter than its tag.
    except (InvalidTag, ValueError) as error:
        raise Malformed(Fault.NOT_AUTHENTIC, f"a ciphertext of {len(ciphertext)} bytes is not authentic") from error
