"""Evaluate as an EvaluateWork, and back."""

from dataclasses import asdict

from federation.spec.task_metrics import MetricKind
from federation.v1.common_pb2 import EvaluateWork, Metric
from federation.work.base import Shape
from federation.work.evaluate.work import Evaluate
from federation.work.registry import Kind


def to_proto(work: Evaluate) -> EvaluateWork:
    """The message."""
    return EvaluateWork(splits=work.splits, metrics=[Metric(**asdict(kind)) for kind in work.metrics])


def from_proto(message: EvaluateWork, shape: Shape) -> Evaluate:
    """The work of a message."""
    found = tuple(MetricKind(one.name, one.better, one.largest) for one in message.metrics)
    return Evaluate(splits=tuple(message.splits), metrics=found)


KIND = Kind(Evaluate, EvaluateWork, to_proto, from_proto)
