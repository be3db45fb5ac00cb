"""The ways to a receiver. No message about a failure has the address or the secret, nor what the receiver answered."""

import base64
import hashlib
import hmac
import json
import re
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from federation.errors import Error
from federation.process.programs import run_program
from federation.transport.proxies import RouteError, choose_proxy, dial
from fedpareto.delivery.apprise_child import NOT_SENT, UNKNOWN
from fedpareto.delivery.news import News
from fedpareto.delivery.targets_file import AlertTarget
from fedpareto.missing_packages import need

WEBHOOK_SECONDS = 15.0  # for the connection, the request and the beginning of the answer
APPRISE_SECONDS = 60.0
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5]\d\d)(?: |\r|$)")
_LONGEST_LINE = 1000  # bytes of an answer that are read


@dataclass(frozen=True)
class SendingTimes:
    """The longest times of one delivery, in seconds."""

    webhook: float = WEBHOOK_SECONDS
    apprise: float = APPRISE_SECONDS


class DeliveryFailed(Error):
    """A receiver has not taken news; the message says why, without its address."""


class Sender(Protocol):
    """A way to one receiver."""

    def send(self, news: News, dropped: int) -> None:
        """Sends news; `dropped` is how many were not delivered before.

        Raises:
            DeliveryFailed: the receiver has not taken them, or not in time.
        """


def sender_of(
    target: AlertTarget,
    environment: Mapping[str, str],
    stop_by: Callable[[], float | None],
    times: SendingTimes | None = None,
) -> Sender:
    """The way to a receiver; `stop_by` is a monotonic time that may be set, by which it has to end.

    Raises:
        PackagesMissing: it is an address of apprise, which is not installed.
        ProxyError: https_proxy of the environment cannot be used.
        OSError, ssl.SSLError: the certificates of a webhook cannot be read.
    """
    seconds = times or SendingTimes()
    if target.webhook:
        return Webhook(target, environment, seconds.webhook)
    need("a target with the key apprise needs", "apprise", extra="alerts")
    return AppriseAddress(target.apprise, environment, stop_by, seconds.apprise)


class Webhook:
    """A receiver that gets news by POST, signed as [Standard Webhooks](https://www.standardwebhooks.com) has it.

    The time for one delivery is bounded, whatever the receiver does. No redirect is followed, and of the answer only
    the status is read.
    """

    def __init__(self, target: AlertTarget, environment: Mapping[str, str], seconds: float) -> None:
        parts = urlsplit(target.webhook)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context(cafile=target.ca or None) if parts.scheme == "https" else None
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._address = f"{host}:{parts.port or (443 if self._tls else 80)}"
        self._head = (
            f"POST {parts.path or '/'}{f'?{parts.query}' if parts.query else ''} HTTP/1.1\r\nHost: {parts.netloc}"
        )
        self._key = target.key()
        self._proxy = choose_proxy(self._address, None, environment)
        self._seconds = seconds

    def send(self, news: News, dropped: int) -> None:
        """Sends one request."""
        body = json.dumps({**news.document, "dropped": dropped}).encode()
        request = "\r\n".join((
            self._head,
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "User-Agent: fedpareto",
            "Connection: close",
            *(f"{name}: {value}" for name, value in signature(self._key, news.id, int(time.time()), body).items()),
        ))  # fmt: skip
        try:
            status = self._answer(f"{request}\r\n\r\n".encode() + body, time.monotonic() + self._seconds)
        except TimeoutError:
            raise DeliveryFailed(f"it has not answered within {self._seconds:g} s") from None
        except ssl.SSLCertVerificationError:
            raise DeliveryFailed(
                "its TLS certificate does not hold: the key ca names those of a CA of your own"
            ) from None
        except (RouteError, OSError) as error:
            why = getattr(error, "strerror", None) if not isinstance(error, ssl.SSLError | socket.gaierror) else None
            raise DeliveryFailed(f"no connection to it, or it was broken off{f' ({why})' if why else ''}") from None
        if not 200 <= status < 300:
            raise DeliveryFailed(
                f"it answered {status}{', and no redirect is followed' if 300 <= status < 400 else ''}"
            )

    def _answer(self, request: bytes, ends: float) -> int:
        """The status of the answer, which begins before the monotonic time `ends`; 0 if it is not one of HTTP."""
        connection = dial(self._address, self._proxy, _left(ends), "receiver")
        try:
            connection.settimeout(_left(ends))
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=self._host)
            connection.settimeout(_left(ends))
            connection.sendall(request)
            line = b""
            while b"\n" not in line and len(line) < _LONGEST_LINE:
                connection.settimeout(_left(ends))
                part = connection.recv(_LONGEST_LINE)
                if not part:
                    break
                line += part
        finally:
            connection.close()
        found = _STATUS.match(line)
        if found is None:
            raise DeliveryFailed("what it answered is not HTTP")
        return int(found[1])


def _left(ends: float) -> float:
    if (left := ends - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def signature(key: bytes, message_id: str, seconds: int, body: bytes) -> dict[str, str]:
    """The headers that sign a message: id, time in seconds since 1970, and HMAC-SHA-256 of both and the body."""
    signed = f"{message_id}.{seconds}.".encode() + body
    mac = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {"webhook-id": message_id, "webhook-timestamp": str(seconds), "webhook-signature": f"v1,{mac}"}


class AppriseAddress:
    """A receiver that apprise knows: e-mail or chat.

    Apprise runs in a process of its own, which gets the address on its standard input and can be ended. Its messages
    may name the address, so nobody reads them.
    """

    def __init__(
        self,
        address: str,
        environment: Mapping[str, str],
        stop_by: Callable[[], float | None],
        seconds: float,
    ) -> None:
        self._address = address
        self._environment = environment
        self._stop_by = stop_by
        self._seconds = seconds

    def send(self, news: News, dropped: int) -> None:
        """Sends one message."""
        facts = news.document
        lines = [f"{facts['message']}.", f"What to do: {facts['remedy']}." * (facts["state"] != "ended")]
        lines += [f"Since {facts['began']}" + (f", until {facts['ended']}." if facts["ended"] else ".")]
        lines += [f"{dropped} earlier messages were not delivered." * bool(dropped), f"Message {news.id}."]
        text = {"address": self._address, "title": news.title, "body": "\n".join(filter(None, lines))}
        problem = run_program(
            [sys.executable, "-m", "fedpareto.delivery.apprise_child"],
            json.dumps({**text, "severity": facts["severity"], "state": facts["state"]}).encode(),
            environment=self._environment,
            seconds=self._seconds,
            stop_by=self._stop_by,
        )
        if problem == f"ended with exit status {UNKNOWN}":
            raise DeliveryFailed("apprise knows no such address, or a package that the address needs is missing")
        if problem == f"ended with exit status {NOT_SENT}":
            raise DeliveryFailed("apprise could not deliver it")
        if problem:
            raise DeliveryFailed(f"apprise {problem}")
