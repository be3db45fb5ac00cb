"""The calls that move files, without protobuf's copies of each piece."""

from collections.abc import Sequence

import grpc

from federation.transport.channels import Option
from federation.transport.chunks import read_fetched
from federation.v1.federation_pb2 import FetchBlobRequest, LocateBlobRequest, LocateBlobResponse, SubmitResponse

# gRPC then reads the pieces of a blob in the calling thread, which saves two thread switches for each piece.
CHANNEL_OPTIONS: Sequence[Option] = (("SingleThreadedUnaryStream", 1),)


class FileCalls:
    """The calls of a member that move files, on its channel.

    Attributes:
        fetch: FetchBlob, which gives the pieces of a blob.
        locate: LocateBlob, which gives the URL of a blob in the coordinator's bucket.
        submit: Submit, which takes requests as bytes on the wire.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.fetch: grpc.UnaryStreamMultiCallable[FetchBlobRequest, memoryview] = channel.unary_stream(
            "/federation.v1.Federation/FetchBlob", FetchBlobRequest.SerializeToString, read_fetched
        )
        self.locate: grpc.UnaryUnaryMultiCallable[LocateBlobRequest, LocateBlobResponse] = channel.unary_unary(
            "/federation.v1.Federation/LocateBlob", LocateBlobRequest.SerializeToString, LocateBlobResponse.FromString
        )
        self.submit: grpc.StreamStreamMultiCallable[bytes, SubmitResponse] = channel.stream_stream(
            "/federation.v1.Federation/Submit", None, SubmitResponse.FromString
        )
