"""A member's console that serves in this process, the files of a home that it shows, and a browser's requests."""

import asyncio
import http.client
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.trust.envelope import envelope_digest, sign
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest
from federation.work.site import SessionEntry
from fedpareto.web.serving import web_server
from fedpareto.web.serving.security import EntranceKeys
from fedpareto.web.site.site_pages import SiteConsole
from tests.running import wait_for
from worker.home import MEMBER_FILE, WorkerHome
from worker.ledgers.left_ledger import LeftLedger
from worker.ledgers.round_ledger import RoundLedger
from worker.site.run_requests import RunRequest, RunsFile
from worker.status import CoordinatorConnection, OfferedTask, StatusFile, WorkerStatus, WorkNow

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202eevil" + "x" * 200
NOW = datetime(2026, 11, 4, 12, tzinfo=UTC)
SCREENS = ("/", "/runs", "/left", "/budgets", "/policy", "/results")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
POLICY = """approve = "each-run"
limits.max_bytes = 1_000_000
[secure.tasks.digits]
sessions = 40
"""


@dataclass(frozen=True)
class Answer:
    """An answer of the console."""

    status: int
    text: str
    headers: Mapping[str, str]


class Site:
    """A console of a home, and a browser's requests to it."""

    def __init__(self, home: WorkerHome, keys: EntranceKeys, port: int) -> None:
        self.home, self.keys, self.port, self.cookie = home, keys, port, ""
        address = urlsplit(web_server.entrance("", keys, "/"))
        entered = self.ask(f"{address.path}?{address.query}".removeprefix(keys.root))
        self.cookie = entered.headers["set-cookie"].partition(";")[0]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: str | None = None, *, cookie: str | None = None) -> Answer:
        """A request for a path below the root; with a body it is a form of our own page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with closing(connection):
            headers = {"Cookie": self.cookie if cookie is None else cookie}
            headers |= {} if body is None else {"Origin": self.base}
            connection.request("GET" if body is None else "POST", self.keys.root + path, body, headers)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, answer.read().decode(), found)

    def page(self, path: str) -> str:
        answer = self.ask(path)
        assert answer.status == 200, (path, answer.status, answer.text)
        return answer.text

    def post(self, path: str, **fields: str) -> Answer:
        """Sends a form with the token of the session."""
        token = self.page("/").partition('name="token" value="')[2].partition('"')[0]
        return self.ask(path, urlencode({"token": token, **fields}))


MOST_STATEMENTS, MOST_ROWS = 30, 300  # of SQLite, for a screen of 100 rows, however many there are


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Counts what SQLite does for this process inside: "statements" that it executes, and "rows" that it gives."""
    connect, counts = sqlite3.connect, Counter[str]()

    def row(_: sqlite3.Cursor, values: tuple[Any, ...]) -> tuple[Any, ...]:
        counts["rows"] += 1
        return values

    def executes(_: str) -> None:
        counts["statements"] += 1

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.row_factory = row
        connection.set_trace_callback(executes)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connected)
        yield counts


@contextmanager
def served_site(home: WorkerHome) -> Iterator[Site]:
    """A console that serves the pages of a home."""
    keys = EntranceKeys(time.monotonic)
    with web_server.listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        server = web_server.server_of(SiteConsole(home, keys).guarded(port), lambda: None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            wait_for(lambda: server.started, "the console to serve")
            yield Site(home, keys, port)
        finally:
            server.should_exit = True
            thread.join()


async def answer_of(console: SiteConsole, path: str, method: str, body: str = "") -> tuple[int, str]:
    """The answer of the pages themselves, without server and guard."""
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.encode()}

    async def send(message: Any) -> None:
        said.append(message)

    place, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": place, "query_string": query.encode(), "headers": []}
    scope |= {"token": "", "session": ""}
    await console.pages(scope, receive, send)
    return said[0]["status"], b"".join(message.get("body", b"") for message in said).decode()


def request(number: int, document: str = "", **changes: Any) -> RunRequest:
    """A run that asked, later than those with smaller numbers."""
    text = (document or f'name = "run-{number}"\ntask = "digits"\nrounds = 3\n').encode()
    fields: dict[str, Any] = {
        "run": f"run-{number}", "spec": digest(text), "initial_model": digest(b"model"), "name": f"run-{number}",
        "task": "digits", "submitted_by": "alice", "asked": (NOW + timedelta(minutes=number)).isoformat(), "owner": "",
        "words": "", "decided": "",
    }  # fmt: skip
    return RunRequest(**(fields | {"document": text} | changes))


def run_address(run: RunRequest) -> str:
    return f"/run?{urlencode({'run': run.run, 'spec': run.spec})}"


def filled(directory: Path, runs: int) -> WorkerHome:
    """A home that has been filled. No worker runs; the last one was killed."""
    home = WorkerHome(directory)
    directory.mkdir(exist_ok=True)
    (directory / MEMBER_FILE).touch()
    home.policy.write_text(POLICY)
    fill(home, runs)
    connection = CoordinatorConnection(connected=False, since=NOW, problem=HOSTILE)
    work = WorkNow("assignment-1", HOSTILE, 3, HOSTILE, NOW)
    StatusFile(home.status).show(WorkerStatus(connection, (work,), (OfferedTask("digits", 64_010, 2),)))
    return home


def fill(home: WorkerHome, runs: int) -> None:
    """Writes `runs` entries into each file; others have chosen the names of the newest ones as badly as can be."""
    with closing(RunsFile(home.runs)) as file:
        for number in range(runs):
            file.add(request(number))
        file.add(request(runs, run=HOSTILE, name=HOSTILE, submitted_by=HOSTILE, initial_model=HOSTILE))
        file.add(request(runs + 1, HOSTILE, task=HOSTILE))
        approved = request(0)
        file.decide(approved, "approved", "", NOW)
    with closing(LeftLedger(home.left)) as left:
        for number in range(runs):
            left.keep(*reply(number, "run-1"), NOW)
        hostile = reply(runs, HOSTILE)
        left.keep(*hostile, NOW)
        refused = ReceiptManifest(envelope=envelope_digest(hostile[0]), reason=HOSTILE)
        left.acknowledge(sign(refused, KEY), refused)
        for reason in ("limit:samples", "disk"):
            left.decline(reason, HOSTILE, run=HOSTILE, assignment=HOSTILE, at=NOW)
    with closing(RoundLedger(home.rounds)) as rounds:
        for number in range(3):
            rounds.add(SessionEntry(str(number), "run-1", "digits", "m", "evaluate" if number == 2 else "train"))
        rounds.add(SessionEntry("x", "run-1", HOSTILE, "m", "train"))
    home.models.mkdir()
    for number in range(runs // 20):
        write_result(home, f"run-{number}", f"run-{number}")
    write_result(home, "hostile", HOSTILE)
    (home.models / "damaged.json").write_text('{"name": 3')


def reply(number: int, run: str) -> tuple[Any, Any]:
    """A signed reply, and the assignment that it fulfils."""
    names: dict[str, Any] = {
        "run_id": run,
        "round": number,
        "assignment_id": f"assignment-{number}-{run[:9]}",
        "client_id": "ann",
    }
    names |= {"task": "digits"}
    said = ReplyManifest(**names, samples=50, losses={HOSTILE if run == HOSTILE else "loss": 0.25})
    return sign(said, KEY), sign(AssignmentManifest(**names, kind="evaluate"), KEY)


def write_result(home: WorkerHome, run: str, name: str) -> None:
    """A file as `worker model` keeps it."""
    scores = [
        {"split": split, "metric": metric, "own": 0.9, "mean": 0.8, "worst": None, "members": 5}
        for split in ("validation", "test")
        for metric in ("accuracy", name)
    ]
    found = {"name": name, "state": name, "round": 3, "compared": {"words": name}, "scores": scores}
    (home.models / f"{run}.json").write_text(json.dumps(found))
