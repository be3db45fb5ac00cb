"""The join string of a member to be: from standard input or a file, never from an argument.

Other users of a machine can read the arguments of every process, and the join string holds the secret that makes a
member.
"""

import sys
from pathlib import Path

import typer

from fedpareto.cli.failure import USAGE, Failure

STANDARD_INPUT = Path("-")


def read_join_string(file: Path, arguments: list[str]) -> str:
    """The first line of a file or of standard input; at a terminal it is asked for, and not shown.

    Args:
        file: where it is; `STANDARD_INPUT` for standard input.
        arguments: what was given on the command line in its place.

    Raises:
        Failure: it was given on the command line, or the file cannot be read.
    """
    if arguments:
        raise Failure(
            "a join string is not accepted as an argument, because every user of this machine could read it: give "
            "it on standard input, or in a file with --join-file. If this machine has other users, ask for a new one, "
            "and have this one cancelled (fedpareto admin cancel-token CLIENT)",
            code=USAGE,
        )
    if file == STANDARD_INPUT:
        if sys.stdin.isatty():
            return str(typer.prompt("Join string (not shown)", hide_input=True, err=True))
        return sys.stdin.readline()
    try:
        return file.read_text(errors="replace").partition("\n")[0]
    except OSError as error:
        raise Failure(f"cannot read the join string from {file}: {error.strerror}", code=USAGE) from None
