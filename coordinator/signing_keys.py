"""The signing keys that are accepted: the coordinator's own, and those of a member, from the record."""

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError
from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.refusals import Refusal
from federation.trust.envelope import key_id
from federation.trust.key_chain import KeyChain, whole_chain
from federation.v1.common_pb2 import KeyRotation, SignedEnvelope
from storage.models import Rotation


@dataclass(frozen=True)
class Signing:
    """The keys with which the coordinator signs and derives secrets.

    Attributes:
        federation_id: its federation.
        key: signs from now on.
        chain: the public keys, former ones included.
        secret: its own secrets are derived from it; it stays when the key changes, so that a round goes on.
    """

    federation_id: str
    key: Ed25519PrivateKey
    chain: KeyChain
    secret: bytes

    def keys_of(self, session: Session, client_id: str, present: bytes, signed: SignedEnvelope) -> KeyChain:
        """The keys of a member, whose `present` raw key is on record, that an envelope could be signed with.

        The former ones are read, and their rotations verified, if it names another key than the present one.

        Raises:
            Refusal: the rotations on record do not lead to the present key.
        """
        return member_keys(
            session, client_id, present, signed, federation_id=self.federation_id, coordinator=self.chain
        )


def member_keys(
    session: Session,
    client_id: str,
    present: bytes,
    signed: SignedEnvelope,
    *,
    federation_id: str,
    coordinator: KeyChain,
) -> KeyChain:
    """As `Signing.keys_of`, with the public keys of the coordinator."""
    chain = KeyChain(Ed25519PublicKey.from_public_bytes(present))
    if signed.key_id == key_id(chain.present):
        return chain
    rotations = rotations_of(session, client_id)
    return whole_chain(
        rotations, chain.present, federation_id=federation_id, client_id=client_id, coordinator=coordinator
    )


def rotations_of(session: Session, client_id: str) -> Sequence[KeyRotation]:
    """The rotations of a member's keys, the oldest first.

    Raises:
        Refusal: `manifest`: the record is damaged.
    """
    rows = select(Rotation.rotation).where(Rotation.client_id == client_id).order_by(Rotation.number)
    try:
        return [KeyRotation.FromString(row) for row in session.scalars(rows)]
    except DecodeError:
        raise Refusal("manifest", f"a rotation of {client_id} on record is damaged") from None
