"""Standard output and standard error of a command: what a terminal cannot show, what cannot be written, and documents.

With --json, standard output holds documents alone: what other code prints in the same process goes to standard error.
"""

import codecs
import io
import json
import os
import sys
from contextvars import ContextVar
from typing import Any, BinaryIO, TextIO

from federation.errors import Error

READER_GONE = 141  # as shells show a program that SIGPIPE has ended
_INPUT, _OUTPUT, _ERROR = 0, 1, 2
_ERRORS = "fedpareto.signs"
# Signs of our tables and drawings, and what stands for each where the encoding has no such letter. Others become "?".
_SIGNS = str.maketrans("–…·×→✓✗•●²─━┄┆░▒▓█", "-..x>vx**2---|.:%#")
_documents: ContextVar["_Stream | None"] = ContextVar("documents", default=None)


class OutputError(Error):
    """Standard output cannot be written.

    Attributes:
        message: the problem; empty if the program that reads it has ended, as `head` does.
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class _Descriptor(io.FileIO):
    """A file descriptor. After an error, what is written is dropped."""

    def __init__(self, number: int, *, may_fail: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self.may_fail = may_fail
        self._lost = False

    def write(self, data: Any, /) -> int:
        if not self._lost:
            try:
                return super().write(data)
            except OSError as error:
                self._lost = True
                if not self.may_fail:
                    if isinstance(error, BrokenPipeError):
                        raise OutputError("", READER_GONE) from error
                    raise OutputError(f"standard output cannot be written: {error.strerror}", 1) from error
        return memoryview(data).nbytes


class _Stream(io.TextIOWrapper):
    """Text on a file descriptor, in the encoding of another stream; letters that this lacks are replaced."""

    def __init__(self, number: int, like: TextIO | None, *, may_fail: bool = False) -> None:
        self._descriptor = _Descriptor(number, may_fail=may_fail)
        super().__init__(
            io.BufferedWriter(self._descriptor),
            encoding=getattr(like, "encoding", None) or "utf-8",
            errors=_ERRORS,
            line_buffering=may_fail or getattr(like, "line_buffering", False),
            write_through=getattr(like, "write_through", False),
        )

    @property
    def buffer(self) -> BinaryIO:
        """None if the encoding is ASCII: through the buffer, Click would write UTF-8 there."""
        return None if codecs.lookup(self.encoding).name == "ascii" else super().buffer  # type: ignore[return-value]

    def give_way(self) -> "_Stream":
        """Makes the descriptor a copy of standard error; returns a stream on what it has been."""
        self.flush()
        former = _Stream(os.dup(self.fileno()), self)
        os.dup2(_ERROR, self.fileno())
        self._descriptor.may_fail = True
        self.reconfigure(line_buffering=True)
        return former


def take_over() -> None:
    """Makes the streams of this process those of this module. Descriptors that were closed lead nowhere, as /dev/null.

    Otherwise, the next file that is opened would get the number of a closed one, and what is printed.
    """
    for number in (_INPUT, _OUTPUT, _ERROR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
    codecs.register_error(_ERRORS, _replaced)
    if sys.stdin is None:
        sys.stdin = open(_INPUT, closefd=False)  # noqa: SIM115
    if _is(sys.stdout, _OUTPUT):
        sys.stdout = _Stream(_OUTPUT, sys.stdout)
    if _is(sys.stderr, _ERROR):
        sys.stderr = _Stream(_ERROR, sys.stderr, may_fail=True)


def separate_documents() -> None:
    """From now on, standard output holds what `print_document` writes; what else is printed goes to standard error."""
    if isinstance(sys.stdout, _Stream) and _documents.get() is None:
        _documents.set(sys.stdout.give_way())


def print_document(text: str) -> None:
    """Prints a JSON document on standard output. Letters that its encoding lacks are escaped.

    Raises:
        OutputError: it cannot be written.
    """
    stream = _documents.get() or sys.stdout
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        text = "".join(letter if letter.isascii() else json.dumps(letter)[1:-1] for letter in text)
    print(text, file=stream, flush=True)


def event_stream() -> TextIO:
    """Standard output for the documents of a daemon, which goes on if they cannot be written: that is an OSError."""
    stream = _documents.get()
    return sys.stdout if stream is None else open(os.dup(stream.fileno()), "w", encoding=stream.encoding)


def _is(stream: Any, number: int) -> bool:
    """True if a stream is on this descriptor, or there is none: tests have others."""
    try:
        return stream is None or bool(stream.fileno() == number)
    except (AttributeError, OSError):
        return False


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end].translate(_SIGNS)
    return "".join(sign if sign.isascii() else "?" for sign in signs), error.end


def has_display() -> bool:
    """True if this machine can show a browser's window."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
