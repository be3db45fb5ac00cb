"""Evaluate as an EvaluateWork, and back."""

from federation.v1.common_pb2 import EvaluateWork
from federation.work.base import Shape
from federation.work.evaluate.work import Evaluate
from federation.work.registry import Kind


def to_proto(work: Evaluate) -> EvaluateWork:
    """The message."""
    return EvaluateWork(splits=work.splits)


def from_proto(message: EvaluateWork, shape: Shape) -> Evaluate:
    """The work of a message."""
    return Evaluate(splits=tuple(message.splits))


KIND = Kind(Evaluate, EvaluateWork, to_proto, from_proto)
