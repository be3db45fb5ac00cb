"""Safe text on the administrator's screen: every string that a coordinator sends is escaped on arrival.

Responses hold text of members and of other operators: names of devices and metrics, reasons, specifications.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.text import escaped, escaped_lines
from federation.v1.admin_pb2_grpc import AdminStub

LIMIT = 10_000  # characters of one string; the coordinator cuts what members and operators say to far fewer
_END_OF_TIME = 253_370_764_800  # the year 9999, in seconds from 1970: every time zone can still show it
_DOCUMENTS = frozenset({"federation.v1.Run.spec"})  # text of several lines, which it keeps


def escaping_stub(call: Callable[..., Any]) -> AdminStub:
    """The Admin service over a session; the strings in its responses hold no control characters.

    `call` is `fedpareto.cli.admin.admin_session.AdminSession.call`.
    """
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    calls = SimpleNamespace(**{kind: partial(_escaping_call, partial(call, kind)) for kind in kinds})
    return AdminStub(cast(grpc.Channel, calls))


def _escaping_call(make: Any, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
    def read(data: bytes) -> Any:
        message = response_deserializer(data)
        make_safe(message)
        return message

    return make(method, request_serializer=request_serializer, response_deserializer=read)


def make_safe(message: Message) -> None:
    """Escapes every string in a message, keys of maps included, and leaves out invalid times.

    Bytes stay, because they are signed.
    """
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            shown = escaped_lines if field.full_name in _DOCUMENTS else escaped
            if field.is_repeated:
                value[:] = [shown(text, LIMIT) for text in value]
            else:
                setattr(message, field.name, shown(value, LIMIT))
        elif field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                _escape_map(field, value)
            elif isinstance(value, Timestamp):
                if not (0 <= value.seconds < _END_OF_TIME and 0 <= value.nanos < 1_000_000_000):
                    message.ClearField(field.name)
            else:
                for inner in value if field.is_repeated else (value,):
                    make_safe(inner)


def _escape_map(field: FieldDescriptor, values: Any) -> None:
    """Escapes keys; no map of the contract has strings as its values, which a test checks."""
    for key in list(values):
        if isinstance(key, str) and escaped(key, LIMIT) != key:
            values[escaped(key, LIMIT)] = values.pop(key)
