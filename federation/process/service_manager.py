"""The service manager of this process, such as systemd: it hears that the process serves, and that it lives.

The messages are those of sd_notify(3): lines, in a datagram to the Unix socket that NOTIFY_SOCKET names.
"""

import asyncio
import faulthandler
import logging
import math
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import Self

log = logging.getLogger(__name__)
SEND_SECONDS = 1.0  # for a service manager that is busy


class ServiceManager:
    """Takes the messages of one process.

    Args:
        address: the path of its socket, or "@" and an abstract name; empty if there is no service manager.
        watchdog_seconds: it ends the process that has not called `feed` for so long; infinite if it never does.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        address: str = "",
        watchdog_seconds: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._feed_seconds = watchdog_seconds / 3  # one that is lost, or late, does no harm
        self._clock = clock
        self._due = -math.inf

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Self:
        """The service manager of this process. Its variables are removed: they do not concern the child processes.

        A hang that the watchdog ends (SIGABRT) then writes to standard error where each thread was.
        """
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        if not (address and watched and microseconds.isdecimal() and int(microseconds)):
            return cls(address)
        if not faulthandler.is_enabled():
            faulthandler.enable()
        return cls(address, int(microseconds) / 1e6)

    def ready(self) -> None:
        """The process serves."""
        self._tell("READY=1")

    def stopping(self) -> None:
        """The process ends."""
        self._tell("STOPPING=1")

    def feed(self) -> None:
        """The process lives; to be called every second or so. A message is sent when it is due."""
        if math.isfinite(self._feed_seconds) and self._clock() >= self._due:
            self._due = self._clock() + self._feed_seconds
            self._tell("WATCHDOG=1")

    def feed_from(self, loop: asyncio.AbstractEventLoop) -> None:
        """The process lives as long as this event loop runs; to be called on the loop."""
        if math.isfinite(self._feed_seconds):
            self._tell("WATCHDOG=1")
            loop.call_later(self._feed_seconds, self.feed_from, loop)

    def _tell(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.settimeout(SEND_SECONDS)
                end.sendto(message.encode(), address)
        except OSError as error:  # what works does not end because nobody listens
            log.warning("cannot send %s to the service manager at %s: %s", message, self._address, error)
