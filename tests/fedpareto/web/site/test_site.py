"""The member's console over HTTP: what it shows of a worker's files, and the decisions that it writes."""

import asyncio
import csv
import io
import os
import shlex
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from html import unescape
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlencode

import pytest

from fedpareto.web.serving.security import EntranceKeys
from fedpareto.web.site.left_table import csv_text
from fedpareto.web.site.site_pages import SiteConsole
from tests.fedpareto.web.site.scene import (
    HOSTILE,
    MOST_ROWS,
    MOST_STATEMENTS,
    NOW,
    SCREENS,
    Site,
    answer_of,
    counted_reads,
    filled,
    reply,
    request,
    run_address,
    served_site,
)
from worker.home import WorkerHome
from worker.ledgers import ledger_file
from worker.ledgers.left_ledger import LeftLedger
from worker.site.leaving import read_leave
from worker.site.run_requests import RunsFile

RUNS = 150


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with served_site(filled(tmp_path_factory.mktemp("site"), RUNS)) as made:
        yield made


def hostile_run(site: Site) -> str:
    with closing(RunsFile(site.home.runs)) as file:
        [run] = file.of(HOSTILE)
    return run_address(run)


def contents(home: WorkerHome) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(home.directory.rglob("*")) if path.is_file()}


def test_each_screen_is_shown_while_no_worker_runs_escapes_what_others_named_and_writes_nothing(site: Site) -> None:
    site.home.status.touch()  # as if the worker ran
    before = contents(site.home)
    for path in (*SCREENS, "/left.csv", run_address(request(1)), hostile_run(site)):
        text = site.page(path)
        html = () if path == "/left.csv" else ("<img", "<script", " style=")
        assert [bad for bad in (*html, "\x1b", "\u202e") if bad in text] == [], path
        assert site.ask(path, cookie="").status == 401
    assert contents(site.home) == before
    for path in SCREENS:
        assert "\\x1b[2J\\u202eevil" in site.page(path), f"{path} shows no name of others"


def test_a_command_to_copy_holds_the_id_of_a_run_as_one_word(site: Site) -> None:
    run = request(RUNS + 2, run="a; touch /tmp/b #", asked="2026-01-01T00:00:00+00:00")
    with closing(RunsFile(site.home.runs)) as file:
        file.add(run)
    command = site.page(run_address(run)).partition("<code>fedpareto worker runs")[2].partition("</code>")[0]
    assert shlex.split(unescape(command))[0] == run.run


def test_the_first_page_says_that_the_worker_was_killed_and_what_waits(site: Site) -> None:
    os.utime(site.home.status, (NOW.timestamp(), NOW.timestamp()))
    text = site.page("/")
    assert "No worker runs, the last one has given no sign of life since" in text
    assert " runs wait for your decision" in text


def test_a_page_lists_a_hundred_runs_and_as_many_replies(site: Site) -> None:
    for path, older in (("/runs", "page=1"), ("/left", "before=")):
        first = site.page(path)
        assert first.count('<th scope="row"') == 100
        link = next(
            part for part in first.split('href="')[1:] if older in part and part.startswith(site.keys.root + path)
        )
        second = site.page(link.partition('"')[0].removeprefix(site.keys.root).replace("&amp;", "&"))
        assert 0 < second.count('<th scope="row"') <= 100
    assert site.page("/results").count("<h2>") <= 20


@pytest.mark.parametrize("path", [*SCREENS, "/runs?page=1", "/left?before=100", run_address(request(3))])
def test_a_screen_reads_a_bounded_number_of_rows_in_a_bounded_number_of_statements(site: Site, path: str) -> None:
    with counted_reads() as counts:
        site.page(path)
    assert counts["statements"] <= MOST_STATEMENTS, counts
    assert counts["rows"] <= MOST_ROWS, counts


def test_what_left_is_that_of_the_ledger_also_as_csv_and_of_one_run(site: Site) -> None:
    assert "samples 50, losses/loss 0.25" in site.page("/left")
    answer = site.ask("/left.csv?run=run-1")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert (len(rows), {row["run"] for row in rows}) == (RUNS, {"run-1"})
    assert answer.headers["content-disposition"] == 'attachment; filename="what-left.csv"'
    assert "Nothing that left this site is on record here." in site.page("/left?run=other")


def test_budgets_say_what_is_spent_and_left(site: Site) -> None:
    text = site.page("/budgets")
    cells = [part.partition("</td>")[0] for part in text.partition(">digits<")[2].split('">')[1:7]]
    assert cells == ["2", "40", "38", "1", "1000", "999"]


def test_the_policy_says_what_each_rule_refused_and_what_was_declined_without_one(site: Site) -> None:
    text = site.page("/policy")
    by_rules, others = text.partition("What was declined without a rule")[::2]
    assert 'limits.<wbr>samples</th><td data-label="refused" class="short-cell">1 assignment</td>' in by_rules
    assert 'disk</th><td data-label="refused" class="short-cell">1 assignment</td>' in others


def test_a_pause_from_the_page_is_written_and_ended_as_the_commands_do(site: Site) -> None:
    assert site.ask("/pause", "token=wrong").status == 403
    assert site.post("/pause").status == 303
    assert site.home.pause.exists()
    assert "paused until you resume" in site.page("/")
    assert site.post("/resume").status == 303
    assert not site.home.pause.exists()


def test_the_wish_to_leave_is_written_from_the_page_as_the_command_does(site: Site) -> None:
    assert site.ask("/withdraw", "token=wrong").status == 403
    assert not site.home.leave.exists()
    assert site.post("/withdraw", forget="yes").status == 303
    try:
        leave, problem = read_leave(site.home.leave)
        assert leave is not None
        assert (leave.now, leave.forget, problem) == (False, True, "")
        text = site.page("/")
        assert ("it leaves the federation once what it has begun has ended" in text, ">Leave<" in text) == (True, False)
    finally:
        site.home.leave.unlink()


def test_a_decision_holds_for_the_specification_of_the_form_and_an_older_one_is_refused(site: Site) -> None:
    run = request(2)
    assert site.post("/decide", run=run.run, spec=run.spec, owner="refused", words="café").status == 303
    with closing(RunsFile(site.home.runs)) as file:
        [decided] = file.of(run.run)
        assert (decided.owner, decided.words) == ("refused", "café")
        file.add(request(2, spec="sha256:" + "c" * 64, asked=datetime.now(UTC).isoformat()))
    answer = site.post("/decide", run=run.run, spec=run.spec, owner="approved")
    assert (answer.status, "another specification" in answer.text) == (409, True)


def test_a_run_that_the_policy_refuses_cannot_be_approved(site: Site) -> None:
    run = request(3)
    site.home.policy.write_text('approve = "each-run"\nsubmitters = ["bob"]\n')
    try:
        text = site.page(run_address(run))
        assert ("policy.toml refuses this run" in text, ">Approve<" in text) == (True, False)
        answer = site.post("/decide", run=run.run, spec=run.spec, owner="approved")
        assert (answer.status, "alice" in answer.text) == (409, True)
    finally:
        site.home.policy.write_text('approve = "each-run"\n')


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/run", 404),
        ("/run?run=run-1&spec=other", 404),
        ("/run?run=" + "x" * 300, 404),
        ("/runs?show=some", 400),
        ("/runs?page=-1", 400),
        ("/runs?page=" + "9" * 16, 400),
        ("/runs?page=" + "9" * 15, 200),
        ("/left?before=1.5", 400),
        ("/left?before=%D9%A3", 400),
        ("/left?run=%00%ff", 200),
        ("/results?page=x", 400),
        ("/left?" + "&" * 64, 400),
        ("/left.csv?" + "a=1&" * 64, 400),
        ("/decide", 405),
        ("/static/none.css", 404),
        ("/static/../site_pages.py", 404),
        ("/enter?" + "key=x&" * 65, 400),
    ],
)
def test_an_address_that_no_page_has_made_gets_an_exact_status_and_words(site: Site, path: str, status: int) -> None:
    answer = site.ask(path)
    assert (answer.status, "Traceback" in answer.text) == (status, False), answer.text


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"owner": "all", "run": "run-1"}, 400),
        ({"owner": "refused"}, 400),
        ({"owner": "refused", "words": " "}, 400),
        ({"owner": "refused", "words": "x" * 401}, 400),
        ({"owner": "approved"}, 404),
        ({"owner": "approved", "run": "run-1", "spec": "sha256:other"}, 404),
        ({"owner": "approved", "run": HOSTILE, "spec": "\x00"}, 404),
        ({f"field-{number}": "" for number in range(64)}, 400),
        ({"words": "x" * (16 << 10)}, 413),
    ],
    ids=range(9),
)
def test_a_form_that_no_page_has_made_decides_nothing(site: Site, fields: dict[str, str], status: int) -> None:
    before = site.home.runs.read_bytes()
    answer = site.post("/decide", **fields)
    assert (answer.status, HOSTILE[:4] in answer.text) == (status, False), answer.text
    assert site.home.runs.read_bytes() == before


@pytest.mark.parametrize("path", ["/pause", "/resume", "/withdraw", "/decide", "/sign-out"])
def test_a_form_needs_the_origin_and_the_token_of_our_own_page(site: Site, path: str) -> None:
    assert [site.ask(path, body).status for body in ("", "token=wrong")] == [403, 403]
    token = site.page("/").partition('name="token" value="')[2].partition('"')[0]
    assert site.ask(path, urlencode({"token": token}), cookie="").status == 401
    assert not site.home.pause.exists()


def test_signing_out_ends_the_session_of_this_browser_alone(site: Site) -> None:
    other = Site(site.home, site.keys, site.port)
    assert other.post("/sign-out").status == 200
    assert (other.ask("/").status, site.ask("/").status) == (401, 200)


def test_a_file_that_is_damaged_is_named(site: Site) -> None:
    good = site.home.policy.read_text()
    site.home.policy.write_text("approve = 3\n")
    answer = site.ask("/")
    site.home.policy.write_text(good)
    assert (answer.status, "policy.toml" in answer.text) == (503, True)


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("left.db", ("/left", "/left.csv", "/policy")),
        ("runs.db", ("/", "/runs", "/policy")),
        ("private-rounds.db", ("/budgets",)),
    ],
)
def test_a_ledger_that_another_process_has_locked_gets_a_sentence(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, paths: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.0)
    with closing(sqlite3.connect(site.home.directory / name, isolation_level=None)) as another:
        another.execute("BEGIN EXCLUSIVE")
        for path in paths:
            answer = site.ask(path)
            assert (answer.status, f"{name} is locked by another process" in answer.text) == (503, True), path
    for path in paths:
        site.page(path)


def test_a_home_that_the_console_cannot_write_to_is_shown_but_for_a_ledger_that_a_kill_has_left_in_a_change() -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        home = filled(directory, 3)
        killed_in_a_change(home.left)
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        found = asked_by_nobody(home)
    finally:
        directory.chmod(0o755)
        shutil.rmtree(directory)
    sentence = "left.db cannot be read: a process was killed in the middle of a change"
    refused = {path: status for path, (status, _) in found.items() if status != 200}
    assert refused == {"/left": 503, "/policy": 503, "/pause": 503}
    assert sentence in found["/left"][1]
    assert "pause.json" in found["/pause"][1]


def killed_in_a_change(path: Path) -> None:
    """Another process is killed while it changes a ledger, and leaves a journal that has to be rolled back."""

    def change() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA cache_size = 1")  # so that changes are written before the end
            connection.execute("BEGIN")
            connection.execute("UPDATE replies SET reason = hex(zeroblob(100000))")
            os._exit(0)

    process = get_context("fork").Process(target=change)
    process.start()
    process.join()
    assert path.with_name(f"{path.name}-journal").stat().st_size > 0


def asked_by_nobody(home: WorkerHome) -> dict[str, tuple[int, str]]:
    """Status and text of the screens, and of a pause, for a console that may not write into its home."""
    reading, writing = get_context("fork").Pipe(duplex=False)

    def ask() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        console = SiteConsole(home, EntranceKeys(lambda: 0.0))
        asked = [*((path, "GET") for path in SCREENS), ("/pause", "POST")]
        writing.send({path: asyncio.run(answer_of(console, path, method)) for path, method in asked})

    process = get_context("fork").Process(target=ask)
    process.start()
    found: dict[str, tuple[int, str]] = reading.recv()
    process.join()
    return found


def test_a_download_that_its_reader_does_not_fetch_does_not_hold_up_the_worker(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.0)
    parts = csv_text(site.home.left)
    next(parts), next(parts)
    with closing(LeftLedger(site.home.left)) as left:
        left.keep(*reply(RUNS + 1, "run-2"), NOW)
