"""The process of the front listener. It has no keys, no database, and descriptors of its own.

The coordinator starts it, hands it the listening sockets and one end of a control connection, and reads and writes
lines of JSON there:

- to this process: `{"verified": CONNECTION, "member": URI}`, `{"stop": true}`, and every second `{"beat": true}`; the
  process ends with the stream, or after a minute without a beat;
- from this process: to each beat `{"answer": true}`; and at most once a minute the refused connections,
  `{"actor": NETWORK_OR_MEMBER, "reason": REASON, "times": COUNT}`.

A connection goes through these states: it waits for its first byte; it is forwarded, unverified; it is verified, or
lasts as long as an enrollment may; it is closing. Only those that sent the beginning of a TLS handshake reach gRPC. On
a port for both services, the first message of the handshake names the service.
"""

import contextlib
import ctypes
import errno
import ipaddress
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from typing import Any

from coordinator.front.connection_limits import ConnectionLimits
from coordinator.front.flow import Flow, Holds
from coordinator.front.places import Places, network_of
from coordinator.front.server_name import MOST_BYTES, server_name

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
TLS_HANDSHAKE = b"\x16"
ACCEPTS_AT_A_TIME = 64
TICK_SECONDS = 0.5
REPORT_SECONDS = 60.0
REPORTED_ACTORS = 50  # in one report, those with the most refusals
UNHEARD = 3  # the exit status when no beat has come for too long
FLUSH_SECONDS = 1.0  # for gRPC's last bytes, when the coordinator ends
_PR_SET_PDEATHSIG = 1
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection:
    """A connection of the public side, and of the inner side as soon as its first byte has come.

    It is no dataclass: that import takes a third of the start of this process.
    """

    def __init__(self, number: int, public: socket.socket, host: str, service: str, now: float) -> None:
        self.number, self.public, self.host, self.service = number, public, host, service
        self.opened = self.heard = now
        self.inner: socket.socket | None = None
        self.up: Flow | None = None  # to gRPC
        self.down: Flow | None = None  # from gRPC
        self.closing: float | None = None  # the time at which it began to close
        self.seen = 0  # bytes of a handshake that has not named its service yet


class Forwarder:
    """Accepts and forwards, in one thread.

    Args:
        listeners: the listening sockets, each with its service, "members" or "newcomers", or with "both".
        control: the connection to the coordinator.
        sockets: the descriptors of the sockets on which gRPC listens, one for each service.
        limits: on connections.
        newcomers: the name of the server that newcomers ask for on a port for both services, in lower case.
        first: the number before that of the first connection.
        unheard_seconds: without a beat, after which the process ends.
    """

    def __init__(
        self,
        listeners: list[tuple[str, socket.socket]],
        control: socket.socket,
        sockets: dict[str, int],
        limits: ConnectionLimits,
        newcomers: str,
        first: int = 0,
        unheard_seconds: float = math.inf,
    ) -> None:
        self._listeners = listeners
        self._control = control
        self._sockets = sockets
        self._limits = limits
        self._newcomers = newcomers
        self._selector = selectors.DefaultSelector()
        self._holds = Holds()
        self._connections: dict[int, Connection] = {}
        self._unverified: Places[int] = Places(limits.unverified_per_address, limits.unverified)
        self._verified: Places[int] = Places(limits.per_member, limits.connections)
        self._count = first
        self._unheard_seconds = unheard_seconds
        self._accepting = False
        self._commands = bytearray()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._out = bytearray()  # to the coordinator
        self._unheard = 0  # ticks since the last beat
        self._next_report = 0.0
        self._ends: float | None = None

    def run(self) -> bool:
        """Serves until the coordinator closes the control connection; returns False if it fell silent instead."""
        self._control.setblocking(False)
        self._selector.register(self._control, READ, None)
        for _, listener in self._listeners:
            listener.setblocking(False)
        self._accept_again()
        next_tick = time.monotonic() + TICK_SECONDS
        while self._ends is None or (self._connections and time.monotonic() < self._ends):
            for key, mask in self._selector.select(max(0.0, next_tick - time.monotonic())):
                if key.data is None:
                    self._read_commands()
                elif isinstance(key.data, str):
                    self._accept(key.data, key.fileobj)  # type: ignore[arg-type]
                elif key.data.number in self._connections:  # or an earlier event has closed it
                    self._serve(key.data, key.fileobj is key.data.public, mask)
            if time.monotonic() >= next_tick:
                self._tick(time.monotonic())
                next_tick = time.monotonic() + TICK_SECONDS
                if self._unheard * TICK_SECONDS > self._unheard_seconds:
                    return False
        return True

    # New connections

    def _accept(self, service: str, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_A_TIME):
            try:
                public, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._make_room()
                    return
                continue  # it was gone before it was accepted
            now, host = time.monotonic(), _host(str(peer[0]))
            group = network_of(host)
            if len(self._connections) >= self._limits.connections and not self._end_oldest():
                self._refused[group, "limit:connections"] += 1
                public.close()
                continue
            public.setblocking(False)
            with contextlib.suppress(OSError):
                public.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._count += 1
            connection = Connection(self._count, public, host, service, now)
            self._connections[connection.number] = connection
            self._selector.register(public, READ, connection)
            loser = self._unverified.add(connection.number, group)
            if loser is not None:
                self._refuse(loser, "limit:connections")

    def _end_oldest(self) -> bool:
        """Ends the oldest unverified connection of the largest group; returns False if there is none."""
        loser = self._unverified.oldest_of_largest()
        if loser is not None:
            self._refuse(loser, "limit:connections")
        return loser is not None

    def _make_room(self) -> None:
        """Ends an unverified connection for its descriptors; nothing is accepted until the next tick."""
        self._end_oldest()
        self._pause_accepting()

    def _pause_accepting(self) -> None:
        for _, listener in self._listeners if self._accepting else ():
            self._selector.unregister(listener)
        self._accepting = False

    def _accept_again(self) -> None:
        for service, listener in self._listeners:
            self._selector.register(listener, READ, service)
        self._accepting = True

    def _stop_accepting(self) -> None:
        self._pause_accepting()
        for _, listener in self._listeners:
            listener.close()
        self._listeners = []

    # Connections

    def _serve(self, connection: Connection, public: bool, mask: int) -> None:
        try:
            if connection.up is None or connection.down is None:
                self._begin(connection)
                return
            if public:
                connection.heard = time.monotonic()
            incoming, outgoing = (connection.up, connection.down) if public else (connection.down, connection.up)
            if mask & READ:
                incoming.move()
            if mask & WRITE:
                outgoing.move()
            self._watch(connection)
        except OSError:
            self._close(connection, broken=True)

    def _begin(self, connection: Connection) -> None:
        """Connects to gRPC, if the first byte can be the beginning of a TLS handshake.

        The socket is bound to a name with the connection's number and the host: access control reads both there. The
        name is abstract, so it is in no directory, and random, so that no other user of the machine can take it first.
        """
        seen = connection.public.recv(MOST_BYTES, socket.MSG_PEEK)
        if seen[:1] != TLS_HANDSHAKE:
            self._close(connection)
            return
        if connection.service == "both" and not self._decide(connection, seen):
            return
        connection.inner = inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.setblocking(False)
        inner.bind(f"\0{os.urandom(8).hex()}/{connection.number}@{connection.host}")
        inner.connect(f"/proc/self/fd/{self._sockets[connection.service]}")
        connection.up = Flow(connection.public, inner, self._holds)
        connection.down = Flow(inner, connection.public, self._holds)
        self._selector.register(inner, READ, connection)
        connection.up.move()
        self._watch(connection)

    def _decide(self, connection: Connection, seen: bytes) -> bool:
        """Finds the service of a connection; returns False if too few bytes were `seen` to know it.

        A wrong name gives no rights: members must show a certificate, and newcomers may only enroll.
        """
        name = server_name(seen)
        if name is None and len(seen) <= connection.seen:  # it is readable, and there is no more to read
            self._close(connection)
            return False
        connection.seen = len(seen)
        # The selector reports the socket again when more bytes than `seen` have arrived.
        low = 1 if name is not None else len(seen) + 1
        connection.public.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
        if name is not None:
            connection.service = "newcomers" if name == self._newcomers else "members"
        return name is not None

    def _watch(self, connection: Connection) -> None:
        """Registers for the events that can move bytes; closes the connection when both directions have finished."""
        up, down = connection.up, connection.down
        if up is None or down is None or connection.inner is None:
            return
        if up.finished and down.finished:
            self._close(connection)
            return
        if connection.closing is None and (up.ended or down.ended):
            connection.closing = time.monotonic()
        self._register(connection.public, up, down, connection)
        self._register(connection.inner, down, up, connection)

    def _register(self, end: socket.socket, incoming: Flow, outgoing: Flow, connection: Connection) -> None:
        events = (0 if incoming.waiting or incoming.ended else READ) | (WRITE if outgoing.waiting else 0)
        registered = self._selector.get_map().get(end)
        if registered is None:
            if events:
                self._selector.register(end, events, connection)
        elif not events:
            self._selector.unregister(end)
        elif events != registered.events:
            self._selector.modify(end, events, connection)

    def _refuse(self, number: int, reason: str) -> None:
        connection = self._connections[number]
        self._refused[network_of(connection.host), reason] += 1
        self._close(connection, broken=True)

    def _close(self, connection: Connection, *, broken: bool = False) -> None:
        """Releases everything of a connection; a broken one is reset, so that the peer does not see a regular end."""
        del self._connections[connection.number]
        self._unverified.remove(connection.number)
        self._verified.remove(connection.number)
        for flow in (connection.up, connection.down):
            if flow is not None:
                flow.close()
        for end in (connection.public, connection.inner):
            if end is None:
                continue
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            if broken and end is connection.public:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.close()

    def _tick(self, now: float) -> None:
        """Ends connections that have taken too long, and reports the refused ones to the coordinator."""
        if not self._accepting and self._listeners:
            self._accept_again()
        limits = self._limits
        for number in list(self._unverified):
            connection = self._connections[number]
            newcomer = connection.service == "newcomers"
            longest = limits.newcomer_seconds if newcomer else limits.verified_seconds
            if (
                now - connection.opened > longest
                or now - connection.heard > limits.idle_seconds
                or (connection.inner is None and now - connection.opened > limits.first_byte_seconds)
            ):
                self._refuse(number, "limit:idle")
        for connection in list(self._connections.values()):
            if connection.closing is not None and now - connection.closing > limits.closing_seconds:
                self._close(connection, broken=True)
        self._unheard += 1  # counted, since time also passes while the machine or this process is suspended
        self._report(now)

    # The coordinator

    def _read_commands(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._stop_accepting()
            self._selector.unregister(self._control)
            self._ends = time.monotonic() + FLUSH_SECONDS
            return
        self._commands += data
        *lines, rest = self._commands.split(b"\n")
        self._commands = bytearray(rest)
        for line in lines:
            command: dict[str, Any] = json.loads(line)
            if "verified" in command:
                self._verify(command["verified"], command["member"])
            elif "beat" in command:
                self._unheard = 0
                self._answer()
            else:
                self._stop_accepting()

    def _verify(self, number: int, member: str) -> None:
        if number in self._unverified:
            self._unverified.remove(number)
            loser = self._verified.add(number, member)
            if loser is not None:
                self._refused[member, "limit:connections"] += 1
                self._close(self._connections[loser], broken=True)

    def _report(self, now: float) -> None:
        if self._refused and not self._out and now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            for (actor, reason), times in self._refused.most_common(REPORTED_ACTORS):
                self._out += json.dumps({"actor": actor, "reason": reason, "times": times}).encode() + b"\n"
            self._refused.clear()
        self._send()

    def _answer(self) -> None:
        self._out += b'{"answer": true}\n'
        self._send()

    def _send(self) -> None:
        if self._out and self._ends is None:
            with contextlib.suppress(OSError):
                del self._out[: self._control.send(self._out)]


def _host(address: str) -> str:
    """The address as text, without a zone; IPv4 as IPv4 also where it comes through an IPv6 socket."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _die_with_coordinator() -> None:
    """Lets the kernel kill this process when the coordinator ends, also while it is stopped and reads nothing."""
    with contextlib.suppress(OSError, AttributeError):  # another system: the end of the stream must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Runs the process, as `coordinator.front.listener` starts it."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the coordinator says when to end, also to a whole process group
        signal.signal(number, signal.SIG_IGN)
    _die_with_coordinator()
    settings = json.loads(sys.argv[1])
    listeners = [(service, socket.socket(fileno=descriptor)) for service, descriptor in settings["listeners"]]
    control = socket.socket(fileno=settings["control"])
    limits, newcomers = ConnectionLimits(**settings["limits"]), settings["newcomers"]
    first, unheard = settings["first"], settings["unheard_seconds"]
    if not Forwarder(listeners, control, settings["sockets"], limits, newcomers, first, unheard).run():
        sys.exit(UNHEARD)
