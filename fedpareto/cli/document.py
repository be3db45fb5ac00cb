"""Protobuf messages as JSON documents.

Names are those of the contract, enumerations appear by their short name, times as ISO 8601 in UTC, NaN and infinities
(which JSON lacks) as null, bytes as base64, key ids as hexadecimal. Every message has a document.
"""

import base64
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.v1.common_pb2 import DecisionManifest, ReplyManifest, RequestManifest, StepManifest
from fedpareto.admin_messages import enum_name

# The manifest in each envelope, so that the document shows it beside the signed bytes.
MANIFESTS: dict[str, type[Message]] = {
    "federation.v1.GetRoundResponse.step": StepManifest,
    "federation.v1.Reply.envelope": ReplyManifest,
    "federation.v1.ActionRequest.request": RequestManifest,
    "federation.v1.ActionRequest.decision": DecisionManifest,
}


def document(message: Message) -> dict[str, Any]:
    """`message` as plain values that `json.dumps` takes; every field is there, absent messages as None."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def dumps(value: Any) -> str:
    """An indented JSON document; letters of all scripts stay, characters that are not printable are escaped."""
    return line(value, indent=2)


def line(value: Any, indent: int | None = None) -> str:
    """A JSON document on one line, for a stream of them."""
    text = json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _value(inner, value[key]) for key in sorted(value)}
    if field.is_repeated:
        return [_value(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        try:
            return value.ToDatetime().isoformat() + "Z"
        except (ValueError, OverflowError):  # another party may have signed it
            return f"not a time: {value.seconds} s and {value.nanos} ns"
    if isinstance(value, Message):
        result = document(value)
        if field.full_name in MANIFESTS:
            result["decoded"] = _decoded(MANIFESTS[field.full_name], value.manifest)  # type: ignore[attr-defined]
        return result
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if isinstance(value, bytes):
        return value.hex() if field.name == "key_id" else base64.b64encode(value).decode()
    return _plain(value)


def _decoded(kind: type[Message], manifest: bytes) -> dict[str, Any] | None:
    """A manifest from its signed bytes; None if they cannot be read."""
    try:
        return document(kind.FromString(manifest))
    except DecodeError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Message):
        return document(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
