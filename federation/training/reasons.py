"""The stable reasons of failed work, for which a client declines, and the texts with them.

docs/reference/reasons.md explains the reasons.
"""

import re

from federation.owners_code import TwoTexts, headline, is_of_this_project, place, raised_here
from federation.tasks import DataError
from federation.training import TrainingDiverged
from federation.work.base import WorkError

_OWN_REASON = re.compile(r"[a-z][a-z0-9:-]{0,60}")
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
            known = raised_here(error) or _OWN_REASON.fullmatch(error.reason)
            return (error.reason if known else "") or "failed"
    return ""


def texts_of(error: BaseException) -> TwoTexts:
    """What is said of work that raised an exception.

    Others are told the text of this project's own exceptions. Of all others, also of this project's classes raised by
    own code, they are told the class, the module and the line.
    """
    reason = reason_of(error)
    local = str(error) if reason else headline(error)
    if reason == "memory":  # PyTorch's message goes on for a page
        local = local.partition("\n")[0] or "out of memory"
    if isinstance(error, WorkError | DataError) and error.wire and raised_here(error):
        return TwoTexts.of(local, error.wire)
    if isinstance(error, WorkError | TrainingDiverged) and is_of_this_project(error):
        return TwoTexts.same(local)
    return TwoTexts.of(local, place(error))
