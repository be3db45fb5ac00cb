"""A line between a process and a server that a test cuts, or on which nothing arrives for a while."""

import socket
import threading
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
        except OSError:
            near.close()
            far.close()
            return
        with self._lock:
            self._ends |= {near, far}
        back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
        back.start()
        self._pump(near, far)
        back.join()
        with self._lock:
            self._ends -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
