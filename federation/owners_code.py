"""Errors in an owner's own code, in three lines: the exception, its file and line, and the text of that line."""

import linecache
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MESSAGE_CHARACTERS = 500
_INSTALLED = {"site-packages", "dist-packages"}
_ROOT = Path(__file__).resolve().parents[1]  # the directory that holds this project's packages
_PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "simulation", "experiments", "fedpareto")


def described(error: BaseException) -> str:
    """An exception of an owner's code, as three lines.

    The line shown is the last one outside of the standard library, installed packages and this project's packages. If
    there is none, only the exception is shown.
    """
    text = headline(error)
    if isinstance(error, SyntaxError) and error.filename:
        path, line, function = error.filename, error.lineno or 0, ""
    elif frame := owners_frame(error):
        path, line, function = frame.filename, frame.lineno or 0, f", in {frame.name}"
    else:
        return text
    code = linecache.getline(path, line).strip()
    return f"{text}\n  {path}, line {line}{function}\n    {code}"


def headline(error: BaseException) -> str:
    """An exception as one line: its name and its message."""
    message = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def passes(error: BaseException) -> bool:
    """True for an exception that is no failure of the code that it passes through.

    That is Ctrl-C, which Python raises in the main thread alone, and the end of a generator. All else is a failure of
    an owner's code, also what does not inherit from Exception: sys.exit() raises SystemExit, and other languages raise
    such errors (PanicException of Rust).
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, GeneratorExit)


@contextmanager
def must_not_exit(kind: type[Exception]) -> Iterator[None]:
    """Turns an exception that would end the process or the thread, and nothing else, into one of this class."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if passes(error):
            raise
        raise kind(f"code of your own tried to end the process: {described(error)}") from error


def owners_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The last frame of the owner's code that an exception passed through; None if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if _is_owners(frame.filename)), None)


def is_owners_class(kind: type) -> bool:
    """True if a class is not of this project's packages."""
    return kind.__module__.partition(".")[0] not in _PACKAGES


def _is_owners(filename: str) -> bool:
    path = Path(filename)
    if not path.is_file() or not _INSTALLED.isdisjoint(path.parts):
        return False
    others = (Path(sysconfig.get_path("stdlib")), *(_ROOT / package for package in _PACKAGES))
    return not any(directory in path.parents for directory in others)
