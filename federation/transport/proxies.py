"""Connections to the coordinator or a bucket: direct, or through a proxy that takes HTTP CONNECT (RFC 9110, 9.3.6)."""

import base64
import contextlib
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Self, TypeAlias
from urllib.parse import quote, unquote, urlsplit

from federation.errors import Error

DIRECT = "direct"  # in place of a proxy's URL: no proxy
_FORM = "expected http://HOST:PORT or http://USER:PASSWORD@HOST:PORT"
_PROXY_VARIABLES = ("https_proxy", "HTTPS_PROXY")
# gRPC itself reads the first and the last. A host in any of them is reached directly, by gRPC and by us.
_EXEMPTION_VARIABLES = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:]+):(\d{1,5})")
_MAX_ANSWER_BYTES = 64 << 10
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_OFFERED = re.compile(rb"^proxy-authenticate:\s*([a-z-]+)", re.IGNORECASE | re.MULTILINE)


class ProxyError(Error, ValueError):
    """The URL of a proxy cannot be used. The message does not repeat it, since it may hold a password."""


class RouteError(Error):
    """No connection to the coordinator; the message names the hop that failed and the remedy."""


@dataclass(frozen=True)
class Proxy:
    """A proxy that takes HTTP CONNECT; `credentials` are "user:password". Its text is its URL without them."""

    host: str
    port: int
    credentials: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Reads a URL, or HOST:PORT; user and password may be percent-encoded, the port is 80 unless it is given.

        Raises:
            ProxyError: it is not the URL of such a proxy; the message names the source.
        """
        url = text.strip() if "://" in text else f"http://{text.strip()}"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ProxyError(f"{source} is not the URL of a proxy: {_FORM}") from None
        if parts.scheme.lower() != "http":
            raise ProxyError(
                f"{source} begins with {parts.scheme}://: {_FORM}; the connection to the proxy is not encrypted, what "
                "passes through it is"
            )
        if not host or set(host) & set("[]") or parts.path.strip("/") or parts.query or parts.fragment:
            raise ProxyError(f"{source} is not the URL of a proxy: {_FORM}")
        credentials = None
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            if not credentials.isprintable():
                raise ProxyError(f"{source}: user and password hold a character that cannot be printed")
        return cls(host, 80 if port is None else port, credentials)

    @property
    def url(self) -> str:
        """The URL with the credentials, for gRPC; never for people."""
        if self.credentials is None:
            return str(self)
        user, _, password = self.credentials.partition(":")
        return f"http://{quote(user, safe='')}:{quote(password, safe='')}@{self._address}"

    @property
    def _address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self._address}"

    def refusal(
        self, status: int, address: str = "the coordinator", offered: str = "", peer: str = "coordinator"
    ) -> str:
        """Explains an answer to CONNECT other than 2xx, with the remedy; `offered` are schemes of authentication."""
        answer = f"the proxy {self} answered {status}"
        if status == 407 and offered and "basic" not in offered.lower():
            return (
                f"{answer}: it asks for {offered}, and only Basic is supported: ask the network department for a rule "
                f"that lets this machine reach {address} without it, or for a proxy that takes Basic"
            )
        if status == 407 and self.credentials is None:
            return f"{answer}: it asks for user and password: give them in the URL, http://USER:PASSWORD@HOST:PORT"
        if status == 407:
            return f"{answer}: it does not accept the user and password that its URL gives: correct them"
        if status >= 500:
            return (
                f"{answer}: it cannot reach {address}. The {peer} is not running, or its name or a firewall "
                "behind the proxy is in the way: ask the network department"
            )
        return (
            f"{answer}: it does not allow a connection to {address}: ask the network department to allow CONNECT to it"
        )


ProxyChoice: TypeAlias = Callable[[str], Proxy | None]  # the proxy to the coordinator at "host:port"


def no_proxy(address: str) -> Proxy | None:
    """A direct connection to every coordinator."""
    return None


def choose_proxy(address: str, given: str | None, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy to the coordinator at "host:port"; None for a direct connection.

    `given` is the option of the command: a URL, or "direct"; without it, `https_proxy` of the environment counts,
    except for this machine itself. A coordinator that `no_proxy` names is always reached directly:
    the end of its name, the network of its address ("10.0.0.0/8"), or "*".

    Raises:
        ProxyError: the URL cannot be used.
    """
    host = address.rpartition(":")[0].strip("[]").lower()
    if given == DIRECT or any(_exempt(host, environment.get(name, "")) for name in _EXEMPTION_VARIABLES):
        return None
    if given is not None:
        return Proxy.parse(given, "--proxy")
    name = next((name for name in _PROXY_VARIABLES if environment.get(name, "").strip()), None)
    return None if name is None or is_loopback(host) else Proxy.parse(environment[name], name)


def _exempt(host: str, names: str) -> bool:
    for entry in filter(None, (name.strip().lower() for name in names.split(","))):
        if entry == "*" or host.endswith(entry) or host == entry.lstrip("."):
            return True
        with contextlib.suppress(ValueError):  # not a network, or not an address
            if ip_address(host) in ip_network(entry, strict=False):
                return True
    return False


def is_loopback(host: str) -> bool:
    """True if a name or an address of a host is this machine itself."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def dial(address: str, proxy: Proxy | None, timeout: float, peer: str = "coordinator") -> socket.socket:
    """Opens a TCP connection to "host:port" within `timeout` seconds; its socket keeps the timeout.

    Messages call what is there `peer`.

    Raises:
        RouteError: a name has no address, nobody answers, or the proxy refuses.
    """
    parts = ADDRESS.fullmatch(address)
    if parts is None or int(parts[2]) > 65535:
        raise RouteError(f"{address!r} is not the address of a {peer}: expected HOST:PORT")
    if proxy is None:
        return _connect(parts[1].strip("[]"), int(parts[2]), timeout, f"no {peer} answers at {address}", "it")
    end = time.monotonic() + timeout
    connection = _connect(proxy.host, proxy.port, timeout, f"the proxy {proxy} does not answer", "the proxy")
    try:
        _ask(connection, address, proxy, end, peer)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(timeout)
    return connection


def _connect(host: str, port: int, timeout: float, problem: str, peer: str) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=timeout)
    except socket.gaierror as error:
        raise RouteError(
            f"the name {host} has no address on this machine ({error.strerror}): check its spelling and this machine's "
            "DNS" + ("; where only a proxy knows it, set https_proxy or --proxy" if peer == "it" else "")
        ) from None
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is not valid in DNS
        reason = getattr(error, "strerror", None) or str(error)
        raise RouteError(f"{problem} ({reason}): is {peer} running, and does a firewall let you reach it?") from None


def _ask(connection: socket.socket, address: str, proxy: Proxy, end: float, peer: str) -> None:
    """Sends CONNECT, and reads the answer up to the empty line; it must come before the monotonic time `end`."""
    request = f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n"
    if proxy.credentials is not None:
        request += f"Proxy-Authorization: Basic {base64.b64encode(proxy.credentials.encode()).decode()}\r\n"
    answer = b""
    try:
        connection.sendall(f"{request}\r\n".encode())
        while b"\r\n\r\n" not in answer and len(answer) < _MAX_ANSWER_BYTES:
            connection.settimeout(max(end - time.monotonic(), 0.001))
            if not (more := connection.recv(4096)):
                break
            answer += more
    except TimeoutError:
        raise RouteError(
            f"the proxy {proxy} takes connections, but did not connect to {address} in time: the {peer}, or a "
            "firewall behind the proxy, does not answer it"
        ) from None
    except OSError as error:
        raise RouteError(f"the proxy {proxy} broke the connection off ({error.strerror or error})") from None
    line = _STATUS_LINE.match(answer)
    if line is None:
        reply = "nothing, and hung up" if not answer else "with something that is not HTTP"
        raise RouteError(f"what listens at {proxy} is no HTTP proxy: it answered {reply}. Check host and port")
    if not 200 <= (status := int(line[1])) < 300:
        offered = ", ".join(sorted({scheme.decode() for scheme in _OFFERED.findall(answer)}))
        raise RouteError(proxy.refusal(status, address, offered, peer))
