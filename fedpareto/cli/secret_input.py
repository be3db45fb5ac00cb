"""Passphrases, join strings and passwords of proxies: from a file, standard input, a prompt or the environment.

They are never arguments, because every user of a machine can read the arguments of its processes.
"""

import codecs
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import typer

from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.text_files import EncodingError, check_not_wide, decoded, read_text
    from federation.transport.proxies import Proxy, ProxyChoice, ProxyError, choose_proxy
    from federation.trust import keys
    from federation.trust.join_string import JoinStringFields
    from federation.trust.keys import is_encrypted


STANDARD_INPUT = Path("-")
_LONGEST = 20_000  # characters of a join string with white space


def read_join_string(file: Path, arguments: list[str]) -> str:
    """The join string in a file or on standard input; at a terminal, the command asks for it and does not show it.

    It may be folded into several lines. What comes after it is not read.

    Raises:
        CommandFailure: it is among the arguments of the command, or the file cannot be read.
    """
    if arguments:
        raise CommandFailure(
            "a join string is not accepted as an argument, because every user of this machine could read it: give "
            "it on standard input, or in a file with --join-file. If this machine has other users, ask for a new one, "
            "and have this one cancelled (fedpareto admin cancel-join-string MEMBER)",
            code=USAGE,
        )
    if file == STANDARD_INPUT and sys.stdin.isatty():
        return str(typer.prompt("Join string (not shown)", hide_input=True, err=True))
    source = "standard input" if file == STANDARD_INPUT else str(file)
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read the join string from {source}"):
        if file == STANDARD_INPUT:
            return _joined(sys.stdin.buffer)
        with file.open("rb") as lines:
            return _joined(lines)


def _joined(lines: Iterable[bytes]) -> str:
    """The lines of a text up to the one that completes a join string; as many as it could have if none does."""
    text = ""
    for line in lines:
        text += decoded(line)
        with suppress(keys.IdentityError):
            JoinStringFields.decode(text)
            break
        if len(text) > _LONGEST:
            break
    return text


def read_passphrase(path: Path | None) -> bytes | None:
    """The first line of a file; None without one.

    Raises:
        CommandFailure: the file cannot be read, or its first line is empty.
    """
    if path is None:
        return None
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read the passphrase file {path}"):
        data = path.read_bytes()
        check_not_wide(data)
        passphrase = data.removeprefix(codecs.BOM_UTF8).split(b"\n", 1)[0].rstrip(b"\r")
    if not passphrase:
        raise CommandFailure(f"the first line of the passphrase file {path} is empty", code=USAGE)
    return passphrase


def new_passphrase(path: Path | None, *, ask: bool) -> bytes | None:
    """A passphrase for new keys: from the file (see `read_passphrase`), or typed twice when `ask` is set, or none."""
    if path is not None or not ask:
        return read_passphrase(path)
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)).encode()


def passphrase_for(key: Path, path: Path | None) -> bytes | None:
    """The passphrase of a key file: from the file, or asked for at the terminal when the key needs one.

    Raises:
        CommandFailure, IdentityError: the passphrase file or the key file cannot be read.
    """
    if path is None and key.is_file() and is_encrypted(key) and sys.stdin.isatty():
        return str(typer.prompt(f"Passphrase of {key}", hide_input=True, err=True)).encode()
    return read_passphrase(path)


def proxies_for(addresses: Sequence[str], given: str | None) -> "ProxyChoice":
    """The choice of a proxy on the way to each coordinator ("host:port"), from --proxy or the environment.

    Raises:
        CommandFailure: its URL cannot be used at one of the addresses, or has a password among the arguments of the
            command.
    """
    if given is not None and given.startswith("@"):
        with failing(OSError, EncodingError, code=USAGE, what=f"cannot read the file of the proxy's URL, {given[1:]}"):
            given = read_text(Path(given[1:])).partition("\n")[0].strip()
    elif given is not None and "@" in given:
        raise CommandFailure(
            "--proxy: a user and password are not accepted as an argument, because every user of this machine could "
            "read them: put the URL into a file and give --proxy @FILE, or set https_proxy",
            code=USAGE,
        )
    environment = dict(os.environ)

    def choose(address: str) -> "Proxy | None":
        with failing(ProxyError, code=USAGE):
            return choose_proxy(address, given, environment)

    for address in addresses:
        choose(address)
    return choose
