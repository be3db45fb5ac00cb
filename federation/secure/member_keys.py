"""A member's keys and mask secrets, and which public keys are refused (section 2.2).

All follow from the member's secret of the session: c_i, and sigma_b and sigma_s of five elements of F_q each; the
private key s_i is KDF(sigma_s): the coordinator has s_i once it reconstructs sigma_s. Public keys are refused when
X25519 with them gives zero, when one occurs twice among the 2 m of a session, and when one is not encoded canonically
(below 2^255 - 19): the same point in two encodings would not be seen as a repetition.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from federation.secure import derivation
from federation.secure.derivation import Purpose
from federation.secure.errors import Fault, Malformed
from federation.secure.fields import F_Q
from federation.secure.hashing import KEY, PublicKeys, exactly
from federation.secure.streams import Stream
from federation.secure.wire import pack

# Section 2.2: more bits than a key has, so the sharing is not the weakest part.
SIGMA = 5
"""Elements of F_q of a mask secret: 305 bits."""
SIGMA_BYTES = SIGMA * F_Q.width


@dataclass(frozen=True)
class MemberKeys:
    """The keys and secrets that a member derives from its secret of a session.

    Attributes:
        c: the private key of the channels to other members.
        s: the private key of the pair masks.
        sigma_b: the secret of the self mask, as 40 bytes.
        sigma_s: the secret of s, as 40 bytes.
    """

    c: X25519PrivateKey
    s: X25519PrivateKey
    sigma_b: bytes
    sigma_s: bytes

    @property
    def public(self) -> PublicKeys:
        """The public keys that the member shows at READY."""
        return PublicKeys(self.c.public_key().public_bytes_raw(), self.s.public_key().public_bytes_raw())


def member_keys(secret: bytes, session: bytes) -> MemberKeys:
    """All keys of a member in a session, from its 32 secret bytes."""
    sigma_b, sigma_s = (
        pack(F_Q, Stream(derivation.own(secret, purpose, session)).elements(F_Q, SIGMA))
        for purpose in (Purpose.SIGMA_B, Purpose.SIGMA_S)
    )
    c = X25519PrivateKey.from_private_bytes(derivation.own(secret, Purpose.C, session))
    return MemberKeys(c, pair_private_key(sigma_s, session), sigma_b, sigma_s)


def pair_private_key(sigma_s: bytes, session: bytes) -> X25519PrivateKey:
    """s_i from sigma_s, which the coordinator reconstructs for a member that is lost at MASK."""
    return X25519PrivateKey.from_private_bytes(derivation.pair_key(sigma_s, session))


def shared_secret(private: X25519PrivateKey, public: bytes) -> bytes:
    """X25519, 32 bytes.

    Raises:
        Malformed: the public key has another length, is not canonical, or gives zero.
    """
    # Section 2.2: one encoding for each point. In a second one, a key that was shown before would not be recognised.
    if int.from_bytes(exactly(public, KEY, "a public key"), "little") >= 2**255 - 19:
        raise Malformed(Fault.KEY_FORM, f"the public key {public.hex()} is not below 2^255 - 19")
    try:
        # Section 2.2: a key of low order gives zero with every private key: everybody would know masks and channels of
        # this member.
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise Malformed(Fault.KEY_ZERO, f"X25519 with {public.hex()} gives zero") from error


def check_keys(keys: Iterable[PublicKeys], known: Collection[bytes] = ()) -> None:
    """Checks public keys of a session; `known` are those that were checked before.

    Every private key is a multiple of 8 after clamping, so X25519 with a key of low order gives zero for every private
    key: a fixed one shows it.

    Raises:
        Malformed: a key has another length, is not canonical, gives zero, or occurs twice.
    """
    private, seen = X25519PrivateKey.from_private_bytes(bytes(KEY)), set(known)
    for public in (key for both in keys for key in (both.c, both.s)):
        shared_secret(private, public)
        # Section 2.2: in either place. The s of a lost member is opened. A member that shows it too, or uses it as c,
        # would be opened with it.
        if public in seen:
            raise Malformed(Fault.KEY_REPEATED, f"the public key {public.hex()} occurs twice")
        seen.add(public)
