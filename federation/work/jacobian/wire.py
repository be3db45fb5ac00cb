"""Jacobian as a JacobianWork, and back."""

from dataclasses import asdict, fields

from federation.v1.common_pb2 import JacobianWork
from federation.work.base import Shape
from federation.work.jacobian.work import Jacobian
from federation.work.registry import Kind


def to_proto(work: Jacobian) -> JacobianWork:
    """The message, which has fields of the same names."""
    return JacobianWork(**asdict(work))


def from_proto(message: JacobianWork, shape: Shape) -> Jacobian:
    """The work of a message."""
    values = {item.name: getattr(message, item.name) for item in fields(Jacobian)}
    return Jacobian(**{**values, "objectives": tuple(message.objectives)})


KIND = Kind(Jacobian, JacobianWork, to_proto, from_proto)
