"""The errors of tasks and of data."""

from collections.abc import Iterator
from contextlib import contextmanager

from federation.errors import Error
from federation.owners_code import described, passes
from federation.spec.part import PartError


class TaskError(Error, ValueError):
    """A task that cannot be used: not found, not a task, or with a model that a flat vector cannot carry."""


class TaskAbsent(TaskError):
    """A task that is not on this machine: there is no such name or module, or a module that it imports is missing."""


class DataError(Error):
    """Data that is missing or malformed; the message names the expected path and where to get it.

    `wire` is the text for others than the owner; without it, they are told the class and the line.
    """

    def __init__(self, message: str = "", *, wire: str = "") -> None:
        super().__init__(message)
        self.wire = wire


class LossError(DataError):
    """The model has no finite loss on some samples: values are missing or infinite, for example."""


@contextmanager
def task_code(name: str, doing: str) -> Iterator[None]:
    """Turns an error of a task's code into a TaskError that says where it was raised.

    `doing` is what the task is asked for, such as "loading its data". A missing torch is passed on as it is.
    """
    try:
        yield
    except (TaskError, DataError, PartError, MemoryError):
        raise
    except BaseException as error:
        if passes(error) or (isinstance(error, ModuleNotFoundError) and error.name == "torch"):
            raise
        raise TaskError(f"task {name!r}: {doing} failed: {described(error)}") from error
