"""A line between a process and a server that a test cuts, or on which nothing arrives for a while.

A single connection can break in the middle of a question and its answer, so that the client does not know its outcome.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Line:
    """Forwards TCP connections from a port of its own to a server.

    Args:
        target: the server: a port of this machine, or the path of a Unix socket.
    """

    def __init__(self, target: int | Path) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._breaks: dict[int, threading.Event | None] = {}  # by the client's port
        self._passes = threading.Event()
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Breaks the connections; new ones can be made. Returns how many there were."""
        with self._lock:
            ends, self._ends = self._ends, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        return len(ends) // 2

    def hold(self) -> None:
        """From now on nothing arrives on either side, and nobody is told."""
        self._passes.clear()

    def release(self) -> None:
        """What was held arrives, in its order."""
        self._passes.set()

    def break_answer(self, port: int) -> None:
        """Breaks the connection of the client with this port when the next answer comes, which it does not get."""
        self._breaks[port] = None

    def break_question(self, port: int, arrives: threading.Event) -> None:
        """Breaks the connection of the client with this port when it sends the next question.

        The server gets the question when `arrives` is set, and then the end of the connection.
        """
        self._breaks[port] = arrives

    def close(self) -> None:
        """Ends it."""
        self.release()
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._passes.wait()
        kind = socket.AF_UNIX if isinstance(self._target, Path) else socket.AF_INET
        far = socket.socket(kind)
        address = str(self._target) if isinstance(self._target, Path) else ("127.0.0.1", self._target)
        try:
            far.connect(address)
            port = near.getpeername()[1]
        except OSError:
            near.close()
            far.close()
            return
        with self._lock:
            self._ends |= {near, far}
        back = threading.Thread(target=self._pump, args=(far, near, lambda _: self._answered(port)), daemon=True)
        back.start()
        self._pump(near, far, lambda end: self._asked(port, end))
        back.join()
        self._breaks.pop(port, None)
        with self._lock:
            self._ends -= {near, far}
        near.close()
        far.close()

    def _asked(self, port: int, near: socket.socket) -> bool:
        if (arrives := self._breaks.get(port)) is not None:
            near.shutdown(socket.SHUT_RDWR)
            arrives.wait()
        return True

    def _answered(self, port: int) -> bool:
        return port not in self._breaks or self._breaks[port] is not None

    def _pump(self, source: socket.socket, sink: socket.socket, passes: Callable[[socket.socket], bool]) -> None:
        """Forwards what comes, as long as `passes` says so of the source."""
        with suppress(OSError):
            while (data := source.recv(1 << 16)) and passes(source):
                self._passes.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
