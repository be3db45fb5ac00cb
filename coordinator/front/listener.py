"""The coordinator's side of the front listener: binds the public ports, starts the process, and talks to it."""

import asyncio
import contextlib
import errno
import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote

from coordinator.front.connection_limits import ConnectionLimits

log = logging.getLogger(__name__)

Service: TypeAlias = Literal["members", "newcomers"]
Serves: TypeAlias = Service | Literal["both"]  # of a port; both: the server's name that a client asks for decides

RESTART_SECONDS = 1.0
BIND_SECONDS = 1.0  # for the process of a coordinator that was killed a moment ago to give the port back
END_SECONDS = 5.0
BACKLOG = 1024
MAX_AUTHENTICATED = 100_000  # connections that are remembered, since each call of a member comes over one
_ROOT = Path(__file__).resolve().parents[2]
# Isolated: neither the current directory of the coordinator nor PYTHONPATH can replace a module.
_PROGRAM = "import sys; sys.path.append(sys.argv.pop()); from coordinator.front.process import main; main()"


class Front:
    """The public ports. gRPC listens on Unix sockets behind them, in a directory of mode 0700.

    Args:
        limits: on connections.
        refused: called with the source of refused connections, the reason and their number.
        newcomers: on a port for both services, the name of the server that newcomers ask for.
    """

    def __init__(
        self, limits: ConnectionLimits, refused: Callable[[str, str, int], Awaitable[None]], newcomers: str = ""
    ) -> None:
        self._limits = limits
        self._newcomers = newcomers
        self._refused = refused
        self._directory = Path(tempfile.mkdtemp(prefix="fedpareto-"))  # a Unix socket's path is short
        self._listeners: list[tuple[Serves, socket.socket]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._authenticated: set[int] = set()  # the numbers of the connections that the process knows as a member's
        self._stopping = False

    def listen(self, bind: str, port: int, service: Serves) -> int:
        """Listens on a public port, whose connections are forwarded to a service or to both; returns the port.

        The addresses 0.0.0.0 and :: are all of this machine, of IPv4 and IPv6; port 0 is one that the kernel picks.

        Raises:
            OSError: the port is taken, or the address is not this machine's.
        """
        for listener in _bound(bind.strip("[]"), port):
            self._listeners.append((service, listener))
            port = listener.getsockname()[1]
        return port

    def inner(self, service: Service) -> str:
        """The address on which gRPC must listen for a service."""
        return f"unix:{self._directory / service}"

    async def start(self) -> None:
        """Starts the process; from then on connections are accepted."""
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop_accepting(self) -> None:
        """Closes the public ports; the connections stay."""
        self._stopping = True
        self._close_listeners()
        self._send(stop=True)

    async def stop(self) -> None:
        """Ends the process after it has forwarded gRPC's last bytes; removes the directory."""
        self._stopping = True
        self._close_listeners()
        if self._supervisor is not None:
            self._supervisor.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def verified(self, peer: str, member: str) -> None:
        """Notes that a connection, by gRPC's name, has shown a member's certificate. Called on the event loop."""
        number = _bound_name(peer).partition("@")[0]
        if number.isdigit() and int(number) not in self._authenticated:
            if len(self._authenticated) >= MAX_AUTHENTICATED:
                self._authenticated.clear()
            self._authenticated.add(int(number))
            self._send(verified=int(number), member=member)

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            settings = {
                "listeners": [(service, listener.fileno()) for service, listener in self._listeners],
                "control": theirs.fileno(),
                "directory": str(self._directory),
                "limits": self._limits._asdict(),
                "newcomers": self._newcomers,
            }
            try:
                self._process = await asyncio.to_thread(
                    subprocess.Popen,
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(settings), str(_ROOT)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *(listener.fileno() for _, listener in self._listeners)],
                )
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._authenticated.clear()

    async def _supervise(self) -> None:
        """Reads the reports of the process; starts another one when it ends unexpectedly."""
        while True:
            await self._listen()
            if self._stopping:
                return
            if self._writer is not None:
                self._writer.close()
            code = await asyncio.to_thread(_end, self._process) if self._process is not None else None
            log.error(
                "the front listener ended with status %s, and every connection with it: it is started again", code
            )
            while True:
                await asyncio.sleep(RESTART_SECONDS)
                try:
                    await self._spawn()
                except OSError as error:
                    log.error("the front listener cannot be started: %s; it is tried again", error)
                else:
                    break

    async def _listen(self) -> None:
        """Reads the reports of the process until it ends; it may be killed in the middle of a line."""
        if self._reader is None:
            return
        with contextlib.suppress(ConnectionError):
            while (line := await self._reader.readline()).endswith(b"\n"):
                report = json.loads(line)
                await self._refused(report["actor"], report["reason"], report["times"])

    def _send(self, **command: object) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(command).encode() + b"\n")

    def _close_listeners(self) -> None:
        for _, listener in self._listeners:
            listener.close()
        self._listeners.clear()


def host_of(peer: str) -> str:
    """The host of a peer by gRPC's name: "unix:/tmp/fedpareto-x/17@192.0.2.7", which the front listener has bound."""
    return _bound_name(peer).partition("@")[2] or peer


def _bound_name(peer: str) -> str:
    return unquote(peer).rpartition("/")[2]


def _bound(bind: str, port: int) -> list[socket.socket]:
    if bind in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():  # noqa: S104 - as the settings say
        return [_listening_socket(socket.AF_INET6, ("::", port), dualstack=True)]
    listeners: list[socket.socket] = []
    try:
        infos = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((info[0], str(info[4][0])) for info in infos):
            listeners.append(_listening_socket(family, (address, port)))
            port = listeners[0].getsockname()[1]
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listening_socket(
    family: socket.AddressFamily, address: tuple[str, int], *, dualstack: bool = False
) -> socket.socket:
    end = time.monotonic() + BIND_SECONDS
    while True:
        try:
            return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=dualstack)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
            time.sleep(0.05)  # the previous owner of the port may still be ending; the kernel does not notify


def _end(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
