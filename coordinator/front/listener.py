"""The coordinator's side of the front listener: binds the public ports, starts the process, and talks to it."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import unquote

from coordinator.front.connection_limits import ConnectionLimits
from coordinator.front.forwarder import UNHEARD

log = logging.getLogger(__name__)

Service: TypeAlias = Literal["members", "newcomers"]
Serves: TypeAlias = Service | Literal["both"]  # of a port; both: the server's name that a client asks for decides

BEAT_SECONDS = 1.0
MOST_UNANSWERED = 10  # beats: then the process counts as hung
UNHEARD_SECONDS = 60.0  # without a beat, after which the process ends: the coordinator hangs, or is gone
RESTART_SECONDS = 1.0  # before the first restart; the pause doubles with each further one, up to
LONGEST_RESTART_SECONDS = 10.0
STEADY_BEATS = 60  # that a process has answered, after which its end counts as the first one again
BIND_SECONDS = 1.0  # for the process of a coordinator that was killed a moment ago to give the port back
END_SECONDS = 5.0
BACKLOG = 1024
NUMBERS = 1 << 32  # of connections of one process: no two processes give the same number
MAX_AUTHENTICATED = 100_000  # connections that are remembered, since each call of a member comes over one
_ROOT = Path(__file__).resolve().parents[2]
# Isolated: neither the current directory of the coordinator nor PYTHONPATH can replace a module.
_PROGRAM = "import sys; sys.path.append(sys.argv.pop()); from coordinator.front.forwarder import main; main()"


class Front:
    """The public ports. gRPC listens on Unix sockets behind them, which have no path once the process runs.

    Args:
        limits: on connections.
        refused: called with the source of refused connections, the reason and their number.
        newcomers: on a port for both services, the name of the server that newcomers ask for.
        unheard_seconds: how long this process may give no sign of life, before its connections end; None: a minute.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        refused: Callable[[str, str, int], Awaitable[None]],
        newcomers: str = "",
        unheard_seconds: float | None = None,
    ) -> None:
        self._limits = limits
        self._newcomers = newcomers
        self._unheard_seconds = UNHEARD_SECONDS if unheard_seconds is None else unheard_seconds
        self._refused = refused
        self._directory = _Directory()
        self._sockets: dict[str, int] = {}  # by service, gRPC's socket
        self._listeners: list[tuple[Serves, socket.socket]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._started = 0  # processes so far
        self._unanswered = self._answered = 0  # beats, of the present process
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
        """The address on which gRPC must listen for a service, before `start`."""
        return f"unix:{self._directory.path(service)}"

    async def start(self) -> None:
        """Starts the process; from then on connections are accepted."""
        self._sockets = self._directory.take_sockets()
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop_accepting(self) -> None:
        """Closes the public ports; the connections stay."""
        self._stopping = True
        self._close_listeners()
        self._send(stop=True)

    async def stop(self) -> None:
        """Ends the process after it has forwarded gRPC's last bytes."""
        self._stopping = True
        self._close_listeners()
        if self._supervisor is not None:
            self._supervisor.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)
        await asyncio.gather(*self._reports, return_exceptions=True)
        self._directory.remove()
        while self._sockets:
            os.close(self._sockets.popitem()[1])

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
                "sockets": self._sockets,
                "limits": self._limits._asdict(),
                "newcomers": self._newcomers,
                "first": self._started * NUMBERS,
                "unheard_seconds": self._unheard_seconds,
            }
            listening = [listener.fileno() for _, listener in self._listeners]
            try:
                self._process = await asyncio.to_thread(
                    subprocess.Popen,
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(settings), str(_ROOT)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *self._sockets.values(), *listening],
                )
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._started += 1
        self._unanswered = self._answered = 0
        self._authenticated.clear()

    async def _supervise(self) -> None:
        """Starts another process when one ends unexpectedly or hangs."""
        ends = 0  # in a row
        while True:
            beats = asyncio.create_task(self._beat())
            try:
                await self._listen()
            finally:
                beats.cancel()
            if self._stopping:
                return
            if self._writer is not None:
                self._writer.close()
            status = await asyncio.to_thread(_end, self._process) if self._process is not None else None
            words = _end_in_words(status, self._unheard_seconds) if self._process is not None else ""
            ends = 1 if self._answered >= STEADY_BEATS else ends + 1
            while True:
                pause = min(RESTART_SECONDS * 2 ** min(ends - 1, 8), LONGEST_RESTART_SECONDS)
                row = f"; it has failed {ends} times in a row" if ends > 1 else ""
                log.error("the front listener %s: it is started again in %.0f s%s", words, pause, row)
                await asyncio.sleep(pause)
                try:
                    await self._spawn()
                except OSError as error:
                    words, ends = f"cannot be started ({error})", ends + 1
                else:
                    break

    async def _listen(self) -> None:
        """Reads what the process says until it ends; it may be killed in the middle of a line."""
        if self._reader is None:
            return
        with contextlib.suppress(ConnectionError):
            while (line := await self._reader.readline()).endswith(b"\n"):
                said = json.loads(line)
                if "answer" in said:
                    self._unanswered, self._answered = 0, self._answered + 1
                else:  # the database may keep a report waiting, while the process goes on answering
                    report = asyncio.create_task(self._note(said["actor"], said["reason"], said["times"]))
                    self._reports.add(report)
                    report.add_done_callback(self._reports.discard)

    async def _note(self, actor: str, reason: str, times: int) -> None:
        await self._refused(actor, reason, times)

    async def _beat(self) -> None:
        """Asks the process again and again whether it runs, and kills it when it does not answer.

        Beats are counted, and not time: if the whole machine was suspended, or this process was, one beat has passed.
        """
        while self._unanswered < MOST_UNANSWERED:
            self._send(beat=True)
            self._unanswered += 1
            await asyncio.sleep(BEAT_SECONDS)
        if self._process is not None and self._writer is not None and not self._stopping:
            log.error(
                "the front listener does not answer%s: it is killed, and members connect again",
                _kernel_state(self._process.pid),
            )
            self._process.kill()
            self._writer.transport.abort()  # the process may be out of a signal's reach, waiting for a disk

    def _send(self, **command: object) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(command).encode() + b"\n")

    def _close_listeners(self) -> None:
        for _, listener in self._listeners:
            listener.close()
        self._listeners.clear()


class _Directory:
    """A directory of mode 0700 in which gRPC makes its sockets, and which is then removed.

    A process connects to a socket through the socket's descriptor, so the socket needs no path. Other processes have no
    descriptor and cannot connect. A program that cleans the directory for temporary files finds nothing to remove.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="fedpareto-"))
        self._descriptor = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def path(self, name: str) -> str:
        """The path of a socket in it, of few bytes wherever the directory is."""
        return f"/proc/self/fd/{self._descriptor}/{name}"

    def take_sockets(self) -> dict[str, int]:
        """The descriptors of its sockets, by name; removes the directory."""
        sockets = {
            name: os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=self._descriptor) for name in os.listdir(self._path)
        }
        self.remove()
        return sockets

    def remove(self) -> None:
        """Removes it; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            shutil.rmtree(self._path, ignore_errors=True)


def serves_tls12(bind: str, port: int, host: str) -> bool:
    """True if a handshake in TLS 1.2 succeeds with a server that asks for no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    address = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(bind, bind)  # noqa: S104 - read, not bound
    try:
        with (
            socket.create_connection((address, port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except OSError:  # an SSLError is one too
        return False


def host_of(peer: str) -> str:
    """The host of a peer by gRPC's name: "unix-abstract:9f2c/17@192.0.2.7", which the front listener has bound."""
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


def _end(process: "subprocess.Popen[bytes]") -> int | None:
    """The exit status of a process that is ending, which is killed if it takes long; None if it does not end."""
    for last in (False, True):
        try:
            return process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            if not last:
                process.kill()
    return None


def _end_in_words(status: int | None, unheard_seconds: float) -> str:
    if status is None:
        return "cannot be ended, and is given up"
    if status == UNHEARD:
        return f"ended, because this process gave no sign of life for {unheard_seconds:.0f} s"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}, and every connection ended with it"
    return f"ended with status {status}, and every connection with it"


def _kernel_state(pid: int) -> str:
    """What the kernel says about a process, such as " (State: T (stopped))"; "" if it says nothing."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return f" ({' '.join(line.split())})"
    return ""
