"""Errors in the code of a task."""

from collections.abc import Iterator
from contextlib import contextmanager

from federation.owners_code import described
from federation.tasks import DataError, PartError, TaskError


@contextmanager
def task_code(name: str, doing: str) -> Iterator[None]:
    """Turns an error of a task's code into a TaskError that says where it was raised.

    Args:
        name: of the task, as its owner named it.
        doing: what the task is asked for, such as "loading its data".

    Raises:
        TaskError: the code raised an exception; torch that is not installed is passed on as it is.
    """
    try:
        yield
    except (TaskError, DataError, PartError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise
        raise TaskError(f"task {name!r}: {doing} failed: {described(error)}") from error
