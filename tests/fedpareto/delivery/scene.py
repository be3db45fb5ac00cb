"""Receivers of alerts: real servers on loopback, which answer as a test wants, or do not."""

import base64
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedpareto.delivery.deliverer import Times
from fedpareto.delivery.news import KnownAlert, News, State
from fedpareto.delivery.senders import SendingTimes
from fedpareto.delivery.targets_file import AlertTarget

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
FEDERATION = "test"
TIMES = Times(look=0.2, pause=0.02, longest_pause=0.2, sending=SendingTimes(webhook=0.5, apprise=20.0))
NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


class Receiver:
    """A server that keeps each request, and answers by `status`, with a body of this `size`.

    With status 0 it answers nothing until it is closed.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.status, self.size = 200, 0
        self.headers: dict[str, str] = {}
        self.requests: list[tuple[Mapping[str, str], bytes]] = []
        self._closing = threading.Event()
        keeper = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                keeper.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
                if not keeper.status:
                    keeper._closing.wait(60)
                    return
                self.send_response(keeper.status)
                for name, value in keeper.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(keeper.size))
                self.end_headers()
                self.wfile.write(b"x" * keeper.size)

            def log_message(self, *_: object) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None: ...  # who reads the status alone closes early

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=hidden-token"

    def documents(self) -> list[Any]:
        return [json.loads(body) for _, body in self.requests]

    def told(self) -> list[tuple[str, str]]:
        """The kind and the state of each message."""
        return [(document["kind"], document["state"]) for document in self.documents()]

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def receivers(count: int) -> Iterator[list[Receiver]]:
    made = [Receiver() for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def webhook(address: str, **more: Any) -> AlertTarget:
    return AlertTarget.model_validate({"webhook": address, "secret": SECRET, **more})


def targets_file(home: Path, *addresses: str, more: str = "") -> Path:
    """Writes a `notify.toml` with the targets a, b and so on."""
    tables = "".join(
        f'[targets.{"abcdefgh"[number]}]\nwebhook = "{address}"\nsecret = "{SECRET}"\n'
        for number, address in enumerate(addresses)
    )
    path = home / "notify.toml"
    path.unlink(missing_ok=True)
    path.write_text(f"format = 1\naway_seconds = 10.0\n{tables}{more}")
    path.chmod(0o600)
    return path


def alert(
    name: str = "ann", *, severity: str = "warning", began: datetime = NOW, ended: datetime | None = None
) -> KnownAlert:
    about = {"kind": "NORM_OUTLIER", "run_id": "run", "run_name": "trial", "client_id": name}
    about |= {"message": f"the update of {name} was long", "remedy": "ask"}
    until = "" if ended is None else ended.isoformat(timespec="seconds")
    return KnownAlert(f"NORM_OUTLIER|run|{name}|1", severity, began.isoformat(timespec="seconds"), until, about)


def news(name: str = "ann") -> News:
    return News.of(FEDERATION, alert(name), State.BEGINS, 0, NOW)
