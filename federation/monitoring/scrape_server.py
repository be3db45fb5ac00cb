"""The server of `/metrics`: a thread and an event loop of its own, so that no scrape waits for anything else.

It is small on purpose: one request for each connection, GET or HEAD, and nothing but this page. It bounds what a
scraper can take: the bytes of a request, the time of a connection, the number of connections, and how often the page is
made. A page in memory serves every scrape until it is `PAGE_SECONDS` old.
"""

import asyncio
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from typing import Self

from federation.monitoring.metrics_page import content_type

log = logging.getLogger(__name__)

PATH = "/metrics"
MOST_CONNECTIONS = 16  # a further one ends the oldest
MOST_BYTES = 8 << 10  # of a request
CONNECTION_SECONDS = 10.0  # from its beginning to its end
PAGE_SECONDS = 2.0
START_SECONDS = 10.0  # more than any start takes


class ScrapeServer:
    """Serves a page.

    Args:
        listener: the socket, which `stop` closes.
        token: that a scrape must send; None if it needs none.
        page: makes the page; it may neither wait nor take a lock of the work.
    """

    def __init__(self, listener: socket.socket, token: bytes | None, page: Callable[[], bytes]) -> None:
        self._listener = listener
        self._token = token
        self._page = page
        self._type = content_type()
        self._made = (-PAGE_SECONDS, b"")
        self._open: dict[asyncio.WriteTransport, None] = {}  # the connections, the oldest first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="metrics", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Serves in a thread."""
        self._thread.start()
        serving = asyncio.start_server(self._serve, sock=self._listener, limit=MOST_BYTES)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(START_SECONDS)
        host, port = self._listener.getsockname()[:2]
        log.info("metrics at http://%s:%d%s", f"[{host}]" if ":" in host else host, port, PATH)

    def stop(self) -> None:
        """Ends the connections and the thread, and closes the socket."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()
        self._listener.close()

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        for transport in [*self._open]:
            transport.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        if len(self._open) >= MOST_CONNECTIONS:
            next(iter(self._open)).abort()
        self._open[transport] = None
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except asyncio.LimitOverrunError:
            writer.write(_answer(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a scraper that is slow, has left, or makes room for another one
        except Exception:
            log.exception("a scrape of /metrics failed")
        finally:
            self._open.pop(transport, None)
            transport.abort()

    def _answer(self, head: bytes) -> bytes:
        line, *rest = head.decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        path = target.partition(" ")[0].partition("?")[0]
        fields = dict(_field(text) for text in rest if ":" in text)
        if method not in ("GET", "HEAD"):
            return _answer(HTTPStatus.METHOD_NOT_ALLOWED, fields={"Allow": "GET, HEAD"})
        if self._token is None:
            # Without a token, a page of another site must not be read through a name that leads to loopback.
            if not _is_own(fields.get("host", "")):
                return _answer(HTTPStatus.MISDIRECTED_REQUEST, b"name this machine by its address, or localhost\n")
        elif not hmac.compare_digest(fields.get("authorization", "").encode("latin-1"), b"Bearer " + self._token):
            return _answer(HTTPStatus.UNAUTHORIZED, b"send the token\n", fields={"WWW-Authenticate": "Bearer"})
        if path != PATH:
            return _answer(HTTPStatus.NOT_FOUND, f"the metrics are at {PATH}\n".encode())
        return _answer(HTTPStatus.OK, self._current(), whole=method == "GET", fields={"Content-Type": self._type})

    def _current(self) -> bytes:
        at, made = self._made
        if time.monotonic() - at >= PAGE_SECONDS:
            made = self._page()
            self._made = time.monotonic(), made
        return made


def _answer(
    status: HTTPStatus, body: bytes = b"", *, whole: bool = True, fields: dict[str, str] | None = None
) -> bytes:
    lines = {
        "Content-Type": "text/plain; charset=utf-8",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **(fields or {}),
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{head}\r\n".encode() + (body if whole else b"")


def _field(text: str) -> tuple[str, str]:
    name, _, value = text.partition(":")
    return name.strip().lower(), value.strip()


def _is_own(host: str) -> bool:
    """True if a Host field names an address, or localhost."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() and not host.endswith("]") else host
    if name.lower() == "localhost":
        return True
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
