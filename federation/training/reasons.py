"""The stable reasons of failed work, for which a client declines; docs/reference/reasons.md explains them."""

from federation.tasks import DataError
from federation.training import TrainingDiverged
from federation.work.base import WorkError

NOT_ASKED = "the trainer raised TrainingStopped, and nobody asked it to stop"


def reason_of(error: BaseException) -> str:
    """The reason for which work that raised an exception is declined; empty for an exception that is not expected."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # of PyTorch, for any device
        return "memory"
    match error:
        case TrainingDiverged():
            return "training-diverged"
        case DataError():
            return "no-data"
        case WorkError():
            return error.reason or "failed"
    return ""
