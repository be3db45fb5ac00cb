"""Residual as a ResidualWork, and back."""

from federation.v1.common_pb2 import ResidualWork
from federation.work.base import Shape
from federation.work.jacobian import wire
from federation.work.registry import Kind
from federation.work.residual.work import Residual


def to_proto(work: Residual) -> ResidualWork:
    """The message."""
    return ResidualWork(jacobian=wire.to_proto(work.jacobian), objectives=work.objectives)


def from_proto(message: ResidualWork, shape: Shape) -> Residual:
    """The work of a message."""
    return Residual(jacobian=wire.from_proto(message.jacobian, shape), objectives=tuple(message.objectives))


KIND = Kind(Residual, ResidualWork, to_proto, from_proto)
