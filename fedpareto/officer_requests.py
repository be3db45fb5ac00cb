"""Requests for actions that take two security officers, as commands and pages show them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.trust.identity import Action
from federation.v1.admin_pb2 import ActionRequest
from federation.v1.common_pb2 import RequestManifest, SignedEnvelope
from fedpareto.escaping import make_safe
from fedpareto.formatting import UNKNOWN, local, short

M = TypeVar("M", bound=Message)
_PHRASES: Mapping[str, str] = {Action.FORGET: "remove the updates of", Action.REVOKE_ADMIN: "revoke the administrator"}


@dataclass(frozen=True)
class OfficerRequest:
    """What an officer has signed: who asks for what. The texts are safe to show.

    Attributes:
        request_id: the digest of the signed request.
        action: such as "approve".
        subject: the member or the administrator that the action is about.
        reason: in the officer's words; may be empty.
        officer: who asks.
        expires: when the request ends; None if the officer signed no time.
        key_id: of an approval, the id of the member's signing key, hexadecimal; otherwise empty.
    """

    request_id: str
    action: str
    subject: str
    reason: str
    officer: str
    expires: Timestamp | None
    key_id: str = ""

    @classmethod
    def of(cls, item: ActionRequest) -> "OfficerRequest":
        """The request in a message; its texts are empty if what was signed cannot be read."""
        signed = signed_manifest(item.request, RequestManifest())
        expires = signed.expires if signed.HasField("expires") else None
        return cls(
            item.request_id, signed.action, signed.subject, signed.reason, signed.officer, expires, signed.key_id
        )

    @property
    def until(self) -> str:
        """When it ends, in the local zone; a dash if that is not known."""
        return UNKNOWN if self.expires is None else local(self.expires)

    @property
    def name(self) -> str:
        """The first digits of its id, by which commands name it."""
        return short(self.request_id)

    @property
    def wanted(self) -> str:
        """What is asked for: "revoke hospital-d (left the study)"."""
        return f"{self.action} {self.subject}" + (f" ({self.reason})" if self.reason else "")

    @property
    def phrase(self) -> str:
        """What is asked for, after "asks to": "revoke the administrator bob (left)"."""
        what = _PHRASES.get(self.action, self.action)
        return f"{what} {self.subject}" + (f" ({self.reason})" if self.reason else "")

    def __str__(self) -> str:
        return f"{self.wanted}, asked by {self.officer}"


def signed_manifest(envelope: SignedEnvelope, manifest: M) -> M:
    """The manifest that was signed, with its strings made safe to show; empty if it cannot be read."""
    with suppress(DecodeError):
        manifest.ParseFromString(envelope.manifest)
    make_safe(manifest)
    return manifest
