"""A console that serves in this process, on a port of loopback, and a browser's requests to it by hand."""

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from fedpareto.cli.admin.client import opened_calls
from fedpareto.web.console.application import Console
from fedpareto.web.console.federation_reader import Reader
from fedpareto.web.console.page_events import PAUSE_SECONDS, ChangeBell
from fedpareto.web.console.render import ConsoleSite
from fedpareto.web.serving import web_server
from fedpareto.web.serving.security import EntranceKeys
from tests.running import SECONDS, wait_for


@dataclass
class Answer:
    """An answer of the console."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Clock:
    """Seconds that a test may move."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@dataclass
class Served:
    """A console that serves; `cookie` is that of the browser's session, empty before one."""

    console: Console
    port: int
    clock: Clock
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def reader(self) -> Reader:
        return self.console.reader

    @property
    def root(self) -> str:
        return self.console.keys.root

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        """A request for a path below the root; headers are given with _ for -."""
        return self.ask_whole(self.root + path, method, body, **headers)

    def ask_whole(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        """A request for a whole path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            sent = {"Host": f"127.0.0.1:{self.port}", "Cookie": self.cookie, **self.headers}
            sent |= {name.replace("_", "-"): value for name, value in headers.items()}
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body is not None and "Content-Length" not in sent:
                sent["Content-Length"] = str(len(body))
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def page(self, path: str) -> str:
        answer = self.ask(path)
        assert answer.status == 200, (answer.status, answer.text)
        return answer.text

    def enter(self) -> None:
        """Begins the browser's session."""
        address = urlsplit(web_server.entrance(self.base, self.console.keys, "/"))
        answer = self.ask_whole(f"{address.path}?{address.query}")
        assert answer.status == 200
        self.cookie = answer.headers["set-cookie"].partition(";")[0]

    @contextmanager
    def events(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """A stream of events of a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request("GET", self.root + path, headers={"Cookie": self.cookie, "Accept-Encoding": "identity"})
            yield connection.getresponse()
        finally:
            connection.close()


@contextmanager
def served(home: Path, *, pause: float = PAUSE_SECONDS, administrator: str = "admin") -> Iterator[Served]:
    """A console of the administrator whose directory is given; `pause` is between two events of a page, in seconds."""
    clock, bell = Clock(), ChangeBell()
    keys = EntranceKeys(clock)
    reader = Reader(partial(opened_calls, home, proxy="direct"), bell.ring, keys.root)
    console = Console(ConsoleSite("test", administrator), reader, bell, keys, pause=pause)
    listening = web_server.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    uvicorn_server = web_server.server_of(console.guarded(port), bell.stop)
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve(sockets=[listening])), daemon=True)
    reader.start()
    thread.start()
    try:
        wait_for(lambda: uvicorn_server.started, "the console to serve")
        made = Served(console, port, clock)
        made.enter()
        yield made
    finally:
        reader.stop()
        uvicorn_server.should_exit = True
        thread.join(SECONDS)
        listening.close()


def event(stream: http.client.HTTPResponse, name: str) -> str:
    """The data of the next event of a name."""
    current, lines = "", list[str]()
    while True:
        line = stream.readline().decode()
        assert line, f"the stream ended before an event {name}"
        line = line.rstrip("\n")
        if line.startswith("event: "):
            current, lines = line.removeprefix("event: "), []
        elif line.startswith("data:"):
            lines.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and current == name:
            return "\n".join(lines)
