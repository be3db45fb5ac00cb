"""Calls to the coordinator: the administrator's directory, the channel, and errors in words."""

import json
import os
import socket
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import typer

from federation.admin_files import SIGNING_KEY, Account
from federation.keys import IdentityError
from federation.text import escaped, escaped_lines
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.admin_line import Line, Local, Way
from fedpareto.cli.escaping import escaping_stub
from fedpareto.cli.failure import USAGE, Failure, failing
from fedpareto.processes.federation import Federation, ProcessError, leaving_on_signals

SETTINGS = "coordinator.toml"
_ANSWER_SECONDS = 2.0
_SERVE_SECONDS = 60.0  # for the start of a coordinator


def find_home(given: Path) -> Path:
    """The administrator's directory: the given one, or the one inside it; a Failure if there is none."""
    for directory in (given, given / "admin", given / "coordinator" / "admin"):
        if (directory / SIGNING_KEY).is_file() and (directory / "member.toml").is_file():
            return directory
    raise Failure(
        f"{given} is not an administrator's directory: there is no {SIGNING_KEY} in it. Name one with --home or in "
        "FEDPARETO_ADMIN. `fedpareto demo` and `fedpareto coordinator init --home DIR` make one (DIR/admin)",
        code=USAGE,
    )


@contextmanager
def connect(
    given: Path, *, passphrase_file: Path | None = None, reads: bool = False, proxy: str | None = None
) -> Iterator[AdminStub]:
    """The Admin service, as the administrator whose directory is given. Logs in if the last login has ended.

    Args:
        given: see `find_home`.
        passphrase_file: its first line is the passphrase of the signing key.
        reads: the caller only reads: if the directory is part of a coordinator's home, and that coordinator is not
            running, one is started meanwhile.
        proxy: as the user gave it; None is that of the environment.

    Raises:
        Failure: the directory cannot be used, or a call fails inside.
    """
    with way_to(given, passphrase_file=passphrase_file, reads=reads, proxy=proxy) as way:
        line = Line(way)
        try:
            line.open()
            yield escaping_stub(line.call)
        except grpc.RpcError as error:
            refusal = way.refusal(error, line.files)
            if refusal.reason == "unreachable":
                message = f"cannot reach the coordinator at {way.account.address}: {escaped(refusal.message)}"
                raise Failure(message) from None
            raise Failure(escaped_lines(f"{refusal.message} [{refusal.reason or refusal.status}]")) from None
        finally:
            line.close()


@contextmanager
def way_to(
    given: Path, *, passphrase_file: Path | None = None, reads: bool = False, proxy: str | None = None
) -> Iterator[Way]:
    """How to reach the coordinator of an administrator; arguments and errors as of `connect`."""
    home = find_home(given)
    centre = home.parent
    with ExitStack() as stack:
        account, local = _load(home), _local(centre)
        if local is None and reads and (centre / SETTINGS).is_file() and not _answers(account.address):
            typer.echo(f"no coordinator serves {centre}: starting one for this command", err=True)
            stack.enter_context(short_lived_coordinator(centre, passphrase_file))
            account, local = _load(home), _local(centre)  # it has noted its addresses
        yield Way(home, account, local, passphrase_file, proxy)


@contextmanager
def short_lived_coordinator(home: Path, passphrase_file: Path | None = None) -> Iterator[None]:
    """Serves the coordinator's directory for reading while the block runs: no run advances meanwhile."""
    options = ["--hold", *(["--passphrase-file", str(passphrase_file)] if passphrase_file else [])]
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedpareto-"))
        stack.enter_context(leaving_on_signals())
        process = stack.enter_context(Federation(Path(directory), seconds=_SERVE_SECONDS))
        process.home, process.forks = home.absolute(), False
        with failing(ProcessError):
            process.serve(*options, program=["-m", "fedpareto.processes.child", str(os.getpid())])
        yield


def _load(home: Path) -> Account:
    with failing(IdentityError, code=USAGE):
        return Account.load(home)


def _local(centre: Path) -> Local | None:
    """The addresses on this machine of the coordinator that serves the directory `centre`; None if there is none."""
    try:
        ports = json.loads((centre / "ports.json").read_text())
        federation, enrollment = int(ports["federation"]), int(ports["enrollment"])
        bind = str(tomllib.loads((centre / SETTINGS).read_text()).get("bind", ""))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    loopback = ["[::1]"] if bind.strip("[]") == "::" else []
    own = [] if bind.strip("[]") in ("", "0.0.0.0", "::") else [f"[{bind.strip('[]')}]" if ":" in bind else bind]  # noqa: S104
    hosts = dict.fromkeys([*own, "127.0.0.1", *loopback])
    host = next((host for host in hosts if _answers(f"{host}:{federation}")), None)
    return None if host is None else Local(f"{host}:{federation}", f"{host}:{enrollment}")


def _answers(address: str) -> bool:
    """Whether a process listens there; TLS checks later whether it is the coordinator."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False
