"""Offline runs of Weights & Biases, read by its own `wandb sync`, which sends them to a server of this test."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedpareto.sinks.sink import RoundNumbers, RunEnd, SinkError
from fedpareto.sinks.targets import target_of
from tests.fedpareto.sinks.scene import END, RUN, kill_at, numbers, send

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("wandb") is None, reason="needs fedpareto[tracking]"),
]
ROUNDS = 4
TARGET = "wandb:lab/scans"


class Server(ThreadingHTTPServer):
    """Answers what `wandb sync` asks, and keeps what it sends: the run, and the lines of its files by their places."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.run: dict[str, Any] = {}
        self.lines: dict[tuple[str, int], Any] = {}
        self.ended: list[Any] = []

    def answer(self, path: str, sent: Any) -> Any:
        if path == "/graphql":
            self.run |= {name: value for name, value in sent["variables"].items() if value is not None}
            project = {"id": "p", "name": self.run["project"], "entity": {"id": "e", "name": self.run["entity"]}}
            bucket = {"id": "b", "name": self.run["name"], "config": "{}", "historyLineCount": 0, "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        assert path == f"/files/lab/scans/{self.run['name']}/file_stream"
        for file, part in sent["files"].items():
            for place, line in enumerate(part["content"], part["offset"]):
                self.lines[file, place] = json.loads(line)
        if "exitcode" in sent:
            self.ended.append(sent["exitcode"])
        return {}

    def points(self, name: str) -> list[tuple[int, float, float]]:
        history = [line for (file, _), line in sorted(self.lines.items()) if file == "wandb-history.jsonl"]
        return [(line["_step"], line["_timestamp"], line[name]) for line in history]


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent = json.loads(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        answer = json.dumps(self.server.answer(self.path, sent)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in which `wandb/` is made, and an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def sync(server: Server) -> None:
    environment = {
        **os.environ,
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "WANDB_API_KEY": "a" * 40,
        "WANDB_ERROR_REPORTING": "false",
    }
    words = [sys.executable, "-m", "wandb", "beta", "sync", "--yes", "--no-skip-synced", "wandb"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def file_of_the_run() -> Path:
    (found,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    return found


def wanted(name: str, rounds: int = ROUNDS) -> list[tuple[int, float, float]]:
    return [(number, numbers(number).ended, numbers(number).values[name]) for number in range(rounds)]


@pytest.fixture
def undisturbed(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    (tmp_path / "undisturbed").mkdir()
    monkeypatch.chdir(tmp_path / "undisturbed")
    send([TARGET], ROUNDS)
    content = file_of_the_run().read_bytes()
    monkeypatch.chdir(here)
    return content


def test_wandb_sync_sends_each_number_of_each_round_and_how_the_run_ended(server: Server) -> None:
    stopped = RunEnd("STOPPED", "enough")
    for rounds, end in ((2, RunEnd("PAUSED", "")), (ROUNDS, stopped), (ROUNDS, stopped)):
        (delivered,) = send([TARGET], rounds, end)
        assert (delivered.rounds, delivered.problem) == (rounds, "")
        sync(server)
        assert server.points("accuracy/mean") == wanted("accuracy/mean", rounds)
    for name in numbers(0).values:
        assert server.points(name) == wanted(name)
    assert server.run["displayName"] == RUN.name
    config = {key: entry["value"] for key, entry in json.loads(server.run["config"]).items() if key != "_wandb"}
    assert config == {"task": "digits", "algorithm": "fedmgda+", "rounds": 6, "run_id": RUN.run_id}
    summary = server.lines["wandb-summary.json", 0]
    assert (summary["state"], summary["reason"], summary["accuracy/mean"]) == ("STOPPED", "enough", 0.375)
    assert server.ended[1:] == [1, 1]


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_process_that_is_killed_at_any_point_leaves_no_gap_and_no_repetition(
    undisturbed: bytes, owner: Any, name: str, returned: bool
) -> None:
    kills = 0
    while (code := kill_at(owner, name, 1 + kills, returned=returned, target=TARGET, rounds=ROUNDS)) != 0:
        assert code == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    assert file_of_the_run().read_bytes() == undisturbed


def test_records_that_go_over_the_ends_of_blocks_are_read_by_wandb_sync(server: Server) -> None:
    with_many = [
        RoundNumbers(number, RUN.created.timestamp() + number, {f"loss/{name}": name / 7 for name in range(count)})
        for number, count in enumerate((3000, 100, 1, 2000, 5))
    ]
    sink = target_of(TARGET).make()
    assert sink.open(RUN) == 0
    for each in with_many:
        sink.write(each)
    sink.finish(END)
    # The head of a part has 7 bytes: each smaller rest of a block is left empty.
    content = file_of_the_run().read_bytes()
    assert len(content) > 5 * 32768
    sync(server)
    history = [line for (file, _), line in sorted(server.lines.items()) if file == "wandb-history.jsonl"]
    for line, each in zip(history, with_many, strict=True):
        assert {name: line[name] for name in each.values} == each.values
    assert server.ended == [0]


def test_two_runs_of_one_id_and_two_processes_do_not_share_a_file() -> None:
    first, second, other = (target_of(TARGET).make() for _ in range(3))
    first.open(RUN)
    with pytest.raises(SinkError, match="another process writes"):
        second.open(RUN)
    assert other.open(type(RUN)(**{**vars(RUN), "created": RUN.created + timedelta(microseconds=1)})) == 0
    assert len(list(Path("wandb").iterdir())) == 2
    for sink in (first, second, other):
        sink.close()


@pytest.mark.parametrize("address", ["a/b/c", "/scans", "a b", "scans?", "x" * 129])
def test_an_address_that_is_no_project_is_refused(address: str) -> None:
    with pytest.raises(SinkError, match="expected a project, or ENTITY/PROJECT"):
        target_of(f"wandb:{address}")


def test_nothing_is_sent_and_nothing_else_is_written_and_a_directory_that_cannot_be_made_is_told_of_once(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    connections: list[str] = []
    watching = [True]
    sys.addaudithook(lambda event, _: connections.append(event) if watching and event == "socket.connect" else None)
    send([TARGET], ROUNDS)
    watching.clear()
    assert connections == []
    assert not (here.parent / "home").exists()
    assert {path.name for path in file_of_the_run().parent.iterdir()} == {
        file_of_the_run().name,
        "state.json",
        ".lock",
    }
    Path("wandb").rename("elsewhere")
    Path("wandb").write_text("")
    (away,) = send([TARGET], ROUNDS)
    assert "FileExistsError" in away.problem
    assert capfd.readouterr().err.count("cannot be reached") == 1
