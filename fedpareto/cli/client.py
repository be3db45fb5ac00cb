"""The way to the coordinator: the administrator's directory, the channel, and what its errors mean for a person."""

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from federation.channels import refusal_from_rpc_error
from federation.identity import AdminFiles, IdentityError
from federation.text import escaped
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.escaping import EscapingChannel
from fedpareto.cli.failure import USAGE, Failure
from fedpareto.cli.passphrases import passphrase_for
from fedpareto.cli.serving import short_lived_coordinator

_ANSWER_SECONDS = 2.0


def find_home(given: Path) -> Path:
    """The administrator's directory: what was given, or the one inside it.

    Raises:
        Failure: there is none.
    """
    for directory in (given, given / "admin", given / "coordinator" / "admin"):
        if (directory / "certificate.pem").is_file():
            return directory
    raise Failure(
        f"{given} is not an administrator's directory: there is no certificate.pem in it. Name one with --home or in "
        "FEDPARETO_ADMIN. `fedpareto demo` and `fedpareto coordinator init --home DIR` make one (DIR/admin)",
        code=USAGE,
    )


@contextmanager
def connect(given: Path, *, passphrase_file: Path | None = None, reads: bool = False) -> Iterator[AdminStub]:
    """The Admin service, as the administrator whose directory is given.

    Args:
        given: see `find_home`.
        passphrase_file: its first line is the passphrase of the private key.
        reads: the caller only reads: where the directory is part of a coordinator's own, and that coordinator is not
            running, one is started for as long as this takes.

    Raises:
        Failure: for whatever goes wrong inside, in words.
    """
    home = find_home(given)
    files = _load(home, passphrase_file)
    with ExitStack() as stack:
        if reads and (home.parent / "coordinator.toml").is_file() and not _answers(files.address):
            print(f"no coordinator serves {home.parent}: starting one for this command", file=sys.stderr)  # noqa: T201
            stack.enter_context(short_lived_coordinator(home.parent, passphrase_file))
            files = _load(home, passphrase_file)  # it has noted its address
        channel = stack.enter_context(files.channel())
        try:
            yield AdminStub(EscapingChannel(channel))
        except grpc.RpcError as error:
            raise explain(error, files) from None


def explain(error: grpc.RpcError, files: AdminFiles) -> Failure:
    """What a failed call means."""
    refusal = refusal_from_rpc_error(error, not_after=files.not_after)
    if refusal.reason == "unreachable":
        return Failure(f"cannot reach the coordinator at {files.address}: {escaped(refusal.message)}")
    return Failure(escaped(f"{refusal.message} [{refusal.reason or refusal.status}]"))


def _load(home: Path, passphrase_file: Path | None) -> AdminFiles:
    try:
        return AdminFiles.load(home, passphrase_for(home / "tls.key", passphrase_file))
    except IdentityError as error:
        raise Failure(str(error), code=USAGE) from None


def _answers(address: str) -> bool:
    """Whether anything listens there; TLS finds out later whether it is the coordinator."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False
