"""The console in a browser: real processes, a run that advances, and pages that everybody can read.

Most tests are marked `full`: a coordinator, workers and the console are processes, and chromium costs CPU seconds.
"""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from federation.digests import digest
from federation.spec.run_spec import with_models
from federation.v1.admin_pb2 import MeasuredModel
from fedpareto.web.serving import web_server
from storage.states import RunState
from tests.browsers import NARROW, SCHEMES, WIDE, Screen, another_server, chromium, fits, smallest_text, violations
from tests.described import begin as begin_described
from tests.described import drawn, tell
from tests.fedpareto.web.console.scene import Served, served
from tests.harness import Federation, Process, federation, wait_for
from tests.stage import MODEL, Stage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CLIENTS = ("hospital-a", "hospital-b", "hospital-c")
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202eevil" + "x" * 200
SPEC = """
task = "digits"
rounds = {rounds}
seed = 11
algorithm.name = "fedmgda+"
train.epochs = 1
train.deadline_seconds = 300
selection.minimum = 3
evaluate.deadline_seconds = 300
"""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as made:
        yield made


def test_a_browser_follows_a_run_under_the_policy_without_a_complaint(
    stage: Stage, browser: "Browser", served_here: Served
) -> None:
    run, players = stage.begin("ann", "ben", name="followed", rounds=3, more="selection.minimum = 2")
    screen = Screen(browser)
    page, console = screen.page, served_here
    page.goto(web_server.entrance(console.base, console.console.keys, f"/runs/{run}"))
    page.wait_for_url(f"**/runs/{run}")
    wait_for(lambda: console.reader.watched == 1, "the page to open its stream")

    def play(number: int, watched: bool) -> None:
        wait_for(lambda: console.reader.watched == watched, "the stream to be as the page is seen")
        stage.play(run, *players, until=lambda: len(stage.rounds(run)) > number and stage.rounds(run)[number].ended)

    for number in range(3):
        watched = number != 1  # the second round ends while nobody sees the page, which then holds no connection
        seen(page, watched)
        play(number, watched)
        if watched:
            page.wait_for_selector("#round-1" if number == 2 else "#round-0")
            page.wait_for_selector(f"#round-{number}")
    stage.wait_state(run, RunState.COMPLETED)
    page.wait_for_selector("#head .state.good >> text=completed")
    page.wait_for_selector("#chart[data-points='3'] canvas")
    marks = page.get_attribute("#chart", "data-marks") or ""
    assert [mark for mark in map(float, marks.split()) if not mark.is_integer()] == []  # there is no round 0.5
    page.wait_for_selector("#heat-figure .cells path", state="attached")
    assert screen.problems == []
    # The page of another port is another user's, perhaps: the browser must not send it the cookie.
    with another_server() as (address, asked):
        for path in ("/", f"/runs/{run}", f"{console.root}x/"):
            page.goto(address + path)
    assert len(asked) >= 3
    assert [cookie for cookie in asked if cookie] == []
    page.goto(f"{console.base}{console.root}/log")
    page.click("button >> text=Sign out")
    page.wait_for_selector("text=You have signed out.")
    screen.context.close()


@pytest.mark.full
def test_runs_that_measure_models_or_describe_data_are_accessible_fit_and_are_legible(
    stage: Stage, browser: "Browser", served_here: Served
) -> None:
    run, players = begin_described(stage, "ann", "ben")
    for number, player in enumerate(players):
        assert tell(player, drawn(number)).accepted
    stage.wait_state(run, RunState.COMPLETED)
    task, players = stage.crew("ann", "ben")
    text = f'name = "{task}"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["train", "test"]\n'
    header = MeasuredModel(digest=digest(MODEL), size=len(MODEL))
    measured = stage.submit(with_models(text.encode(), [digest(MODEL)]), model=MODEL, models=[header], further=[])
    stage.complete(measured, *players)
    paths = [f"/runs/{one}{more}" for one in (run, measured) for more in ("", "/rounds/0")]
    for width, scheme in product((WIDE, NARROW), SCHEMES):
        screen = Screen(browser, width, scheme)
        for path in paths:
            screen.page.goto(web_server.entrance(served_here.base, served_here.console.keys, path))
            screen.page.wait_for_url(f"{served_here.base}{served_here.root}{path}", wait_until="load")
            assert violations(screen.page) == [], (path, width, scheme)
            assert fits(screen.page), (path, width, scheme)
            assert smallest_text(screen.page) >= 12, (path, width, scheme)
            words = screen.page.inner_text("main")
            assert ("The data" in words) == (path == f"/runs/{run}"), (path, words)
        assert screen.problems == []
        screen.context.close()


def seen(page: "Page", visible: bool) -> None:
    """Has the page act as if its tab were in the foreground, or in the background."""
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange')); }",
        not visible,
    )


@pytest.fixture(scope="module")
def served_here(_module_stage: Stage) -> Iterator[Served]:
    with served(_module_stage.served.home.directory / "admin") as made:
        yield made


# --- with processes


class Scene:
    """A federation of processes, and its console."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.runs = 0
        self.console = self.start()

    def start(self) -> Process:
        arguments = ["-m", "fedpareto", "console", "--home", str(self.fed.home / "admin"), "--no-browser", "--json"]
        process = self.fed.spawn(f"console-{self.runs}", [*arguments, "--port", "0"])
        self.runs += 1
        wait_for(lambda: "}" in process.text, "the console to print its address")
        printed = json.loads(process.text)
        self.url, self.address = printed["url"].removesuffix("to=/"), printed["address"]
        return process

    def restart(self) -> None:
        self.console.kill()
        self.console = self.start()

    def open(self, screen: Screen, path: str = "/") -> "Page":
        self.restart()
        screen.page.goto(f"{self.url}to={path}")
        screen.page.wait_for_selector("main")
        screen.page.wait_for_load_state("load")
        return screen.page

    def run(self, name: str, rounds: int = 3) -> str:
        return self.fed.submit(name, SPEC.format(rounds=rounds))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with federation(tmp_path_factory.mktemp("console")) as fed:
        fed.serve()
        for client in CLIENTS:
            fed.join(client)
            fed.work(client)
        fed.attending(*CLIENTS)
        yield Scene(fed)


@pytest.mark.full
def test_the_page_greys_while_the_coordinator_is_away_and_goes_on_when_it_is_back(
    scene: Scene, browser: "Browser"
) -> None:
    run = scene.run("away", rounds=40)
    screen = Screen(browser)
    page = scene.open(screen, f"/runs/{run}")
    page.wait_for_selector("#round-0")
    scene.fed.serving.kill()
    page.wait_for_selector("#connection >> text=is away since")
    assert page.locator("#round-0").count() == 1  # the last state stays
    colours = "() => getComputedStyle(document.getElementById('head')).filter"
    assert page.evaluate(colours) == "grayscale(1)"
    scene.fed.serve()
    page.wait_for_selector("#connection .away", state="detached")
    assert page.evaluate(colours) == "none"
    shown = page.locator("#feed li").count()
    page.wait_for_selector(f"#feed li:nth-child({shown + 1})")
    scene.fed.admin("stop", run, "--yes", code=None)
    screen.context.close()


@pytest.mark.full
def test_hostile_names_and_reasons_are_text(stage: Stage, browser: "Browser", served_here: Served) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", name="hostile", more="selection.minimum = 2\nselection.quorum = 0.1")
    orders = {player: player.order() for player in (ann, ben)}
    ann.reply(orders[ann])
    ben.decline(orders[ben], "training", HOSTILE)
    stage.play(run, ann, ben)
    screen = Screen(browser, NARROW)
    for path in (f"/runs/{run}", f"/runs/{run}/rounds/0", "/members/ben", "/log", "/"):
        screen.page.goto(web_server.entrance(served_here.base, served_here.console.keys, path))
        # The entrance's page sends the browser on: goto() returns before the screen has its style sheets.
        screen.page.wait_for_url(f"{served_here.base}{served_here.root}{path}", wait_until="load")
        assert screen.page.locator("img").count() == 0
        text = screen.page.inner_text("body")
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert fits(screen.page), path
    assert screen.problems == []
    screen.context.close()


BROKEN_WORDS = """() => {
  const broken = [], words = /(?<![\\p{L}\\p{N}])\\p{L}+(?![\\p{L}\\p{N}])/gu;
  const texts = document.createTreeWalker(document.querySelector(".log"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(words)) {
    const range = document.createRange();
    range.setStart(texts.currentNode, word.index);
    range.setEnd(texts.currentNode, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) broken.push(word[0]);
  }
  return broken;
}"""


@pytest.mark.full
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_log_breaks_no_words(stage: Stage, browser: "Browser", served_here: Served, width: int) -> None:
    run, players = stage.begin("ann", "ben", name="logged", more="selection.minimum = 2")
    stage.complete(run, *players)
    stage.served.command("client", "nobody-here", code=1)  # a refusal with words
    screen = Screen(browser, width)
    screen.page.goto(web_server.entrance(served_here.base, served_here.console.keys, "/log"))
    screen.page.wait_for_url(f"{served_here.base}{served_here.root}/log", wait_until="load")
    assert [word for word in screen.page.evaluate(BROKEN_WORDS) if len(word) > 2] == []
    assert fits(screen.page)
    screen.context.close()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_screen_is_accessible_fits_and_is_legible_in_a_run_and_without_a_coordinator(
    scene: Scene, browser: "Browser"
) -> None:
    first, second = scene.run("first"), scene.run("second")
    for run in (first, second):
        scene.fed.wait_completed(run)
    now = scene.run("now", rounds=2000)
    paths = (
        "/", f"/runs/{first}", f"/runs/{now}", f"/runs/{first}/rounds/1", "/members/hospital-a",
        f"/compare?run={first}&run={second}", "/log", "/system",
    )  # fmt: skip
    screen = Screen(browser)
    page = scene.open(screen, f"/runs/{now}")
    page.wait_for_selector("#round-0")
    for away in (False, True):
        if away:
            scene.fed.serving.kill()
            page.wait_for_selector("#connection >> text=is away since")
        for width, scheme in product((WIDE, NARROW), SCHEMES):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            for path in paths:
                page.goto(f"{scene.address}{path}")
                page.wait_for_selector("h1")
                if "/runs/" in path and "rounds" not in path:
                    page.wait_for_selector("#chart canvas")
                assert violations(page) == [], (path, width, scheme, away)
                assert fits(page), (path, width, scheme, away)
                assert smallest_text(page) >= 11, (path, width, scheme, away)
        assert away or scene.fed.query("select state from runs where run_id = :run", run=now)[0][0] == "RUNNING"
        complaints = [problem for problem in screen.problems if not (away and "status of 503" in problem)]
        assert complaints == []
    scene.fed.serve()
    scene.fed.admin("stop", now, "--yes", code=None)
    screen.context.close()


@pytest.mark.full
def test_the_keyboard_alone_reaches_a_round(scene: Scene, browser: "Browser") -> None:
    run = scene.run("keys")
    scene.fed.wait_completed(run)
    screen = Screen(browser)
    page = scene.open(screen)

    def go(href: str) -> None:
        for _ in range(200):
            page.keyboard.press("Tab")
            focused = page.evaluate("document.activeElement.getAttribute('href') || ''")
            if focused.endswith(href):  # after the root
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
                page.keyboard.press("Enter")
                return
        raise AssertionError(f"no tab stop leads to {href}")

    page.wait_for_selector(f"#run-{run}")
    go(f"/runs/{run}")
    page.wait_for_url(f"**/runs/{run}")
    go(f"/runs/{run}/rounds/2")
    page.wait_for_url("**/rounds/2")
    page.keyboard.press("Tab")
    screen.context.close()


@pytest.mark.full
def test_a_page_says_that_the_console_has_ended_and_a_new_session_is_needed_after_its_restart(
    scene: Scene, browser: "Browser"
) -> None:
    screen = Screen(browser)
    page = scene.open(screen)
    scene.console.kill()
    page.wait_for_selector("body.lost")
    scene.restart()
    screen.context.close()


@pytest.mark.full
@pytest.mark.parametrize("kills", [3, 50])
def test_a_console_that_is_killed_again_and_again_changes_nothing_in_a_run(scene: Scene, kills: int) -> None:
    quiet = scene.run(f"quiet-{kills}", rounds=4)
    undisturbed = scene.fed.wait_completed(quiet)
    run = scene.run(f"killed-{kills}", rounds=4)
    for _ in range(kills):
        scene.restart()
    assert scene.fed.wait_completed(run) == undisturbed


@pytest.mark.full
def test_the_process_list_shows_no_key(scene: Scene) -> None:
    key = re.search(r"key=([\w-]+)", scene.url)
    assert key is not None
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert key[1].encode() not in process.read_bytes()
        except OSError:
            continue
