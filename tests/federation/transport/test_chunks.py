"""Messages with pieces of files are those of protobuf, in both directions."""

from itertools import islice

import pytest
from google.protobuf.message import DecodeError

from federation.transport.chunks import Chunk, chunk_sizes, fetched, read_fetched, read_submitted, submitted
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.federation_pb2 import FetchBlobResponse, SubmitRequest


@pytest.mark.parametrize("length", [1, 127, 128, 16_383, 16_384, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 1 << 40])
def test_a_piece_is_written_as_protobuf_writes_it_and_read_without_a_copy(length: int, offset: int) -> None:
    data = bytes(length - 1) + b"x"
    message = submitted(data, offset)
    assert message == SubmitRequest(chunk=data, offset=offset).SerializeToString()
    piece = read_submitted(message)
    assert isinstance(piece, Chunk)
    assert (bytes(piece.data), piece.offset, piece.data.obj) == (data, offset, message)
    message = fetched(data)
    assert message == FetchBlobResponse(chunk=data).SerializeToString()
    assert read_fetched(message) == data
    assert read_fetched(message).obj is message


def test_the_chunks_of_a_transfer_double_from_256_kib_up_to_1_mib() -> None:
    assert list(islice(chunk_sizes(), 5)) == [1 << 18, 1 << 19, 1 << 20, 1 << 20, 1 << 20]


CHUNK, OFFSET = SubmitRequest(chunk=b"one").SerializeToString(), SubmitRequest(offset=7).SerializeToString()
UPDATE = SubmitRequest(reply=SignedEnvelope(manifest=b"two")).SerializeToString()


@pytest.mark.parametrize(
    ("message", "data", "offset"),
    [
        (OFFSET + CHUNK, b"one", 7),
        (CHUNK + OFFSET + SubmitRequest(offset=8).SerializeToString(), b"one", 8),
        (submitted(b"zero", 5) + CHUNK, b"one", 5),
        (UPDATE + CHUNK, b"one", 0),
        (CHUNK[:1] + b"\x83\x80\x00" + CHUNK[2:], b"one", 0),
        (CHUNK[:1] + b"\x83\x80\x80\x80\x00" + CHUNK[2:], b"one", 0),
        (SubmitRequest(chunk=b"").SerializeToString(), b"", 0),
    ],
)
def test_a_piece_that_is_spelled_otherwise_is_read_as_protobuf_reads_it(
    message: bytes, data: bytes, offset: int
) -> None:
    piece = read_submitted(message)
    assert isinstance(piece, Chunk)
    assert (bytes(piece.data), piece.offset) == (data, offset)


def test_other_requests_are_messages() -> None:
    for message in (UPDATE, CHUNK + UPDATE, OFFSET, b""):
        assert read_submitted(message) == SubmitRequest.FromString(message)
    assert bytes(read_fetched(b"")) == b""
    assert bytes(read_fetched(fetched(b"one") + fetched(b"two"))) == b"two"


@pytest.mark.parametrize("message", [CHUNK[:-1], CHUNK[:1], CHUNK[:1] + b"\xff" * 10, CHUNK + b"\x18", b"\xff"])
def test_bytes_that_are_no_message_are_refused(message: bytes) -> None:
    with pytest.raises(DecodeError):
        read_submitted(message)
    with pytest.raises(DecodeError):
        read_fetched(message)
