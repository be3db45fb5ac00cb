"""Messages of an rpc: requests that are checked, responses that are sent whole, and refusals as a status."""

import asyncio
from collections.abc import AsyncIterator, Callable
from math import ceil
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.any import pack
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from federation.refusals import Refusal
from federation.transport.channels import ERROR_DOMAIN, STATUS_KEY
from federation.transport.chunks import read_submitted
from federation.v1.common_pb2 import SignedEnvelope

MAX_MESSAGE_CHARACTERS = 1000  # of a refusal
REQUEST_SECONDS = 20.0  # from the opening of a call to its request
NEXT_CHUNK_SECONDS = 60.0
SUBMIT = "/federation.v1.Federation/Submit"

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class _Malformed:
    """Marks a request that could not be parsed."""


def reader(method: str, deserialise: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """The parser of an rpc's requests; it returns a marker for an unparsable one, which is refused later."""
    deserialise = read_submitted if method == SUBMIT else deserialise

    def parse(data: bytes) -> Any:
        try:
            return deserialise(data) if deserialise is not None else data
        except DecodeError:
            return _Malformed()

    return parse


def writer(serialise: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """The serializer of an rpc's responses; it passes a response through that is serialized already."""

    def write(response: Any) -> bytes:
        return response if isinstance(response, bytes) or serialise is None else serialise(response)

    return write


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise Refusal("argument", "the request is not a message of the type that this rpc takes")
    return request


async def write_whole(context: Context, response: Any) -> None:
    """Sends a message of a stream.

    A call that is ended meanwhile ends after the message, since gRPC could not send the reason during a write. The wait
    lasts until the caller reads or disconnects.
    """
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.gather(writing, return_exceptions=True)
        raise
    except grpc.aio.InternalError:  # the connection broke a moment ago, and gRPC is about to end the call
        raise asyncio.CancelledError from None


async def next_message(requests: AsyncIterator[T], seconds: float) -> T | None:
    """The next message; None when the caller has finished its side or sends nothing for `seconds`."""
    try:
        # Not wait_for, which in Python 3.11 forgets that the call was ended when a message arrives at the same moment.
        async with asyncio.timeout(seconds):
            return await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        return None


async def only_request(requests: AsyncIterator[Any]) -> Any:
    """The request of an rpc that takes one; more would wait in memory, unread, for as long as the rpc lasts."""
    request = await next_message(requests, REQUEST_SECONDS)
    if request is None:
        raise Refusal("argument", "this rpc takes one request, and none arrived")
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            await anext(requests)
    except StopAsyncIteration:
        return _checked(request)
    except TimeoutError:
        pass
    raise Refusal("argument", "this rpc takes one request; end your side of the stream after it")


async def checked_requests(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of an rpc that takes a stream; one that cannot be parsed is refused."""
    async for request in requests:
        yield _checked(request)


async def abort(context: Context, refusal: Refusal) -> NoReturn:
    """Ends an rpc with the refusal's status and details."""
    code: grpc.StatusCode = getattr(grpc.StatusCode, refusal.status)
    message, details = refusal.message[:MAX_MESSAGE_CHARACTERS], status_details(refusal)
    try:
        await context.abort(code, message, ((STATUS_KEY, details),))
    except grpc.aio.InternalError:  # the connection broke a moment ago, and gRPC is about to end the call
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


def status_details(refusal: Refusal) -> bytes:
    """A refusal as `google.rpc.Status`: its reason (`ErrorInfo`), what was signed, when to try again (`RetryInfo`)."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=refusal.reason, domain=ERROR_DOMAIN)]
    if refusal.signed:
        details.append(SignedEnvelope.FromString(refusal.signed))
    if refusal.retry_seconds:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(ceil(refusal.retry_seconds * 1000))
        details.append(retry)
    code: grpc.StatusCode = getattr(grpc.StatusCode, refusal.status)
    status = status_pb2.Status(
        code=code.value[0], message=refusal.message[:MAX_MESSAGE_CHARACTERS], details=map(pack, details)
    )
    return bytes(status.SerializeToString())
