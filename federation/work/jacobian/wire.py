"""Jacobian as a JacobianWork, and back."""

from federation.v1.common_pb2 import JacobianWork
from federation.work.base import Shape
from federation.work.jacobian.work import Jacobian
from federation.work.registry import Kind


def to_proto(work: Jacobian) -> JacobianWork:
    """The message."""
    return JacobianWork(
        batch_size=work.batch_size,
        objectives=work.objectives,
        sketch=work.sketch,
        budget=work.budget,
        encoder_only=work.encoder_only,
        measure=work.measure,
    )


def from_proto(message: JacobianWork) -> Jacobian:
    """The work of a message."""
    return Jacobian(
        sketch=message.sketch,
        budget=message.budget,
        batch_size=message.batch_size,
        objectives=tuple(message.objectives),
        encoder_only=message.encoder_only,
        measure=message.measure,
    )


def encode(work: Jacobian) -> bytes:
    """The serialized message."""
    return to_proto(work).SerializeToString(deterministic=True)


def decode(data: bytes, shape: Shape) -> Jacobian:
    """The work of a serialized message.

    Raises:
        DecodeError: it is no JacobianWork.
    """
    return from_proto(JacobianWork.FromString(data))


KIND = Kind(Jacobian, encode, decode)
