"""Calls to the coordinator: the administrator's directory, the channel, and errors in words."""

import json
import socket
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import typer

from federation.certificates import load_certificate
from federation.keys import IdentityError
from federation.member_files import AdminFiles
from federation.text import escaped, escaped_lines
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.escaping import escaping_stub
from fedpareto.cli.failure import USAGE, Failure, failing
from fedpareto.cli.processes import short_lived_coordinator
from fedpareto.cli.secret_input import passphrase_for, proxy_for

SETTINGS = "coordinator.toml"
_ANSWER_SECONDS = 2.0


def find_home(given: Path) -> Path:
    """The administrator's directory: the given one, or the one inside it; a Failure if there is none."""
    for directory in (given, given / "admin", given / "coordinator" / "admin"):
        if (directory / "certificate.pem").is_file():
            return directory
    raise Failure(
        f"{given} is not an administrator's directory: there is no certificate.pem in it. Name one with --home or in "
        "FEDPARETO_ADMIN. `fedpareto demo` and `fedpareto coordinator init --home DIR` make one (DIR/admin)",
        code=USAGE,
    )


@contextmanager
def connect(
    given: Path, *, passphrase_file: Path | None = None, reads: bool = False, proxy: str | None = None
) -> Iterator[AdminStub]:
    """The Admin service, as the administrator whose directory is given.

    Args:
        given: see `find_home`.
        passphrase_file: its first line is the passphrase of the private key.
        reads: the caller only reads: if the directory is part of a coordinator's home, and that coordinator is not
            running, one is started meanwhile.
        proxy: as the user gave it; None is that of the environment.

    Raises:
        Failure: the directory cannot be used, or a call fails inside.
    """
    home = find_home(given)
    files = _load(home, passphrase_file, proxy)
    _must_be_valid(home, files, datetime.now(UTC))
    with ExitStack() as stack:
        local = _local_address(home.parent)
        if local is None and reads and (home.parent / SETTINGS).is_file() and not _answers(files.address):
            typer.echo(f"no coordinator serves {home.parent}: starting one for this command", err=True)
            stack.enter_context(short_lived_coordinator(home.parent, passphrase_file))
            files = _load(home, passphrase_file, proxy)  # it has noted its address
            local = _local_address(home.parent)
        channel = stack.enter_context(_channel(files, local))
        try:
            yield escaping_stub(channel)
        except grpc.RpcError as error:
            refusal = files.refusal(error)
            if refusal.reason == "unreachable":
                message = f"cannot reach the coordinator at {files.address}: {escaped(refusal.message)}"
                raise Failure(message) from None
            raise Failure(escaped_lines(f"{refusal.message} [{refusal.reason or refusal.status}]")) from None


def _must_be_valid(home: Path, files: AdminFiles, now: datetime) -> None:
    """Raises a Failure if the administrator's certificate is not valid at the time of this machine's clock."""
    certificate = load_certificate(files.certificate)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begins <= now < ends:
        return
    said = (
        f"the administrator's certificate {home / 'certificate.pem'} is valid from {begins:%Y-%m-%d %H:%M} to "
        f"{ends:%Y-%m-%d %H:%M} UTC, and this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
    )
    if now < begins:
        raise Failure(f"{said}: set the clock")
    raise Failure(
        f"{said}: set the clock if it is wrong; if not, have the next one issued on the coordinator's machine: "
        f"fedpareto coordinator admin {files.name} --role ROLE --out DIR --home HOME"
    )


def _channel(files: AdminFiles, local: str | None) -> grpc.Channel:
    """A channel to the coordinator, by its address on this machine if it has one; TLS checks its public name."""
    if local is None:
        return files.channel()
    public = files.address.rpartition(":")[0].strip("[]")
    return replace(files, address=local, proxy=None).channel([("grpc.ssl_target_name_override", public)])


def _local_address(centre: Path) -> str | None:
    """The address on this machine of the coordinator that serves the directory `centre`; None if there is none."""
    try:
        port = int(json.loads((centre / "ports.json").read_text())["federation"])
        bind = str(tomllib.loads((centre / SETTINGS).read_text()).get("bind", ""))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    loopback = ["[::1]"] if bind.strip("[]") == "::" else []
    own = [] if bind.strip("[]") in ("", "0.0.0.0", "::") else [f"[{bind.strip('[]')}]" if ":" in bind else bind]  # noqa: S104
    candidates = (f"{host}:{port}" for host in dict.fromkeys([*own, "127.0.0.1", *loopback]))
    return next(filter(_answers, candidates), None)


def _load(home: Path, passphrase_file: Path | None, proxy: str | None) -> AdminFiles:
    with failing(IdentityError, code=USAGE):
        files = AdminFiles.load(home, passphrase_for(home / "tls.key", passphrase_file))
    return replace(files, proxy=proxy_for(files.address, proxy))


def _answers(address: str) -> bool:
    """Whether a process listens there; TLS checks later whether it is the coordinator."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False
