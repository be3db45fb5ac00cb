"""The work in an assignment, as tests read and write it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from federation.digests import digest
from federation.v1 import common_pb2 as common

MESSAGES: dict[str, type[Any]] = {
    "train": common.TrainWork,
    "evaluate": common.EvaluateWork,
    "statistics": common.StatisticsWork,
    "jacobian": common.JacobianWork,
    "residual": common.ResidualWork,
    "search": common.SearchWork,
}


def work_of(order: common.AssignmentManifest) -> Any:
    """The message of the work that is asked for."""
    return MESSAGES[order.kind].FromString(order.work)


def set_work(order: common.AssignmentManifest, message: Any) -> None:
    """Asks for this work."""
    order.kind = next(kind for kind, type_ in MESSAGES.items() if isinstance(message, type_))
    order.work = message.SerializeToString(deterministic=True)


@contextmanager
def changed_work(order: common.AssignmentManifest) -> Iterator[Any]:
    """The message of the work; what is changed inside is asked for afterwards."""
    message = work_of(order)
    yield message
    set_work(order, message)


def ask_bf16(order: common.AssignmentManifest) -> common.AssignmentManifest:
    """Asks for an update that is rounded to bfloat16; returns the assignment."""
    for row in order.rows:
        row.dtype = "BF16"
    set_train(order, dtype="BF16")
    return order


def offer_input(order: common.AssignmentManifest, name: str, content: bytes) -> None:
    """Names an input of the work, and its digest and size."""
    order.inputs.append(common.Input(name=name, digest=digest(content), size=len(content)))


def set_train(order: common.AssignmentManifest, **fields: Any) -> None:
    """Changes fields of work to train."""
    with changed_work(order) as work:
        for name, value in fields.items():
            if name == "targets":
                work.targets.extend(value)
            else:
                setattr(work, name, value)
