"""The member's console over HTTP: what it shows of a worker's files, and the decisions that it writes."""

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from fedpareto.web.serving import web_server
from fedpareto.web.serving.security import EntranceKeys
from fedpareto.web.site.application import SiteConsole
from tests.running import wait_for
from worker.home import MEMBER_FILE, WorkerHome
from worker.site.run_requests import RunRequest, RunsFile

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J" + "x" * 200


class Site:
    """A console of a home without a worker, and a browser's requests to it."""

    def __init__(self, home: WorkerHome, keys: EntranceKeys, port: int) -> None:
        self.home, self.keys, self.port, self.cookie = home, keys, port, ""
        address = urlsplit(web_server.entrance("", keys, "/"))
        answer = self.ask(f"{address.path}?{address.query}".removeprefix(keys.root))
        self.cookie = answer[2].partition(";")[0]

    def ask(self, path: str, body: str | None = None, cookie: str | None = None) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with closing(connection):
            own = f"http://127.0.0.1:{self.port}"
            headers = {"Cookie": self.cookie if cookie is None else cookie}
            headers |= {} if body is None else {"Origin": own}
            connection.request("GET" if body is None else "POST", self.keys.root + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.getheader("set-cookie") or ""

    def post(self, path: str, **fields: str) -> tuple[int, str, str]:
        token = self.ask("/")[1].partition('name="token" value="')[2].partition('"')[0]
        return self.ask(path, urlencode({"token": token, **fields}))


def request(number: int, spec: str = "a", name: str = "") -> RunRequest:
    text = f'name = "run-{number}"\ntask = "digits"\nrounds = 3\n'
    return RunRequest(
        run=f"run-{number}", spec=f"sha256:{spec * 64}", initial_model="sha256:" + "b" * 64,
        name=name or f"run-{number}",
        task="digits", submitted_by=HOSTILE, document=text.encode(),
        asked=f"2026-11-01T00:{number // 60:02}:{number % 60:02}",
        owner="", words="", decided="",
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = WorkerHome(tmp_path_factory.mktemp("site"))
    (home.directory / MEMBER_FILE).write_text("")
    home.policy.write_text('approve = "each-run"\n')
    with closing(RunsFile(home.runs)) as file:
        for number in range(150):
            file.add(request(number, name=HOSTILE if number == 149 else ""))
    keys = EntranceKeys(time.monotonic)
    listening = web_server.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = web_server.server_of(SiteConsole(home, keys).guarded(port), lambda: None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    wait_for(lambda: server.started, "the console to serve")
    yield Site(home, keys, port)
    server.should_exit = True
    thread.join()
    listening.close()


def test_each_screen_is_shown_while_no_worker_runs_and_writes_nothing(site: Site) -> None:
    before = {path: path.stat().st_mtime_ns for path in site.home.directory.iterdir()}
    address = urlencode({"run": "run-1", "spec": request(1).spec})
    for path in ("/", "/runs", f"/run?{address}", "/left", "/left.csv", "/budgets", "/policy", "/results"):
        status, text, _ = site.ask(path)
        assert (status, "<script" in text, "\x1b" in text) == (200, False, False), (path, text)
        assert HOSTILE[:10] not in text
        assert site.ask(path, cookie="")[0] == 401
    assert {path: path.stat().st_mtime_ns for path in site.home.directory.iterdir()} == before


def test_a_page_lists_a_hundred_runs(site: Site) -> None:
    first, second = site.ask("/runs")[1], site.ask("/runs?page=1")[1]
    assert [text.count('<th scope="row">') for text in (first, second)] == [100, 50]


def test_a_pause_from_the_page_is_written_and_ended_as_the_commands_do(site: Site) -> None:
    assert site.ask("/pause", "token=wrong")[0] == 403
    assert site.post("/pause")[0] == 303
    assert site.home.pause.exists()
    assert "paused until you resume" in site.ask("/")[1]
    assert site.post("/resume")[0] == 303
    assert not site.home.pause.exists()


def test_a_decision_holds_for_the_specification_of_the_form_and_an_older_one_is_refused(site: Site) -> None:
    run = request(2)
    assert site.post("/decide", run=run.run, spec=run.spec, owner="refused")[0] == 400
    assert site.post("/decide", run=run.run, spec=run.spec, owner="refused", words="café")[0] == 303
    with closing(RunsFile(site.home.runs)) as file:
        [decided] = file.of(run.run)
        assert (decided.owner, decided.words) == ("refused", "café")
        file.add(RunRequest(**{**vars(run), "spec": "sha256:" + "c" * 64, "asked": datetime.now(UTC).isoformat()}))
    status, text, _ = site.post("/decide", run=run.run, spec=run.spec, owner="approved")
    assert (status, "another specification" in text) == (409, True)


def test_a_file_that_is_damaged_is_named(site: Site, tmp_path: Path) -> None:
    good = site.home.policy.read_text()
    site.home.policy.write_text("approve = 3\n")
    status, text, _ = site.ask("/")
    site.home.policy.write_text(good)
    assert (status, "policy.toml" in text) == (503, True)
