"""The values in which two bundles differ, named as `every_value` names them."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.v1.common_pb2 import SignedEnvelope
from tests.verification import every_value
from tests.verification.every_value import Edit, context_of, is_map, opened


def differences(before: Any, after: Any, entry: str, context: str = "") -> Iterator[Edit]:
    """The values in which two messages of one type differ, as edits of `every_value`."""
    kind = before.DESCRIPTOR.name
    context = context_of(before, context)
    if after.DESCRIPTOR.name != kind or has_unknown_field(after):
        yield Edit(f"{kind}.{every_value.UNKNOWN}", "made", entry, (), every_value.UNKNOWN)
    for one in before.DESCRIPTOR.fields:
        was, now = getattr(before, one.name), getattr(after, one.name)
        name = f"{context}{kind}.{one.name}"
        if is_map(one):
            keys = {key for key in {*was, *now} if repr(was.get(key)) != repr(now.get(key))}
            yield from (Edit(name, f"another {key}", entry, (), one.name) for key in keys)
        elif one.is_repeated:
            yield from _of_lists(list(was), list(now), name, one, entry, context, before)
        elif one.message_type is None:
            if repr(was) != repr(now) and (kind, one.name) != ("SignedEnvelope", "manifest"):
                yield Edit(name, "another", entry, (), one.name)
        elif before.HasField(one.name) != after.HasField(one.name):
            if not was.ListFields() and not now.ListFields() and not isinstance(was, SignedEnvelope):
                continue  # absent, and empty: no difference
            yield Edit(name, "made" if after.HasField(one.name) else "cleared", entry, (), one.name)
        elif before.HasField(one.name):
            yield from _of_messages(was, now, one, name, entry, context, before)


def _of_messages(
    was: Any, now: Any, kind: FieldDescriptor, name: str, entry: str, context: str, owner: Message
) -> Iterator[Edit]:
    if isinstance(was, Timestamp):
        if was != now:
            yield Edit(name, "another", entry, (), kind.name)
        return
    yield from differences(was, now, entry, context)
    if isinstance(was, SignedEnvelope) and was.manifest != now.manifest:
        try:
            after = opened(now, owner, kind.name)
        except DecodeError:
            yield Edit("SignedEnvelope.manifest", "another", entry, (), "manifest")
            return
        yield from differences(opened(was, owner, kind.name), after, entry, context)


def _of_lists(
    was: list[Any], now: list[Any], name: str, kind: FieldDescriptor, entry: str, context: str, owner: Message
) -> Iterator[Edit]:
    rest_was, rest_now = list(was), []
    for value in now:
        if value in rest_was:
            rest_was.remove(value)
        else:
            rest_now.append(value)
    if not rest_was and not rest_now and was != now:
        yield Edit(name, "two exchanged", entry, (), kind.name)
    if len(was) != len(now):
        yield Edit(name, "one added" if len(now) > len(was) else "one removed", entry, (), kind.name)
    for before, after in zip(rest_was, rest_now, strict=False):
        if kind.message_type is None:
            yield Edit(name, "another inside", entry, (), kind.name)
        else:
            yield from _of_messages(before, after, kind, name, entry, context, owner)


def has_unknown_field(message: Message) -> bool:
    """True if a message itself, not those inside it, has a field that the format does not know."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.ByteSize() != message.ByteSize()
