"""Signed envelopes: sign bytes, never a re-encoding (docs/reference/protocol.md).

The sender serialises a manifest once, signs `context || 0x00 || manifest` with Ed25519 and sends both; the receiver
verifies the bytes that it received and parses them afterwards.
"""

import base64
from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError, Message

from federation.digests import digest, hasher
from federation.refusals import Refusal
from federation.v1.common_pb2 import (
    AssignmentManifest,
    BackupManifest,
    CancelManifest,
    CheckpointManifest,
    ConsentManifest,
    DecisionManifest,
    DeclineManifest,
    LoginManifest,
    LogKeyManifest,
    ModelManifest,
    ReceiptManifest,
    ReplyManifest,
    RequestManifest,
    RestoreManifest,
    ResultManifest,
    RevocationManifest,
    RotationManifest,
    RotationReceiptManifest,
    RunManifest,
    SignedEnvelope,
    StepManifest,
    TimeManifest,
    WithdrawalManifest,
)

# One label per type of manifest: a signature for one type is not valid for another.
CONTEXTS: dict[type[Message], bytes] = {
    AssignmentManifest: b"fedpareto/v1/assignment",
    ReplyManifest: b"fedpareto/v1/reply",
    RunManifest: b"fedpareto/v1/run",
    ConsentManifest: b"fedpareto/v1/consent",
    DeclineManifest: b"fedpareto/v1/decline",
    ReceiptManifest: b"fedpareto/v1/receipt",
    StepManifest: b"fedpareto/v1/step",
    ResultManifest: b"fedpareto/v1/result",
    TimeManifest: b"fedpareto/v1/time",
    CancelManifest: b"fedpareto/v1/cancel",
    RevocationManifest: b"fedpareto/v1/revocation",
    RestoreManifest: b"fedpareto/v1/restore",
    BackupManifest: b"fedpareto/v1/backup",
    LogKeyManifest: b"fedpareto/v1/log-key",
    CheckpointManifest: b"fedpareto/v1/checkpoint",
    LoginManifest: b"fedpareto/v1/login",
    RequestManifest: b"fedpareto/v1/request",
    DecisionManifest: b"fedpareto/v1/decision",
    RotationManifest: b"fedpareto/v1/rotation",
    RotationReceiptManifest: b"fedpareto/v1/rotation-receipt",
    ModelManifest: b"fedpareto/v1/model",
    WithdrawalManifest: b"fedpareto/v1/withdrawal",
}

ManifestT = TypeVar("ManifestT", bound=Message)


def key_id(key: Ed25519PublicKey) -> bytes:
    """The name of a signing key: the BLAKE3 digest of its raw 32 bytes."""
    state = hasher()
    state.update(key.public_bytes_raw())
    return bytes.fromhex(state.hexdigest())


def sign(manifest: ManifestT, key: Ed25519PrivateKey) -> SignedEnvelope:
    """Serialises and signs `manifest`."""
    # Protocol, the envelope: serialised once. What is signed is what is sent; a second encoding could have other bytes.
    data = manifest.SerializeToString(deterministic=True)
    return SignedEnvelope(
        manifest=data, key_id=key_id(key.public_key()), signature=key.sign(CONTEXTS[type(manifest)] + b"\0" + data)
    )


def verify(envelope: SignedEnvelope, kind: type[ManifestT], key: Ed25519PublicKey | None) -> ManifestT:
    """Verifies the received bytes of `envelope`, then parses its manifest, whose type decides the signing context.

    `key` must have signed it; None if no key may sign it.

    Raises:
        Refusal: `key-unknown`, `signature` or `manifest`.
    """
    # Protocol, the envelope: the caller says whose key it must be. If `key_id` could choose, everybody could sign with
    # a key of their own.
    if key is None or envelope.key_id != key_id(key):
        raise Refusal("key-unknown", f"the key {envelope.key_id.hex()[:16] or '(none)'} may not sign this")
    try:
        # Protocol, the envelope: the bytes as received, and before they are parsed: a parser may drop fields that the
        # signature covers.
        key.verify(envelope.signature, CONTEXTS[kind] + b"\0" + envelope.manifest)
    except InvalidSignature:
        raise Refusal("signature", "the signature does not fit the manifest; nothing was recorded as done") from None
    try:
        # Protocol, the envelope: parsed last, so no code acts on a message that nobody has signed.
        return kind.FromString(envelope.manifest)
    except DecodeError:
        raise Refusal("manifest", f"the signed bytes are not a {kind.__name__}") from None


def envelope_digest(envelope: SignedEnvelope) -> str:
    """The digest by which a step refers to an envelope: over key id, signature and manifest, in field order."""
    # Protocol, envelopes to the byte: fields in order, each once: with two spellings, one reply would have two names in
    # receipt and step.
    return digest(envelope.SerializeToString(deterministic=True))


def to_text(envelope: SignedEnvelope) -> str:
    """The envelope as base64."""
    return base64.b64encode(envelope.SerializeToString(deterministic=True)).decode()


def from_text(text: str) -> SignedEnvelope:
    """The envelope that `to_text` wrote. Raises ValueError or DecodeError if the text is damaged."""
    return SignedEnvelope.FromString(base64.b64decode(text, validate=True))
