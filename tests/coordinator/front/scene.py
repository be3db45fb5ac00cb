"""A front listener with one port, real sockets, and in gRPC's place a server that echoes."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from coordinator.front.connection_limits import ConnectionLimits
from coordinator.front.listener import Front
from tests.running import SECONDS, wait_for

ROOM = ConnectionLimits(connections=64, unverified=32)


HELLO = b"\x16\x03\x01"  # how a TLS handshake begins


class Inner:
    """Behind the front: notes the names of the peers, and sends back what it receives."""

    def __init__(self, path: str) -> None:
        self.peers: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(128)
        self.reading = threading.Event()
        self.reading.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, name = self._listener.accept()
                self.peers.append(f"unix-abstract:{name[1:].decode()}")
                threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while self.reading.wait(SECONDS) and (data := connection.recv(1 << 16)):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


class Fronted:
    """A front with one port."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.refused: list[tuple[str, str, int]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.front = Front(limits, self._note)
        self.port = self.front.listen("127.0.0.1", 0, "members")
        self.inner = Inner(self.front.inner("members").removeprefix("unix:"))
        self.run(self.front.start())
        self._sockets: list[socket.socket] = []

    async def _note(self, actor: str, reason: str, times: int) -> None:
        self.refused.append((actor, reason, times))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SECONDS)

    def connect(self, source: str = "127.0.0.1", data: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS, source_address=(source, 0))
        self._sockets.append(made)
        made.sendall(data)
        return made

    def greeted(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection that has been through to the other side."""
        made = self.connect(source, HELLO)
        assert received(made, len(HELLO)) == HELLO
        return made

    async def hear(self, data: bytes) -> None:
        """The coordinator receives this from the process, as part of a line."""
        assert self.front._reader is not None
        self.front._reader.feed_data(data)

    def replace(self) -> None:
        """Kills the process, and waits for the next one."""
        first, started = self.process, self.front._started
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: self.front._started > started, "another process")
        self.run(asyncio.sleep(0))  # the loop has finished the start

    def replaced(self, first: int, connection: socket.socket) -> socket.socket:
        """A connection to the process that follows the first one, with which its connection has ended."""
        wait_for(lambda: ended(connection), "the connection to end")
        wait_for(lambda: self.process != first, "another process")
        return self.greeted()

    def pass_time(self, seconds: float) -> None:
        """Sets the clock of the coordinator's event loop forward, and lets the loop run."""
        passed = self._loop.time

        async def later() -> None:
            self._loop.time = lambda: passed() + seconds  # type: ignore[method-assign]
            await asyncio.sleep(0.1)

        self.run(later())

    def paused(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The pauses before each further start, which from now on take no time."""
        pauses: list[float] = []
        sleep = asyncio.sleep

        async def pause(seconds: float) -> None:
            if asyncio.current_task() is self.front._supervisor:
                pauses.append(seconds)
            else:
                await sleep(seconds)

        monkeypatch.setattr(asyncio, "sleep", pause)
        return pauses

    def verify(self, number: int, member: str) -> None:
        peer = next(peer for peer in self.inner.peers if f"/{number}@" in peer)
        self._loop.call_soon_threadsafe(self.front.verified, peer, member)

    @property
    def process(self) -> int:
        assert self.front._process is not None
        return self.front._process.pid

    def close(self) -> None:
        for made in self._sockets:
            made.close()
        self.run(self.front.stop_accepting())
        self.run(self.front.stop())
        self.inner.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


def received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(1 << 16)):
        data += more
    return data


def ended(connection: socket.socket) -> bool:
    """Whether the other side has closed or reset the connection; what it said is thrown away."""
    connection.settimeout(0.05)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
