"""Messages of an rpc, as access control passes them on: requests that are checked, responses that are sent whole."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from federation.refusals import Refusal

REQUEST_SECONDS = 20.0  # from the opening of a call to its request

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class _Malformed:
    """Marks a request that could not be parsed."""


def forgiving(deserialise: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Returns a marker for an unparsable request, which is refused later like any other bad request."""

    def parse(data: bytes) -> Any:
        try:
            return deserialise(data) if deserialise is not None else data
        except DecodeError:
            return _Malformed()

    return parse


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise Refusal("argument", "the request is not a message of the type that this rpc takes")
    return request


async def write_whole(context: Context, response: Any) -> None:
    """Sends a message of a stream.

    A call that is ended meanwhile ends after the message: gRPC does one thing at a time, and could not send the reason.
    It may last until the caller reads or is gone; nothing more is sent.
    """
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.gather(writing, return_exceptions=True)
        raise


async def only_request(requests: AsyncIterator[Any]) -> Any:
    """The request of an rpc that takes one."""
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            return _checked(await anext(requests))
    except (StopAsyncIteration, TimeoutError):
        raise Refusal("argument", "this rpc takes one request, and none arrived") from None


async def checked_requests(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The requests of an rpc that takes a stream; one that cannot be parsed is refused."""
    async for request in requests:
        yield _checked(request)
