"""Residual as a ResidualWork, and back."""

from federation.v1.common_pb2 import ResidualWork
from federation.work.base import Shape
from federation.work.jacobian.wire import from_proto, to_proto
from federation.work.registry import Kind
from federation.work.residual.work import Residual


def encode(work: Residual) -> bytes:
    """The serialized message."""
    message = ResidualWork(jacobian=to_proto(work.jacobian), objectives=work.objectives)
    return message.SerializeToString(deterministic=True)


def decode(data: bytes, shape: Shape) -> Residual:
    """The work of a serialized message.

    Raises:
        DecodeError: it is no ResidualWork.
    """
    message = ResidualWork.FromString(data)
    return Residual(jacobian=from_proto(message.jacobian), objectives=tuple(message.objectives))


KIND = Kind(Residual, encode, decode)
