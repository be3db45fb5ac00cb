"""Errors in an owner's own code: the whole text for the owner, and what others are told of it.

The text of an exception can hold anything that the code has read: a path, a value, the name of a patient.
"""

import linecache
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NewType, Self

_MESSAGE_CHARACTERS = 500
_INSTALLED = {"site-packages", "dist-packages"}
_ROOT = Path(__file__).resolve().parents[1]  # the directory that holds this project's packages
_PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "fedpareto")


Wire = NewType("Wire", str)
"""A text that may leave the site. Only `TwoTexts` makes one."""

LOGGED = "this worker's log says more"


@dataclass(frozen=True)
class TwoTexts:
    """What is said of a problem: `local` in this machine's own log, `wire` to others."""

    local: str
    wire: Wire

    @classmethod
    def same(cls, text: str) -> Self:
        """A text of this project, which has nothing of the owner's code, data, paths or machine."""
        return cls(text, Wire(text))

    @classmethod
    def of(cls, local: str, wire: str) -> Self:
        """A text for the log, and a text of this project for others, without what only the owner may read."""
        return cls(local, Wire(f"{wire}; {LOGGED}"))

    @property
    def differ(self) -> bool:
        """True if others are not told everything."""
        return self.local != self.wire


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


def place(error: BaseException) -> str:
    """The class of an exception and where it was raised, without its text: "FileNotFoundError at my_task:17".

    It is the exception whose last line of the owner's code is known: this one, or one of its causes; else this one.
    """
    frames = [(each, frame, line) for each in _with_causes(error) for frame, line in _frames(each)]
    own = [found for found in frames if _is_owners(found[1].f_code.co_filename)]
    if not frames:
        return _name(error)
    raised, frame, line = (own or [found for found in frames if found[0] is error] or frames)[-1]
    module = str(frame.f_globals.get("__name__", ""))
    return f"{_name(raised)} at {module}:{line}" if _is_dotted(module) else _name(raised)


def raised_here(error: BaseException) -> bool:
    """True if a line of this project raised an exception."""
    frames = _frames(error)
    return bool(frames) and any(
        directory in Path(frames[-1][0].f_code.co_filename).parents for directory in _own_directories()
    )


def is_of_this_project(error: BaseException) -> bool:
    """True if an exception and those before it were raised by lines of this project, so that its text is, too."""
    return all(map(raised_here, _with_causes(error)))


def _with_causes(error: BaseException) -> list[BaseException]:
    """An exception and those that it follows from, also where `from None` hides them."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    return chain


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_tb(error.__traceback__))


def _name(error: BaseException) -> str:
    """The name of the class of an exception, which code can choose freely."""
    name = type(error).__name__
    return name if name.isidentifier() and name.isascii() else "an exception"


def _is_dotted(module: str) -> bool:
    return module.isascii() and all(part.isidentifier() for part in module.split("."))


def _own_directories() -> list[Path]:
    return [_ROOT / package for package in _PACKAGES]


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
def without_exit(kind: type[Exception]) -> Iterator[None]:
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
    others = (Path(sysconfig.get_path("stdlib")), *_own_directories())
    return not any(directory in path.parents for directory in others)
