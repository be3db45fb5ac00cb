"""Passphrases: from a file or a prompt, never from an argument, where other users of the machine could read it."""

from pathlib import Path

import typer

from fedpareto.cli.failure import USAGE, Failure


def read_passphrase(path: Path | None) -> bytes | None:
    """The first line of a file; None without one.

    Raises:
        Failure: the file cannot be read, or its first line is empty.
    """
    if path is None:
        return None
    try:
        passphrase = path.read_bytes().split(b"\n", 1)[0].rstrip(b"\r")
    except OSError as error:
        raise Failure(f"cannot read the passphrase file {path}: {error.strerror}", code=USAGE) from None
    if not passphrase:
        raise Failure(f"the first line of the passphrase file {path} is empty", code=USAGE)
    return passphrase


def new_passphrase(path: Path | None, *, ask: bool) -> bytes | None:
    """A passphrase for keys that are about to be made: from the file, or typed twice when `ask` is set, or none.

    Raises:
        Failure: the file cannot be read, or its first line is empty.
    """
    if path is not None or not ask:
        return read_passphrase(path)
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)).encode()


def passphrase_for(key: Path, path: Path | None) -> bytes | None:
    """The passphrase of a key file: from the file, or asked for at the terminal when the key needs one.

    Raises:
        Failure: the passphrase file cannot be read.
        IdentityError: the key file cannot be read.
    """
    import sys  # noqa: PLC0415

    from federation.keys import is_encrypted  # noqa: PLC0415 - loads slowly

    if path is None and key.is_file() and is_encrypted(key) and sys.stdin.isatty():
        return str(typer.prompt(f"Passphrase of {key}", hide_input=True, err=True)).encode()
    return read_passphrase(path)
