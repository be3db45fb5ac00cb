"""Failures of commands, and their answers: one JSON document, or lines for people."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from federation.errors import Error
from fedpareto.on_first_use import what_waits
from fedpareto.standard_streams import print_document

USAGE = 2
NOT_VERIFIED = 3  # something could not be verified, and nothing is wrong
INTERRUPTED = 130


class CommandFailure(Error):
    """Ends the command.

    Attributes:
        message: the problem, with the wrong value, and what to do.
        code: the exit code: 1 when the work failed, 2 for bad usage.
    """

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


@contextmanager
def failing(*errors: type[Exception], code: int = 1, what: str = "") -> Iterator[None]:
    """Turns errors of these classes into a CommandFailure.

    `what` begins its message; for an error of the operating system, the default is the file.
    """
    try:
        yield
    except tuple(map(what_waits, errors)) as error:
        message = str(error)
        if isinstance(error, OSError) and error.strerror:
            what, message = what or str(error.filename or "this machine"), error.strerror
        raise CommandFailure(f"{what}: {message}" if what else message, code=code) from error


def require(what: str, *packages: str, extra: str = "torch") -> None:
    """Checks that packages are installed; `what` begins the message, such as "the demo trains with".

    Raises:
        CommandFailure: one of them is missing; the message says which and how to install it.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise CommandFailure(f"{what} {' and '.join(missing)}, not installed here: install fedpareto[{extra}]")


def not_served(centre: Path, why: str = "this command needs it") -> CommandFailure:
    """The CommandFailure of a command that needs the coordinator of a directory, which does not run."""
    where = shlex.quote(str(centre))
    return CommandFailure(
        f"no coordinator serves {centre}, and {why}: start it with `fedpareto coordinator serve --home {where}` "
        "(with --hold no run advances), and give this command again"
    )


def answer(as_json: bool, document: Any, *lines: str) -> None:
    """Prints a document as one line of JSON, or the lines."""
    if as_json:
        print_document(json.dumps(document))
    for line in () if as_json else lines:
        typer.echo(line)
