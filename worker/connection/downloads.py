"""Downloads from a bucket, by a URL that the coordinator gives.

A coordinator that was taken over may give any URL. So the owner lists the hosts (`downloads_from` in policy.toml), and
a request has no credentials, no cookies, and no body; a redirect is a fault. Who calls compares the digest.
"""

import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from federation.transport.proxies import Proxy, ProxyChoice, RouteError, dial, is_loopback

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 30.0  # without a byte, until a download has failed
LOOK_SECONDS = 0.25  # how often a look says whether a download is still wanted
PIECE = 256 << 10  # bytes
LEAST_BYTES = 1 << 20  # a smaller rest of a blob comes from the coordinator
MAX_URL = 8192  # characters
_URL = re.compile(r"(https?)://([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?(/[!\"$-~]*)")
_PORTS = {"https": 443, "http": 80}


class DownloadFailed(Exception):
    """The bucket did not give the bytes; the message says why, without the URL, which is a secret."""


@dataclass(frozen=True)
class BlobUrl:
    """A URL that may be fetched.

    Attributes:
        encrypted: https; http is for this machine itself alone.
        host: in lower case.
        authority: as the URL has it; the bucket's signature covers it.
        target: path and query.
    """

    encrypted: bool
    host: str
    port: int
    authority: str
    target: str

    @classmethod
    def parse(cls, text: str, allowed: Collection[str]) -> Self:
        """Reads a URL; `allowed` are the addresses "host:port" to which a request may be sent.

        Raises:
            DownloadFailed: not such a URL.
        """
        match = _URL.fullmatch(text) if len(text) <= MAX_URL else None
        if match is None:
            raise DownloadFailed("the coordinator gave a text that is no https URL")
        scheme, name, port, target = match.groups()
        host = name.lower()
        number = int(port or _PORTS[scheme])
        if f"{host}:{number}" not in allowed:
            raise DownloadFailed(f"the URL is of {host}:{number}, which downloads_from in policy.toml does not name")
        if scheme == "http" and not is_loopback(host):
            raise DownloadFailed(f"the URL of {host}:{number} is http, and only https is allowed")
        return cls(scheme == "https", host, number, name if port is None else f"{name}:{port}", target)

    @property
    def address(self) -> str:
        """The address "host:port"."""
        return f"{self.host}:{self.port}"


def download(
    url: BlobUrl, *, offset: int, size: int, proxy: ProxyChoice, seconds: float, stopped: Callable[[], bool]
) -> Iterator[bytes]:
    """The bytes of a blob of `size` bytes, from `offset` on; nothing but exactly these.

    `proxy` chooses the proxy to the bucket; all may take so many `seconds`; `stopped` ends the download soon after it
    has become true.

    Raises:
        DownloadFailed: no connection, another answer than these bytes, or too slow.
    """
    address, end = url.address, time.monotonic() + seconds
    try:
        with _connected(url, proxy(address)) as line, _watched(line, end, stopped):
            if isinstance(line, ssl.SSLSocket):
                line.do_handshake()
            response = _asked(line, url, offset, size)
            left = size - offset
            while left:
                piece = response.read1(min(left, PIECE))
                if not piece:
                    raise ConnectionError(f"the answer ended {left} bytes before its end")
                left -= len(piece)
                yield piece
    except (OSError, RouteError, http.client.HTTPException, ValueError) as error:
        late = time.monotonic() > end
        problem = f"the download took longer than {seconds:.0f} s" if late else error
        raise DownloadFailed(f"{address}: {problem}") from error


def handshake(address: str, proxy: Proxy | None) -> str:
    """Makes the TLS handshake of a download with the bucket at "host:port"; sends no request.

    Returns:
        The version of TLS, such as "TLSv1.3".

    Raises:
        RouteError: no connection.
        OSError, ValueError: no TLS; an SSLCertVerificationError if the certificate is not accepted.
    """
    context, host = ssl.create_default_context(), address.rpartition(":")[0]
    with (
        dial(address, proxy, CONNECT_SECONDS, "bucket") as plain,
        context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False) as line,
    ):
        line.settimeout(SILENCE_SECONDS)
        line.do_handshake()
        return line.version() or ""


def _asked(line: socket.socket, url: BlobUrl, offset: int, size: int) -> http.client.HTTPResponse:
    """The answer with the bytes from `offset` to the end, before its body."""
    connection = http.client.HTTPConnection(url.host, url.port)
    connection.sock = line
    connection.auto_open = 0
    wanted = f"{offset}-{size - 1}"
    connection.request("GET", url.target, headers={"Host": url.authority, "Range": f"bytes={wanted}"})
    response = connection.getresponse()
    if 300 <= response.status < 400:
        raise DownloadFailed(f"{url.address} answered {response.status}: a redirect is not followed")
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        raise DownloadFailed(f"{url.address} answered {response.status} {response.reason}")
    given = response.getheader("Content-Range", "nothing")
    if given != f"bytes {wanted}/{size}" or response.length != size - offset:
        raise DownloadFailed(f"{url.address} has {given}, not bytes {wanted}/{size}")
    return response


@contextmanager
def _connected(url: BlobUrl, proxy: Proxy | None) -> Iterator[socket.socket]:
    """A connection to the bucket; with https, its handshake is not made yet."""
    line = dial(url.address, proxy, CONNECT_SECONDS, "bucket")
    try:
        line.settimeout(SILENCE_SECONDS)
        if url.encrypted:
            context = ssl.create_default_context()
            line = context.wrap_socket(line, server_hostname=url.host, do_handshake_on_connect=False)
        yield line
    finally:
        line.close()


@contextmanager
def _watched(line: socket.socket, end: float, stopped: Callable[[], bool]) -> Iterator[None]:
    """Ends the connection from another thread at the monotonic time `end`, or once it is not wanted any more."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            if stopped() or time.monotonic() > end:
                with suppress(OSError):
                    socket.socket.shutdown(line, socket.SHUT_RDWR)  # of TLS, too, without its own state
                return

    watcher = threading.Thread(target=watch, name="download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
