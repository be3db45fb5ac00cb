"""Calls to the coordinator: the administrator's directory, the channel, and errors in words."""

import json
import socket
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from federation.text import escaped, escaped_lines
from federation.text_files import read_text
from federation.trust.admin_files import SIGNING_KEY, Account, AdminFiles
from federation.trust.keys import IdentityError
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import CoordinatorAway, OpenedCalls
from fedpareto.cli.admin.admin_session import AdminSession, Local, Route
from fedpareto.cli.commands import load
from fedpareto.cli.failure import USAGE, CommandFailure, failing, not_served
from fedpareto.escaping import escaping_stub

SETTINGS = "coordinator.toml"
_ANSWER_SECONDS = 2.0


def find_home(given: Path) -> Path:
    """The administrator's directory: the given one, or the one inside it; a CommandFailure if there is none."""
    for directory in (given, given / "admin", given / "coordinator" / "admin"):
        if (directory / SIGNING_KEY).is_file() and (directory / "member.toml").is_file():
            return directory
    raise CommandFailure(
        f"{given} is not an administrator's directory: there is no {SIGNING_KEY} in it. Name one with --home or in "
        "FEDPARETO_ADMIN. `fedpareto demo` and `fedpareto coordinator init --home DIR` make one (DIR/admin)",
        code=USAGE,
    )


@contextmanager
def connect(
    given: Path,
    *,
    passphrase_file: Path | None = None,
    proxy: str | None = None,
    warn: Callable[[str], object] | None = None,
) -> Iterator[AdminStub]:
    """The Admin service, as the administrator whose directory is given. Logs in if the last login has ended.

    If the directory is part of the home of a coordinator that does not run, calls that only show the record read it
    from the home. Each other call is a CommandFailure that says how to start the coordinator.

    Args:
        given: see `find_home`.
        passphrase_file: its first line is the passphrase of the signing key.
        proxy: the user's setting; None takes the environment's.
        warn: is told why a certificate that still holds was not renewed. Default: a line on standard error.

    Raises:
        CommandFailure: the directory cannot be used, or a call fails inside.
    """
    route = route_to(given, passphrase_file=passphrase_file, proxy=proxy)
    if route.stopped:
        with load("admin.stopped:reading")(route.home.parent) as call:  # with SQLAlchemy, which no other route needs
            yield escaping_stub(call)
        return
    session = AdminSession(route, warn=warn)
    try:
        session.open()
        yield escaping_stub(session.call)
    except grpc.RpcError as error:
        refusal = route.refusal(error, session.files)
        if refusal.reason == "unreachable":
            message = f"cannot reach the coordinator at {route.address}: {escaped(refusal.message)}"
            raise CommandFailure(message) from None
        raise CommandFailure(escaped_lines(f"{refusal.message} [{refusal.reason or refusal.status}]")) from None
    finally:
        session.close()


@contextmanager
def opened_calls(
    given: Path, *, passphrase_file: Path | None = None, proxy: str | None = None, served: bool = False
) -> Iterator[OpenedCalls]:
    """The calls of an administrator, for what runs until it is stopped; arguments as of `connect`.

    With `served`, what a stopped coordinator has left on this machine does not count.

    Raises:
        CoordinatorAway: the directory cannot be used, or a call fails inside.
    """
    try:
        route = route_to(given, passphrase_file=passphrase_file, proxy=proxy)
        if served and route.stopped:
            raise CoordinatorAway(f"no coordinator serves {route.home.parent}")
        with connect(given, passphrase_file=passphrase_file, proxy=proxy) as stub:
            yield OpenedCalls(stub, live=not route.stopped, outdated=lambda: not route_to(given).stopped)
    except CommandFailure as failure:
        raise CoordinatorAway(failure.message) from None


@contextmanager
def logged_in(given: Path, *, proxy: str | None = None) -> Iterator[AdminStub]:
    """The Admin service with the last login, without another one. It changes nothing, and asks for nothing.

    Raises:
        CommandFailure: the directory cannot be used, or the coordinator does not run.
        IdentityError: there is no login.
    """
    route = route_to(given, proxy=proxy)
    if route.stopped:
        raise not_served(route.home.parent)
    with route.channel(AdminFiles.load(route.home)) as channel:
        yield escaping_stub(lambda kind, method, **settings: getattr(channel, kind)(method, **settings))


def route_to(given: Path, *, passphrase_file: Path | None = None, proxy: str | None = None) -> Route:
    """The route to the coordinator of an administrator; arguments and errors as of `connect`."""
    home = find_home(given)
    centre = home.parent
    with failing(IdentityError, code=USAGE):
        account = Account.load(home)
    local = _local(centre)
    stopped = local is None and (centre / SETTINGS).is_file() and not any(map(_answers, account.addresses))
    return Route(home, account, local, stopped=stopped, passphrase_file=passphrase_file, proxy=proxy)


def _local(centre: Path) -> Local | None:
    """The addresses on this machine of the coordinator that serves the directory `centre`; None if there is none."""
    try:
        ports = json.loads((centre / "ports.json").read_text())
        federation, enrollment = int(ports["federation"]), int(ports["enrollment"])
        settings = tomllib.loads(read_text(centre / SETTINGS))
        bind, name = str(settings.get("bind", "")), str(settings["hosts"][0])
        newcomers = str(settings.get("enrollment_host") or name)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    loopback = ["[::1]"] if bind.strip("[]") == "::" else []
    own = [] if bind.strip("[]") in ("", "0.0.0.0", "::") else [f"[{bind.strip('[]')}]" if ":" in bind else bind]  # noqa: S104
    hosts = dict.fromkeys([*own, "127.0.0.1", *loopback])
    host = next((host for host in hosts if _answers(f"{host}:{federation}")), None)
    return None if host is None else Local(f"{host}:{federation}", f"{host}:{enrollment}", name, newcomers)


def _answers(address: str) -> bool:
    """True if a process listens there; TLS verifies later that it is the coordinator."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS):
            return True
    except (OSError, ValueError):
        return False
