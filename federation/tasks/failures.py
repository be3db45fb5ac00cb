"""Errors in the code of a task, in three lines: what was raised, in which file and line, and the line itself."""

import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from federation.tasks import DataError, PartError, TaskError

_MESSAGE_CHARACTERS = 500
_INSTALLED = {"site-packages", "dist-packages"}


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


def described(error: Exception) -> str:
    """An exception of a task's code, as three lines.

    The line shown is the last one outside of the standard library, installed packages and this package. Where there
    is none, the exception is all.
    """
    said = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        path, line, function = error.filename, error.lineno or 0, ""
    elif frame := owners_frame(error):
        path, line, function = frame.filename, frame.lineno or 0, f", in {frame.name}"
    else:
        return what
    code = linecache.getline(path, line).strip()
    return f"{what}\n  {path}, line {line}{function}\n    {code}"


def owners_frame(error: Exception) -> traceback.FrameSummary | None:
    """Where an exception passed through the owner's code last; None where it did not."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_owners(frame.filename)), None)


def _is_owners(filename: str) -> bool:
    path = Path(filename)
    if not path.is_file() or not _INSTALLED.isdisjoint(path.parts):
        return False
    return not any(place in path.parents for place in (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]))
