"""Evaluate as an EvaluateWork, and back."""

from federation.v1.common_pb2 import EvaluateWork
from federation.work.base import Shape
from federation.work.evaluate.work import Evaluate
from federation.work.registry import Kind


def encode(work: Evaluate) -> bytes:
    """The serialized message."""
    return EvaluateWork(splits=work.splits).SerializeToString(deterministic=True)


def decode(data: bytes, shape: Shape) -> Evaluate:
    """The work of a serialized message.

    Raises:
        DecodeError: it is no EvaluateWork.
    """
    return Evaluate(splits=tuple(EvaluateWork.FromString(data).splits))


KIND = Kind(Evaluate, encode, decode)
