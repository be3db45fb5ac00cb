"""Text of others on the administrator's screen: every string that a coordinator sends is escaped where it arrives.

What the coordinator sends holds words of members and of other operators: names of devices and metrics, reasons,
specifications. So no command has to think of it: the channel hands out messages whose strings are safe to show.
"""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from federation.text import escaped, escaped_lines

LIMIT = 10_000  # characters of one string; the coordinator cuts what members and operators say to far fewer
_END_OF_TIME = 253_370_764_800  # the year 9999, in seconds from 1970: every time zone can still show it
_DOCUMENTS = frozenset({"federation.v1.Run.spec"})  # text of several lines, which it keeps


class EscapingChannel(grpc.Channel):
    """A channel whose responses have no character that a terminal obeys.

    Args:
        channel: carries the calls; it is closed with this one.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        """See `grpc.Channel`."""
        call = self._channel.unary_unary
        return call(method, request_serializer, _escaping(response_deserializer))

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        """See `grpc.Channel`."""
        call = self._channel.unary_stream
        return call(method, request_serializer, _escaping(response_deserializer))

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        """See `grpc.Channel`."""
        call = self._channel.stream_unary
        return call(method, request_serializer, _escaping(response_deserializer))

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        """See `grpc.Channel`."""
        call = self._channel.stream_stream
        return call(method, request_serializer, _escaping(response_deserializer))

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """See `grpc.Channel`."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See `grpc.Channel`."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """See `grpc.Channel`."""
        self._channel.close()

    def __enter__(self) -> "EscapingChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_safe(message: Message) -> None:
    """Escapes every string in a message, keys of maps included, and leaves out invalid times.

    Bytes stay, for they are what was signed.
    """
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            shown = escaped_lines if field.full_name in _DOCUMENTS else escaped
            if field.is_repeated:
                value[:] = [shown(one, LIMIT) for one in value]
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
    """Escapes keys; of the maps in the contract none has values with strings, which a test holds against it."""
    for key in list(values):
        if isinstance(key, str) and escaped(key, LIMIT) != key:
            values[escaped(key, LIMIT)] = values.pop(key)


def _escaping(deserialise: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        message = deserialise(data)
        make_safe(message)
        return message

    return read
