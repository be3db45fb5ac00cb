"""Errors in an owner's own code, in three lines: the exception, its file and line, and the text of that line."""

import linecache
import sysconfig
import traceback
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
    message = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        path, line, function = error.filename, error.lineno or 0, ""
    elif frame := owners_frame(error):
        path, line, function = frame.filename, frame.lineno or 0, f", in {frame.name}"
    else:
        return text
    code = linecache.getline(path, line).strip()
    return f"{text}\n  {path}, line {line}{function}\n    {code}"


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
