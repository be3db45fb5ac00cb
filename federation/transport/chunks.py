"""Writes and reads the messages that carry a piece of a file, as bytes on the wire.

Protobuf copies a field of bytes when a message is made, written and read, and again at each access. A transfer consists
of little else. So this module writes the field with one copy, and reads it with none. The bytes on the wire are those
of protobuf, which also reads every message of another form.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from federation.transport.channels import CHUNK_BYTES, MAX_CHUNK_BYTES
from federation.v1.federation_pb2 import FetchBlobResponse, SubmitRequest

# The tags of the fields `chunk`: their numbers, and the wire type of bytes (2).
_FETCHED = bytes([FetchBlobResponse.CHUNK_FIELD_NUMBER << 3 | 2])
_SUBMITTED = bytes([SubmitRequest.CHUNK_FIELD_NUMBER << 3 | 2])
_SEVEN_BITS, _MORE = 0x7F, 0x80  # the bits of a length in a byte, and the bit that announces another byte
_LENGTH_BYTES = 4  # the longest form of a length that is read here


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a payload, and the place of its first byte."""

    data: memoryview
    offset: int


def chunk_sizes() -> Iterator[int]:
    """The sizes of the chunks of a transfer, in bytes: each is twice the one before, up to the largest.

    Large chunks cost less. The first ones are small, so that a line that soon breaks carries some.
    """
    size = CHUNK_BYTES
    while True:
        yield size
        size = min(2 * size, MAX_CHUNK_BYTES)


def fetched(data: bytes | memoryview) -> bytes:
    """A FetchBlobResponse with a piece of a blob."""
    return b"".join((_FETCHED, _length(data), data))


def read_fetched(message: bytes) -> memoryview:
    """The piece of a blob in a FetchBlobResponse. Raises DecodeError for other bytes."""
    begin, end = _field(_FETCHED, message)
    if begin and end == len(message):
        return memoryview(message)[begin:]
    return memoryview(FetchBlobResponse.FromString(message).chunk)


def submitted(data: bytes, offset: int) -> bytes:
    """A SubmitRequest with a piece of a payload."""
    return b"".join((_SUBMITTED, _length(data), data, SubmitRequest(offset=offset).SerializeToString()))


def read_submitted(message: bytes) -> SubmitRequest | Chunk:
    """A SubmitRequest, as a Chunk if it has a piece of a payload. Raises DecodeError for other bytes."""
    begin, end = _field(_SUBMITTED, message)
    if begin and (rest := SubmitRequest.FromString(message[end:])).WhichOneof("message") is None:
        return Chunk(memoryview(message)[begin:end], rest.offset)
    request = SubmitRequest.FromString(message)
    if request.WhichOneof("message") != "chunk":
        return request
    return Chunk(memoryview(request.chunk), request.offset)


def _length(data: bytes | memoryview) -> bytes:
    """The length as protobuf writes it: seven bits in a byte, the low ones first."""
    left, written = len(data), bytearray()
    while left > _SEVEN_BITS:
        written.append(left & _SEVEN_BITS | _MORE)
        left >>= 7
    written.append(left)
    return bytes(written)


def _field(tag: bytes, message: bytes) -> tuple[int, int]:
    """The begin and the end of the field with this tag, if the message begins with it; otherwise (0, 0)."""
    length = 0
    for index, byte in enumerate(message[1 : 1 + _LENGTH_BYTES] if message.startswith(tag) else b""):
        length |= (byte & _SEVEN_BITS) << 7 * index
        if byte < _MORE:
            begin = 2 + index
            return (begin, begin + length) if begin + length <= len(message) else (0, 0)
    return 0, 0
