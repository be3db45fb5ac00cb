"""Answers that say no: a gRPC status with the reason and what belongs to it in its details."""

from math import ceil
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from federation.channels import ERROR_DOMAIN, STATUS_KEY
from federation.refusals import Refusal

MAX_MESSAGE_CHARACTERS = 1000


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", refusal: Refusal) -> NoReturn:
    """Ends an rpc with the refusal's status and details."""
    await context.abort(
        getattr(grpc.StatusCode, refusal.status),
        refusal.message[:MAX_MESSAGE_CHARACTERS],
        ((STATUS_KEY, status_details(refusal)),),
    )
    raise AssertionError("abort returned")


def status_details(refusal: Refusal) -> bytes:
    """A refusal as `google.rpc.Status`: its reason (`ErrorInfo`), what was signed, when to try again (`RetryInfo`)."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=refusal.reason, domain=ERROR_DOMAIN)]
    if refusal.signed is not None:
        details.append(refusal.signed)
    if refusal.retry_seconds:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(ceil(refusal.retry_seconds * 1000))
        details.append(retry)
    code: grpc.StatusCode = getattr(grpc.StatusCode, refusal.status)
    status = status_pb2.Status(
        code=code.value[0], message=refusal.message[:MAX_MESSAGE_CHARACTERS], details=map(_packed, details)
    )
    return bytes(status.SerializeToString())


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
