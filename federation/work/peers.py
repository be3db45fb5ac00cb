"""Replies of other members, which a member verifies itself."""

from collections.abc import Mapping
from dataclasses import fields

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from federation.record.bound_fields import repeated
from federation.refusals import Refusal
from federation.trust.envelope import verify
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from federation.work.base import WorkError
from federation.work.registry import STAGES, decode_statement
from federation.work.site import PeerReply


def open_reply(envelope: bytes, roster: Mapping[str, bytes]) -> PeerReply:
    """Opens the reply in an envelope, which the key of its client in the roster has signed.

    Raises:
        ValueError: it is not a signed reply, or its client is not in the roster with this key.
    """
    manifest = signed_reply(envelope, roster)
    try:
        statement = decode_statement(STAGES[0], manifest.statement) if manifest.statement else None
    except WorkError as error:
        raise ValueError(str(error)) from error
    stated = [field.name for field in fields(PeerReply) if field.name != "statement"]
    return PeerReply(**repeated(manifest, stated), statement=statement)


def signed_reply(envelope: bytes, roster: Mapping[str, bytes]) -> ReplyManifest:
    """The message of the reply in an envelope. Errors are those of `open_reply`."""
    try:
        signed = SignedEnvelope.FromString(envelope)
        claimed = ReplyManifest.FromString(signed.manifest).client_id
        key = roster.get(claimed)
        return verify(signed, ReplyManifest, None if key is None else Ed25519PublicKey.from_public_bytes(key))
    except DecodeError:
        raise ValueError("it is not a signed envelope") from None
    except Refusal as error:
        raise ValueError(str(error)) from error
