"""The table `[metrics]` of `coordinator.toml` and `worker.toml`: whether, where and to whom `/metrics` is served."""

import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from federation.errors import Error
from federation.spec.problems import Section
from federation.transport.proxies import is_loopback

LEAST_TOKEN, MOST_TOKEN = 16, 512  # characters
BACKLOG = 16  # connections that wait to be served
_EXAMPLE = '"127.0.0.1:9464"'


class MetricsError(Error, ValueError):
    """`/metrics` cannot be served; the message says why and what to do."""


class MetricsSection(Section):
    """The table `[metrics]`."""

    listen: str = Field(
        "",
        description=f"Where to serve [`/metrics`](operate/monitoring.md), such as `{_EXAMPLE}`; port 0 is any free "
        "one. Empty: nowhere. An address other than loopback needs `token_file`.",
    )
    token_file: str = Field(
        "",
        description="A file with a token on its first line, which only this user can read. With it, a scrape must send "
        "the token, and some metrics [name members](operate/monitoring.md#who-may-scrape).",
    )

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        if value:
            _host_and_port(value)
        return value

    @model_validator(mode="after")
    def _loopback(self) -> Self:
        if self.listen and not self.token_file and not is_loopback(_host_and_port(self.listen)[0]):
            raise ValueError(
                f"metrics.listen is {self.listen!r}, which other machines reach: name a token_file, or listen on "
                f"{_EXAMPLE}"
            )
        if self.token_file and not self.listen:
            raise ValueError(f"metrics.token_file: without listen, such as {_EXAMPLE}, nothing is served")
        return self

    def endpoint(self, directory: Path) -> "MetricsEndpoint | None":
        """Where to serve, and the token; None if nothing is served. A relative path begins at `directory`.

        Raises:
            MetricsError: prometheus-client is missing, or the file of the token cannot be used.
        """
        if not self.listen:
            return None
        check_installed()
        host, port = _host_and_port(self.listen)
        token = read_token(directory / self.token_file) if self.token_file else None
        return MetricsEndpoint(host, port, token)


@dataclass(frozen=True)
class MetricsEndpoint:
    """Where `/metrics` is served, and the token that a scrape must send; None if it needs none."""

    host: str
    port: int
    token: bytes | None

    def __repr__(self) -> str:
        """Without the token."""
        return f"MetricsEndpoint({self.host}:{self.port})"

    def bind(self) -> socket.socket:
        """A socket that listens here.

        Raises:
            MetricsError: the address cannot be had.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise MetricsError(
                f"metrics.listen: cannot listen on {self.host}:{self.port}: {error.strerror or error}. Another process "
                "has the port, or the address is not this machine's"
            ) from None


def check_installed() -> None:
    """Raises MetricsError if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401, PLC0415 - an extra
    except ModuleNotFoundError:
        raise MetricsError(
            "metrics.listen needs prometheus-client, which is not installed here: install fedpareto[metrics], or "
            'set listen = ""'
        ) from None


def read_token(path: Path) -> bytes:
    """The token in the first line of a file.

    Raises:
        MetricsError: it cannot be read, others can read it, or it has no token.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            line = file.readline(MOST_TOKEN + 2)
    except OSError as error:
        raise MetricsError(f"metrics.token_file {path} cannot be read: {error.strerror or error}") from None
    if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise MetricsError(
            f"metrics.token_file {path} has the mode {stat.S_IMODE(status.st_mode):04o}, so others can read or change "
            f"it: chmod 600 {path}"
        )
    token = line.strip()
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not all(0x21 <= byte <= 0x7E for byte in token):
        raise MetricsError(
            f"metrics.token_file {path}: its first line is not a token of {LEAST_TOKEN} to {MOST_TOKEN} printable "
            "ASCII characters without spaces; `openssl rand -hex 32` makes one"
        )
    return token


def _host_and_port(text: str) -> tuple[str, int]:
    """The parts of "HOST:PORT"; an IPv6 address stands in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare and host[0] != "["):
        raise ValueError(f"{text!r} is not HOST:PORT, such as {_EXAMPLE}")
    return bare, int(port)
