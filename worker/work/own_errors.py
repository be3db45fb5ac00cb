"""What is declined and logged where work raises an exception: of the owner's code, of the machine, of a check."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from federation.owners_code import TwoTexts, described, owners_frame, passes
from federation.training import TrainingStopped
from federation.training.reasons import reason_of, texts_of
from federation.work.base import WorkError
from worker.home import DiskFull, FileLocked
from worker.site.assignment_checks import CheckedAssignment, Declined

LOGGER = logging.getLogger("fedpareto.worker")
SILENT = "this worker's log has the error"


@contextmanager
def declining(order: CheckedAssignment) -> Iterator[None]:
    """Declines an assignment whose work raises an exception, and logs one that is not expected.

    An OSError is of the owner's own code, and not expected, unless it is a DiskFull or a FileLocked.
    """
    try:
        yield
    except (TrainingStopped, Declined, DiskFull, FileLocked):
        raise
    except BaseException as error:
        if passes(error):
            raise
        raise declined(order, error) from error


def declined(order: CheckedAssignment, error: BaseException) -> Declined:
    """The decline of work that raised an exception. Of work that conceals, only a text of the checks leaves."""
    reason, texts = reason_of(error), texts_of(error)
    # Section 2d: a text of the owner's code, or of an exception, can depend on the data. Only texts of the checks
    # leave.
    if order.work.conceals and (texts.differ or not isinstance(error, WorkError)):
        log_error(order, error)
        texts = TwoTexts.same(SILENT)
    elif not reason:  # work that is inconsistent, or a mistake in the owner's own task
        log_error(order, error)
    return Declined(reason or "failed", texts)


def log_error(order: CheckedAssignment, error: BaseException) -> None:
    """Logs an exception: with its traceback, unless it is one of the owner's own code."""
    about = f"assignment {order.manifest.assignment_id}"
    if owners_frame(error):
        log_owners(about, error)
    else:
        LOGGER.error("%s", about, exc_info=error)


def log_owners(about: str, error: BaseException) -> None:
    """Logs an exception of the owner's own code, with its line."""
    for line in described(error).splitlines():
        LOGGER.error("%s: %s", about, line)
