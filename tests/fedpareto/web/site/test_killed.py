"""The member's console is killed at each step of writing a decision, which is then there whole, or not at all."""

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlencode

import pytest

from fedpareto.web.serving.security import EntranceKeys
from fedpareto.web.site.site_pages import SiteConsole
from tests.fedpareto.web.site.scene import SCREENS, answer_of, filled, request, run_address
from tests.few import few
from worker.home import WorkerHome
from worker.site.leaving import read_leave
from worker.site.pause import Pause, read_pause, write_pause
from worker.site.run_requests import RunsFile

ASKED = request(1)
CHOSEN = {"run": ASKED.run, "spec": ASKED.spec}
DECISIONS: dict[str, tuple[str, dict[str, str]]] = {
    "pause": ("/pause", {}),
    "resume": ("/resume", {}),
    "leave": ("/withdraw", {"forget": "yes"}),
    "approve": ("/decide", {**CHOSEN, "owner": "approved"}),
    "refuse": ("/decide", {**CHOSEN, "owner": "refused", "words": "not covered"}),
}
# The files of code that write a decision.
WRITING = (
    *("worker/site/pause.py", "worker/site/leaving.py", "worker/site/run_requests.py", "worker/state_file.py"),
    *("worker/ledgers/ledger_file.py", "federation/durable_files.py", "federation/trust/keys.py"),
)
Killing = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(number: int) -> Killing:
    """Kills the process at a step of its code that writes: before a line of Python, or in a statement of SQLite."""
    left, writes = [number], [False]

    def step() -> int:
        left[0] -= 1
        if left[0] == 0:
            kill()
        return 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(WRITING):
            return None
        if event == "line":
            step()
        return trace

    def begins(statement: str) -> None:
        writes[0] = statement.startswith(("UPDATE", "INSERT", "DELETE"))

    def prepare() -> None:
        connect = sqlite3.connect

        def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **options)
            if arguments[0] != ":memory:":
                connection.set_trace_callback(begins)
                connection.set_progress_handler(lambda: step() if writes[0] else 0, 1)
            return connection

        sqlite3.connect = connected  # type: ignore[assignment]
        threading.settrace(trace)
        sys.settrace(trace)

    return prepare


def beyond(size: int) -> Killing:
    """Kills the process when it writes beyond this size of a file: in the middle of SQLite's journal or pages."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    return prepare


def decide(home: WorkerHome, name: str, killing: Killing) -> int:
    """Sends a form to a console in another process, which is prepared to be killed; returns its exit status."""
    path, fields = DECISIONS[name]

    def answer() -> None:
        killing()
        status, _ = asyncio.run(
            answer_of(SiteConsole(home, EntranceKeys(lambda: 0.0)), path, "POST", urlencode(fields))
        )
        os._exit(0 if status == 303 else 1)

    process = get_context("fork").Process(target=answer)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def decisions(home: WorkerHome) -> tuple[object, ...]:
    """What the worker and its commands read of the owner's decisions, without times."""
    leave, damaged = read_leave(home.leave)
    with closing(RunsFile(home.runs)) as file:
        [run] = file.of(ASKED.run)
    asked = None if leave is None else (leave.now, leave.forget)
    return read_pause(home.pause), asked, damaged, run.owner, run.words, run.decided != ""


def screens(home: WorkerHome) -> dict[str, int]:
    """The status of each screen."""
    console = SiteConsole(home, EntranceKeys(lambda: 0.0))
    return {path: asyncio.run(answer_of(console, path, "GET"))[0] for path in (*SCREENS, run_address(ASKED))}


@pytest.fixture(scope="module")
def full_home(tmp_path_factory: pytest.TempPathFactory) -> WorkerHome:
    return filled(tmp_path_factory.mktemp("killed") / "home", 3)


def copies(full: WorkerHome, directory: Path, name: str) -> Iterator[WorkerHome]:
    """Fresh copies of a home in which the decision has not been taken."""
    for number in count():
        home = WorkerHome(directory / str(number))
        shutil.copytree(full.directory, home.directory)
        if name == "resume":
            write_pause(home.pause, Pause(None))
        yield home
        shutil.rmtree(home.directory)


@few("resume")
@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_is_there_whole_or_not_at_all_after_a_kill_at_each_step_of_its_writing(
    full_home: WorkerHome, tmp_path: Path, name: str
) -> None:
    homes = copies(full_home, tmp_path, name)
    home = next(homes)
    before = decisions(home)
    assert decide(home, name, lambda: None) == 0
    after = decisions(home)
    assert after != before
    seen, fine = set(), dict.fromkeys((*SCREENS, run_address(ASKED)), 200)
    for number in count(1):
        home = next(homes)
        exit_code = decide(home, name, at_step(number))
        found = decisions(home)
        assert found in (before, after), number
        seen.add(found)
        assert screens(home) == fine, number
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL
    assert (seen, found) == ({before, after}, after)


@pytest.mark.full
@pytest.mark.parametrize("name", ["approve", "refuse"])
def test_a_decision_about_a_run_is_there_whole_or_not_at_all_after_a_kill_in_the_middle_of_a_write(
    full_home: WorkerHome, tmp_path: Path, name: str
) -> None:
    homes = copies(full_home, tmp_path, name)
    before, killed = decisions(next(homes)), 0
    for size in range(0, full_home.runs.stat().st_size + 8192, 256):
        home = next(homes)
        exit_code = decide(home, name, beyond(size))
        killed += exit_code == -signal.SIGXFSZ
        owner = before[3] if exit_code else DECISIONS[name][1]["owner"]
        assert decisions(home)[3] == owner, size
        assert set(screens(home).values()) == {200}, size
    assert killed > 3
