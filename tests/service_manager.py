"""A service manager as systemd is one: a Unix socket that takes the messages of a process."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WATCHDOG_SECONDS = 0.03  # a message is due after a third of it
SECONDS = 60.0  # for a message that must come


class Listener:
    """Takes the messages of a process, at an address."""

    def __init__(self, address: str, end: socket.socket) -> None:
        self.address = address
        self._end = end
        self._heard = queue.SimpleQueue[str]()

    def listen(self) -> None:
        """Takes messages until an empty one."""
        while message := self._end.recv(1000).decode():
            self._heard.put(message)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the process."""
        return {"NOTIFY_SOCKET": self.address, "WATCHDOG_USEC": str(round(WATCHDOG_SECONDS * 1e6))}

    def next(self) -> str:
        """The next message."""
        return self._heard.get(timeout=SECONDS)

    def drain(self) -> list[str]:
        """The messages that have come."""
        return [self._heard.get() for _ in range(self._heard.qsize())]

    def until(self, message: str) -> set[str]:
        """Waits for a message; returns those that came before it."""
        before, ends = set[str](), time.monotonic() + SECONDS
        while (heard := self.next()) != message:
            before.add(heard)
            assert time.monotonic() < ends, f"no {message}, only {before}"
        return before

    def falls_silent(self) -> bool:
        """Whether for the time in which ten messages are due none comes, after at most twenty."""
        try:
            for _ in range(20):
                self._heard.get(timeout=10 * WATCHDOG_SECONDS / 3)
        except queue.Empty:
            return True
        return False


@contextmanager
def listening(address: Path | str) -> Iterator[Listener]:
    """A service manager at the path of a socket, or at "@" and an abstract name."""
    bound = str(address)
    bound = "\0" + bound[1:] if bound.startswith("@") else bound
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(bound)
        listener = Listener(str(address), end)
        thread = threading.Thread(target=listener.listen, daemon=True)
        thread.start()
        yield listener
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", bound)
        thread.join(SECONDS)
