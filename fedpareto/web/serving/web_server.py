"""The server of the pages: a port of this machine's own, the address with the one-time key, and the browser."""

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

import uvicorn

from fedpareto.web.serving import DEFAULT_PORT
from fedpareto.web.serving.security import ENTER, KEY_SECONDS, App, EntranceKeys, check_loopback

_GRACE_SECONDS = 1
_LARGEST_HEADER = 16 << 10


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens on a loopback address; `port` is None for the usual one, or else any free one.

    Raises:
        ValueError: the address is not this machine's own.
        OSError: the port is taken, or the address does not exist.
    """
    check_loopback(host, port or DEFAULT_PORT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host.strip("[]"), DEFAULT_PORT if port is None else port))
        except OSError:
            if port is not None:
                raise
            listening.bind((host.strip("[]"), 0))
        listening.listen(128)
        stack.pop_all()
        return listening


def address(listening: socket.socket) -> str:
    """The address of the pages, without a key."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def entrance(base: str, keys: EntranceKeys, to: str) -> str:
    """An address whose key works once, and leads to the page `to`."""
    return f"{base}{keys.root}{ENTER}?key={keys.new_key()}&to={quote(to, safe='/')}"


@contextlib.contextmanager
def browsing(url: str, browse: Callable[[str], object] = webbrowser.open) -> Iterator[None]:
    """Opens a browser at an address with a key: by a file that only this user can read, so that no process shows it.

    The file is removed after the key's minute, or at the end.
    """
    with tempfile.TemporaryDirectory(prefix="fedpareto-console-") as directory:  # of mode 0700
        path = Path(directory) / "open.html"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(
                f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fedpareto console</title>'
                f'<meta http-equiv="refresh" content="0;url={escape(url)}"></head>'
                f'<body><p><a href="{escape(url)}">Open the console</a></p></body></html>'
            )
        remove = threading.Timer(KEY_SECONDS, lambda: path.unlink(missing_ok=True))
        remove.daemon = True
        remove.start()
        browse(path.as_uri())
        try:
            yield
        finally:
            remove.cancel()


class _Server(uvicorn.Server):
    """A server that ends its streams before it waits for the other answers."""

    def __init__(self, settings: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(settings)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the streams, then the server."""
        self._stopping()
        await super().shutdown(sockets)


def server_of(app: App, stopping: Callable[[], None]) -> uvicorn.Server:
    """The server of the pages, which a signal ends (SIGINT, SIGTERM); `stopping` ends the streams of events."""
    settings = uvicorn.Config(
        app,
        lifespan="off",
        interface="asgi3",
        http="h11",
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,  # a line of it would hold the key
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_LARGEST_HEADER,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        timeout_keep_alive=30,
    )
    return _Server(settings, stopping)


def run(app: App, listening: socket.socket, stopping: Callable[[], None]) -> None:
    """Serves the pages on an event loop of its own until a signal."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server_of(app, stopping).serve(sockets=[listening]))
