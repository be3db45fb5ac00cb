"""The member's console in a browser: every screen of a full home, and of a site in a run and without a coordinator."""

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from typing import TYPE_CHECKING

import pytest

from fedpareto.web.serving import web_server
from tests.browsers import (
    NARROW,
    SCHEMES,
    WIDE,
    Scheme,
    Screen,
    another_server,
    chromium,
    fits,
    smallest_text,
    violations,
)
from tests.fedpareto.web.site.scene import (
    HOSTILE,
    MOST_ROWS,
    MOST_STATEMENTS,
    SCREENS,
    Site,
    counted_reads,
    fill,
    filled,
    request,
    run_address,
    served_site,
)
from tests.harness import Federation, federation, wait_for
from worker.home import WorkerHome
from worker.site.run_requests import RunsFile

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.full

RUNS = 500
CLIENTS = ("hospital-a", "hospital-b", "hospital-c")
SPEC = """
task = "digits"
rounds = 5000
seed = 11
train.epochs = 1
train.deadline_seconds = 300
selection.minimum = 2
evaluate.deadline_seconds = 300
"""


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with served_site(filled(tmp_path_factory.mktemp("site"), RUNS)) as made:
        yield made


def check_page(page: "Page", screen: Screen, path: str) -> None:
    """The page is accessible, legible and as wide as the screen; names are text, and the browser does not complain."""
    assert violations(page) == [], path
    assert fits(page), path
    assert smallest_text(page) >= 11, path
    assert screen.problems == [], path
    text = page.inner_text("body")
    assert (page.locator("img").count(), "\x1b" in text, "\u202e" in text) == (0, False, False), path


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_screen_of_500_runs_is_accessible_fits_and_shows_hostile_names_as_text(
    site: Site, browser: "Browser", width: int, scheme: Scheme
) -> None:
    with closing(RunsFile(site.home.runs)) as file:
        [hostile] = file.of(HOSTILE)
    screen = Screen(browser, width, scheme)
    page = screen.page
    page.goto(web_server.entrance(site.base, site.keys, "/"))
    page.wait_for_url(f"{site.base}{site.keys.root}/", wait_until="load")
    for path in (*SCREENS, "/runs?page=5", run_address(request(3)), run_address(hostile)):
        site.home.status.touch()  # as if the worker ran
        with counted_reads() as counts:
            page.goto(f"{site.base}{site.keys.root}{path}")
        assert counts["statements"] <= MOST_STATEMENTS, (path, counts)
        assert counts["rows"] <= MOST_ROWS, (path, counts)
        check_page(page, screen, path)
    # The page of another port is another user's, perhaps: the browser must not send it the cookie.
    with another_server() as (address, asked):
        for path in ("/", "/runs", f"{site.keys.root}x/"):
            page.goto(address + path)
    assert len(asked) >= 3
    assert [cookie for cookie in asked if cookie] == []
    screen.context.close()


class Owner:
    """The owner of a site of a federation, in a browser."""

    def __init__(self, fed: Federation, home: "Path", screen: Screen) -> None:
        arguments = ["-m", "fedpareto", "worker", "console", "--home", str(home), "--no-browser", "--json"]
        self.console = fed.spawn("site-console", [*arguments, "--port", "0"])
        self.screen, self.page = screen, screen.page
        wait_for(lambda: "}" in self.console.text, "the console to print its address")
        printed = json.loads(self.console.text)
        self.address = printed["address"]
        self.page.goto(printed["url"])
        self.page.wait_for_url(f"{self.address}/", wait_until="load")

    def sees(self, path: str, words: str) -> None:
        """Loads a page until it says this."""

        def told() -> bool:
            self.page.goto(self.address + path)
            return words in self.page.inner_text("main")

        wait_for(told, f"{path} to say {words!r}")


@pytest.mark.timeout(1800)
def test_an_owner_with_500_runs_approves_one_pauses_and_looks_back_also_while_the_coordinator_is_away(
    tmp_path: "Path", browser: "Browser"
) -> None:
    with federation(tmp_path) as fed:
        fed.serve()
        homes = [fed.join(client) for client in CLIENTS]
        (homes[0] / "policy.toml").write_text('approve = "each-run"\n')
        fill(WorkerHome(homes[0]), RUNS)
        for client in CLIENTS:
            fed.work(client)
        fed.attending(*CLIENTS)
        owner = Owner(fed, homes[0], Screen(browser))
        owner.sees("/", "Connected since")
        run = fed.submit("asked", SPEC)
        owner.sees("/runs?show=undecided", "asked")
        owner.page.goto(f"{owner.address}/")
        owner.page.click("text=runs wait for your decision")
        owner.page.click("th a >> text=asked")
        owner.page.wait_for_selector("h2 >> text=Your decision")
        text = owner.page.inner_text("main")
        assert "This run waits for your decision." in text
        assert "each update at most" in text
        owner.page.click("button >> text=Approve")
        owner.page.wait_for_selector("text=Your worker answers: accepted.")
        approved = owner.page.url.removeprefix(owner.address)
        owner.sees("/left", "accepted")
        owner.page.goto(f"{owner.address}/")
        owner.page.click("button >> text=Pause")
        owner.page.wait_for_selector("button >> text=Resume")
        wait_for(lambda: paused(fed) == ["hospital-a"], "the coordinator to know of the pause")
        owner.page.click("button >> text=Resume")
        wait_for(lambda: paused(fed) == [], "the coordinator to know of its end")
        check_screens(owner, approved)
        fed.serving.kill()
        owner.sees("/", "Not connected since")
        check_screens(owner, approved)
        fed.serve()
        owner.sees("/", "Connected since")
        fed.admin("stop", run, "--yes")
        fed.wait_ended(run)
        fed.fedpareto("worker", "model", run, "--home", str(homes[0]), "--out", str(tmp_path / "model.safetensors"))
        owner.sees("/results", "asked")
        owner.page.click("text=Sign out")
        owner.page.wait_for_selector("text=You have signed out.")
        owner.screen.problems.clear()  # the browser notes the answer 401
        owner.page.goto(f"{owner.address}/left")
        assert "press Enter in the terminal" in owner.page.inner_text("main")
        owner.screen.context.close()


def paused(fed: Federation) -> list[str]:
    return [client["client_id"] for client in fed.admin("clients")["clients"] if client.get("paused")]


def check_screens(owner: Owner, run: str) -> None:
    """Checks every screen, and that of a run, in each width and each scheme of colours."""
    for width, scheme in product((WIDE, NARROW), SCHEMES):
        owner.page.set_viewport_size({"width": width, "height": 900})
        owner.page.emulate_media(color_scheme=scheme)
        for path in (*SCREENS, "/runs?page=5", run, run_address(request(RUNS + 1, HOSTILE))):
            owner.page.goto(owner.address + path)
            check_page(owner.page, owner.screen, path)
