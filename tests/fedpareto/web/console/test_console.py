"""The console over HTTP: pages of real runs, who may read them, and streams that carry state."""

import json
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from urllib.parse import quote

import pytest
from sqlalchemy import select

from fedpareto.cli.failure import CommandFailure
from fedpareto.web.console.application import SCREENS
from fedpareto.web.serving import security, web_server
from storage.models import AuditEntry
from tests.fedpareto.scene import troubled_run
from tests.fedpareto.web.console.scene import Served, event, served
from tests.running import wait_for
from tests.stage import Player, Stage

HTML = """</title></style><script>alert(1)</script><img src=http://evil.example/x onerror='x'>"""


@pytest.fixture(scope="module")
def console(_module_stage: Stage) -> Iterator[Served]:
    with served(_module_stage.served.home.directory / "admin") as made:
        yield made


def finished(stage: Stage, name: str, *names: str, rounds: int = 2) -> str:
    """A run that has ended, whose members all replied."""
    run, players = stage.begin(*names, name=name, rounds=rounds, more=f"selection.minimum = {len(names)}")
    stage.complete(run, *players)
    return run


def play_round(stage: Stage, run: str, players: list[Player], number: int) -> None:
    """The players answer until a round has ended."""
    stage.play(run, *players, until=lambda: len(stage.rounds(run)) > number and stage.rounds(run)[number].ended)


def check_says(page: str, *words: str) -> None:
    assert not [missing for missing in words if missing not in page]


def listed(console: Served, run: str) -> None:
    console.reader.hurry()

    def there() -> bool:
        lists = console.reader.lists
        return lists is not None and run in [item.run_id for item in lists.runs]

    wait_for(there, "the console to list the run")


@contextmanager
def away(stage: Stage, console: Served) -> Iterator[None]:
    """The coordinator has stopped, and the console knows; afterwards both are connected again."""
    stage.stop()
    try:
        console.reader.hurry()  # as when a page is opened
        wait_for(lambda: not console.reader.connection.live, "the console to lose the coordinator")
        yield
    finally:
        stage.start()
        stage.come_back()
        console.reader.hurry()
        wait_for(lambda: console.reader.connection.live, "the console to find the coordinator again")


# --- pages


def test_each_screen_shows_a_run_that_has_ended(stage: Stage, console: Served) -> None:
    run = finished(stage, "shown", "ann", "ben", "cleo")
    other = finished(stage, "shown-too", "ann", "ben")
    listed(console, other)
    ended = ("completed", "2 of 2 rounds", "Who is left behind", "Round 1", "3 of 3 replied")
    check_says(console.page(f"/runs/{run}"), "shown", "ann", *ended)
    series = json.loads(console.page(f"/runs/{run}/series"))
    assert (series["names"], series["rounds"]) == (["ann", "ben", "cleo"], [0, 1])
    assert all(0.0 < value < 1.0 for line in series["values"] for value in line)
    signed = ("signed envelopes hold", "signed by the coordinator")
    check_says(console.page(f"/runs/{run}/rounds/-1"), "3 of 3 members replied", "What each member did", *signed)
    check_says(console.page("/members/ben"), "ben", "Results and updates by run", "shown-too", "In the log", "key")
    page = console.page(f"/compare?run={run}&run={other}")
    check_says(page, "shown-too against shown", "mean accuracy", "fedmgda+")
    assert "Enroll" in console.page("/log?text=enroll")
    assert "There is no such entry" in console.page("/log?text=no-such-thing")
    page = console.page("/system")
    assert "SQLite" in page or "PostgreSQL" in page
    listed(console, run)
    check_says(console.page("/"), "Members", "ann", "connected", "Runs that have ended", "shown")


def test_a_paused_run_needs_the_operator(stage: Stage, console: Served) -> None:
    run, _ = stage.begin("ann", "ben", name="held", paused=True)
    listed(console, run)
    page = console.page("/")
    check_says(page, "Run held is paused", "resume held")
    assert "All well." not in page
    stage.stop_run(run)


def test_a_failure_is_told_with_its_reason_and_what_to_do(stage: Stage, console: Served) -> None:
    run = troubled_run(stage, "failing", 1, "disk", HTML)
    check_says(console.page(f"/runs/{run}?rounds=failed"), "1 of 3 replied", "cleo declined: disk")
    page = console.page(f"/runs/{run}/rounds/0")
    check_says(page, "The update was all zeros", "&lt;script&gt;")
    assert HTML not in page


def test_a_private_run_says_what_its_privacy_hides(stage: Stage, console: Served) -> None:
    more = "selection.minimum = 3\nprivacy.client_noise = 5.0\nprivacy.client_delta = 1e-5"
    run, players = stage.begin("ann", "ben", "cleo", name="noisy", more=more)
    stage.play(run, *players)
    page = console.page(f"/runs/{run}")
    assert "not disclosed" in page
    assert "Who is left behind" not in page
    assert console.ask(f"/runs/{run}/rounds/0").status == 200


# --- streams


def test_a_run_advances_on_an_open_page(stage: Stage, console: Served) -> None:
    run, players = stage.begin("ann", "ben", name="live", rounds=3, more="selection.minimum = 2")
    listed(console, run)
    with console.events(f"/events?of=/runs/{run}&have=") as stream:
        assert stream.status == 200
        event(stream, "head")
        for number in range(2):
            play_round(stage, run, players, number)
            while f"Round {number}</a>" not in event(stream, "feed"):
                pass
        while '"stop":2' not in event(stream, "tail").replace("&#34;", '"'):
            pass
    stage.stop_run(run)


@pytest.mark.full
def test_a_stream_sends_first_what_differs_from_the_page_and_each_part_whole(stage: Stage, console: Served) -> None:
    run = finished(stage, "still", "ann", "ben")
    page = console.page(f"/runs/{run}")
    have = page.partition("&amp;have=")[2].partition('"')[0]
    of = quote(f"/runs/{run}", safe="")
    with console.events(f"/events?of={of}&have={have}") as stream, away(stage, console):
        lines = iter(lambda: stream.readline().decode().rstrip(), None)
        first = next(line for line in lines if line.startswith("event: "))
        told = next(line for line in lines if "is away since" in line)
    assert (first, told.startswith("data:")) == ("event: connection", True)


@pytest.mark.full
def test_the_last_state_stays_while_the_coordinator_is_away(stage: Stage, console: Served) -> None:
    run = finished(stage, "kept", "ann", "ben")
    listed(console, run)
    wait_for(lambda: "2 of 2 rounds" in console.page(f"/runs/{run}"), "the console to know of the last round")
    with away(stage, console):
        check_says(console.page(f"/runs/{run}"), "The coordinator is away since", "2 of 2 rounds")
        if stage.served.database.directory is not None:  # rows in PostgreSQL are not read without a coordinator
            wait_for(lambda: console.reader._opened is not None, "the record that it left to be read")
            assert "2 of 2 members replied" in console.page(f"/runs/{run}/rounds/0")
            assert console.ask("/runs/none").status == 404
    assert "is away" not in console.page(f"/runs/{run}")


def test_ten_pages_of_a_run_ask_the_coordinator_as_little_as_one(stage: Stage, console: Served) -> None:
    run, players = stage.begin("ann", "ben", name="watched", rounds=2, more="selection.minimum = 2")
    listed(console, run)
    play_round(stage, run, players, 0)
    console.page(f"/runs/{run}")
    held = console.reader.known(run)
    assert held is not None
    wait_for(lambda: 0 in held.table.whole and held.followed, "the run to be followed")
    before = exports(stage, run)
    for _ in range(10):
        assert "Round 0</a>" in console.page(f"/runs/{run}")
        console.page(f"/runs/{run}/series")
    assert exports(stage, run) == before
    stage.stop_run(run)


def exports(stage: Stage, run: str) -> int:
    """How often the rounds of a run were exported or followed, by the audit log."""
    rows = select(AuditEntry).where(AuditEntry.action == "rounds.exported", AuditEntry.subject == run)
    return stage.look(lambda session: sum(row.times for row in session.scalars(rows)))


# --- who may read


def test_without_a_session_nothing_is_shown_and_the_page_says_how_to_get_one(console: Served) -> None:
    paths = [path.replace("{run}", "x").replace("{number}", "0").replace("{client}", "x") for path in SCREENS]
    for path in (*paths, "/events"):
        answer = console.ask(path, Cookie="")
        assert answer.status == 401, path
        assert "press Enter in the terminal" in answer.text
    assert console.ask("/", Cookie=f"fedpareto-console-{console.port}=guessed").status == 401
    assert console.ask("/static/style.css", Cookie="").status == 200


def test_a_key_works_once_and_for_a_minute(console: Served) -> None:
    path = web_server.entrance("", console.console.keys, "/runs/x?heat=loss")
    answer = console.ask_whole(path, Cookie="")
    assert answer.status == 200
    assert f"url={console.root}/runs/x?heat=loss" in answer.text
    cookie = answer.headers["set-cookie"]
    name = f"fedpareto-console-{console.port}="
    check_says(cookie, name, "HttpOnly", "SameSite=Strict", f"Path={console.root};", "Max-Age=43200")
    assert console.ask("/log", Cookie=cookie.partition(";")[0]).status == 200
    again = console.ask_whole(path, Cookie="")
    assert (again.status, "set-cookie" in again.headers) == (401, False)
    late = web_server.entrance("", console.console.keys, "/")
    console.clock.ahead += security.KEY_SECONDS + 1
    assert console.ask_whole(late, Cookie="").status == 401
    first, second = (web_server.entrance("", console.console.keys, "/") for _ in range(2))
    assert console.ask_whole(first, Cookie="").status == 401  # another one was asked for since
    assert console.ask_whole(second, Cookie="").status == 200


@pytest.mark.parametrize("to", ["//evil.example", "/\\evil.example", "http://evil.example", "/\nx", ""])
def test_an_entrance_leads_to_no_other_server(console: Served, to: str) -> None:
    answer = console.ask(f"/enter?key={console.console.keys.new_key()}&to={quote(to, safe='')}", Cookie="")
    assert f'content="0;url={console.root}/"' in answer.text


def test_no_answer_outside_the_root_names_it(console: Served) -> None:
    root = console.root
    assert len(root) > 20
    for path in ("/", "/enter", "/static/style.css", root[:-1], "/" + "x" * (len(root) - 1) + "/", "/runs/x"):
        for cookie in ("", console.cookie):
            answer = console.ask_whole(path, Cookie=cookie)
            assert (answer.status, root in answer.text + str(answer.headers)) == (404, False), path
    elsewhere = console.ask_whole(root + "/", Host="evil.example")
    assert (elsewhere.status, root in elsewhere.text) == (403, False)


@pytest.mark.parametrize(
    "other", ['theme={"dark":true}', "a b=c", "=x", "flag", 'q="a;b', "x=\xff", "path=1; $Version=1", "n\xe4me=1"]
)
def test_a_cookie_of_another_program_on_this_machine_does_not_lock_the_console_out(console: Served, other: str) -> None:
    for cookie in (f"{other}; {console.cookie}", f"{console.cookie};{other}"):
        assert console.ask("/log", Cookie=cookie).status == 200


def test_a_session_ends_after_twelve_hours_and_when_it_is_left(console: Served) -> None:
    console.enter()
    token = console.page("/log").partition('name="token" value="')[2].partition('"')[0]
    origin = {"Origin": console.base, "Content-Type": "application/x-www-form-urlencoded"}
    assert console.ask("/sign-out", "POST", f"token={token}".encode(), **origin).status == 200
    assert console.ask("/log").status == 401
    console.enter()
    assert console.ask("/log").status == 200
    console.clock.ahead += security.SESSION_SECONDS + 1
    assert console.ask("/log").status == 401
    console.enter()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    ],
    ids=str,
)
def test_other_pages_get_nothing_even_with_the_cookie(console: Served, headers: dict[str, str]) -> None:
    answer = console.ask("/log", "GET", None, **headers)
    assert answer.status == 403
    assert "Enroll" not in answer.text


def test_a_post_needs_our_origin_and_the_token_of_the_session(console: Served) -> None:
    token = console.page("/log").partition('name="token" value="')[2].partition('"')[0]
    body, ours = f"token={token}".encode(), {"Origin": console.base}
    assert console.ask("/sign-out", "POST", body).status == 403
    assert console.ask("/sign-out", "POST", body, Origin="http://evil.example").status == 403
    assert console.ask("/sign-out", "POST", b"token=wrong", **ours).status == 403
    assert console.ask("/sign-out", "POST", b"", **ours).status == 403
    assert console.ask("/sign-out", "POST", b"x" * (security.MAX_BODY_BYTES + 1), **ours).status == 413
    assert console.ask("/sign-out", "POST", b"", **ours, Content_Length="x").status == 400
    assert console.ask("/sign-out", "POST", b"a=1&" * 64 + body, **ours).status == 400
    assert console.ask("/log").status == 200  # the session goes on


def test_every_answer_has_the_headers_of_safety(stage: Stage, console: Served) -> None:
    expected = {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
        "cache-control": "no-store",
        "cross-origin-opener-policy": "same-origin",
    }
    for path, cookie in (("/", console.cookie), ("/", ""), ("/nothing", console.cookie), ("/static/console.js", "")):
        headers = console.ask(path, Cookie=cookie).headers
        assert {name: headers.get(name) for name in (*expected, "server")} == {**expected, "server": None}


def test_no_page_has_a_style_or_a_script_of_its_own(stage: Stage, console: Served) -> None:
    run = finished(stage, "strict", "ann", "ben")
    of_run = (f"/runs/{run}", f"/runs/{run}/rounds/0", f"/compare?run={run}")
    for path in (*of_run, "/", "/members/ann", "/log", "/system"):
        page = console.ask(path).text
        assert not [own for own in (" style=", "<style", "<script>", " onclick") if own in page], path


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404),
        ("/runs/none", 404),
        ("/runs/none/series", 404),
        ("/runs/none/rounds/0", 404),
        ("/runs/none/rounds/x", 400),
        ("/runs/none/rounds/99999999999999999999", 400),
        ("/members/none", 404),
        ("/members/" + quote(HTML), 404),
        ("/log?before=x", 400),
        ("/log?before=-1", 400),
        ("/log?text=" + "x" * 300, 400),
        ("/log?" + "x" * 5000, 400),
        ("/log?" + "&" * 64, 400),
        ("/runs/none/series?" + "a=1&" * 64, 400),
        ("/events?of=" + quote("/log?" + "a=1&" * 65, safe=""), 400),
        ("/events?" + "a=1&" * 64, 400),
        ("/events?of=//[", 400),
        ("/enter?" + "key=x&" * 65, 400),
        ("/compare?" + "&".join(f"run={i}" for i in range(7)), 400),
        ("/compare?run=only", 400),
        ("/events?of=/nothing", 404),
        ("/static/../security.py", 404),
        ("/static/none.js", 404),
    ],
)
def test_bad_input_gets_an_exact_status_and_words(console: Served, path: str, status: int) -> None:
    answer = console.ask(path)
    assert answer.status == status, answer.text
    assert HTML not in answer.text
    assert "Traceback" not in answer.text


def test_a_choice_that_does_not_exist_is_refused_for_a_run_that_does(stage: Stage, console: Served) -> None:
    run = finished(stage, "chosen", "ann", "ben")
    for query in ("heat=x", "rounds=x", "before=1.5"):
        assert console.ask(f"/runs/{run}?{query}").status == 400, query
    assert console.ask(f"/runs/{run}/series?from=x").status == 400


def test_a_thirty_third_stream_is_refused(console: Served) -> None:
    with ExitStack() as streams:
        for _ in range(security.MAX_STREAMS):
            assert streams.enter_context(console.events("/events?of=/log&have=")).status == 200
        assert console.ask("/events?of=/log").status == 429
        assert console.ask("/log").status == 200
    wait_for(lambda: console.ask("/events?of=/nothing").status == 404, "the places to be free again")


# --- the start


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_another_address_is_refused_with_the_way_to_reach_the_pages(host: str) -> None:
    with pytest.raises(ValueError, match=r"ssh -L 9000:127\.0\.0\.1:9000"):
        web_server.listen(host, 9000)


def test_the_browser_is_opened_through_a_file_that_only_the_user_can_read() -> None:
    opened = []

    def browse(url: str) -> None:
        opened.append(path := Path(url.removeprefix("file://")))
        assert [stat.S_IMODE(file.stat().st_mode) for file in (path, path.parent)] == [0o600, 0o700]
        assert "key=secret&amp;to=/" in path.read_text()

    with web_server.browsing("http://127.0.0.1:1/enter?key=secret&to=/", browse):
        pass
    [path] = opened
    assert "secret" not in str(path)
    assert not path.exists()


def test_more_runs_than_can_be_compared_are_refused(stage: Stage) -> None:
    command = import_module("fedpareto.cli.admin.console").console_command
    with pytest.raises(CommandFailure, match="at most 6"):
        command(runs=list("abcdefg"), home=stage.served.home.directory / "admin")
