"""A member's signed decline of an assignment: its checks, and its reason and message for the record."""

import re

from google.protobuf.message import DecodeError

from federation.record import bound_fields
from federation.record.bound_fields import difference
from federation.refusals import Refusal
from federation.text import escaped
from federation.trust.envelope import envelope_digest, verify
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import AssignmentManifest, ConsentManifest, DeclineManifest, SignedEnvelope

MAX_BYTES = 8 << 10  # of the envelope
MAX_MESSAGE = 400  # characters, as in the columns of the record
_REASON = re.compile(r"[a-z0-9][a-z0-9_:.-]{0,79}")


def claimed_assignment(envelope: SignedEnvelope) -> str:
    """The assignment that a decline names, before its signature has been verified.

    Raises:
        Refusal: `limit:manifest`, `manifest`.
    """
    if envelope.ByteSize() > MAX_BYTES:
        raise Refusal("limit:manifest", f"a decline of {envelope.ByteSize()} bytes; at most {MAX_BYTES}")
    try:
        return DeclineManifest.FromString(envelope.manifest).assignment_id
    except DecodeError:
        raise Refusal("manifest", "the manifest is not a DeclineManifest") from None


def verified_decline(envelope: SignedEnvelope, assignment: SignedEnvelope, keys: KeyChain) -> DeclineManifest:
    """The decline of an assignment, which one of the `keys` of its client must have signed.

    Raises:
        Refusal: `key-unknown`, `signature`, `manifest`, or `mismatch` with the field.
    """
    decline = verify(envelope, DeclineManifest, keys.signer(envelope))
    name = difference(AssignmentManifest.FromString(assignment.manifest), decline, bound_fields.DECLINE)
    if not name and decline.assignment not in (
        "",
        envelope_digest(assignment),
    ):  # empty if the worker could not verify it
        name = "assignment"
    if name:
        raise Refusal(f"mismatch:{name}", f"the decline is for another {name} than the assignment")
    return decline


def reason_and_message(manifest: DeclineManifest | ConsentManifest) -> tuple[str, str]:
    """The reason and the message for the record; the text of a `malformed` reason goes into the message."""
    if _REASON.fullmatch(manifest.reason):
        return manifest.reason, escaped(manifest.message, MAX_MESSAGE)
    return "malformed", escaped(f"{manifest.reason[:80]}: {manifest.message}", MAX_MESSAGE)
