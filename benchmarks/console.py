"""The operators' console: the first screen of a large run, the cost of a new round, memory, and the coordinator's CPU.

A coordinator serves a record with a paused run of `--rounds` rounds and `--members` members, which is written into its
database. Chromium shows the run in a console. Then rounds are added one by one: `--updates` of them, the first
`--measured` with all that they cost. At the end `--tabs` pages are open for `--seconds`. Needs Playwright and chromium.
"""

import gc
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from measuring import Document, cpu_seconds, lone_coordinator, progress, temporary_federation

from coordinator.home import CoordinatorHome
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from storage.database import Database
from storage.states import RunState
from tests.fedpareto.console.scene import Served, served
from tests.harness import Federation, wait_for
from tests.large_record import add_members, add_rounds, add_run

FORMS = {
    "full": {"rounds": 1000, "members": 100, "updates": 1000, "measured": 20, "tabs": 10, "seconds": 60.0},
    "quick": {"rounds": 100, "members": 20, "updates": 40, "measured": 10, "tabs": 3, "seconds": 10.0},
    "smallest": {"rounds": 5, "members": 3, "updates": 3, "measured": 2, "tabs": 1, "seconds": 0.5},
}
NAME = "large"
TASKS = """() => { window.longTasks = [];
    new PerformanceObserver((list) => list.getEntries().forEach((entry) => longTasks.push(entry.duration)))
        .observe({ type: "longtask" }); }"""


def measure(rounds: int, members: int, updates: int, measured: int, tabs: int, seconds: float) -> Document:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {"problem": "Playwright is not installed"}
    chromium = shutil.which("chromium")
    if chromium is None:
        return {"problem": "chromium is not installed"}
    with temporary_federation() as fed, record(fed, rounds, members, updates) as (database, run):
        coordinator = lone_coordinator(fed)
        progress("waiting until the coordinator rests")
        wait_for(lambda: load(coordinator.popen.pid) < 0.1, "the coordinator to rest", 600)
        with served(fed.home / "admin", pause=0.02) as console, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            wait_for(lambda: console.reader.lists is not None, "the console to read the lists", 600)
            scene = Scene(fed, console, browser, database, run, members, coordinator.popen.pid)
            document = scene.first_screens()
            document |= scene.new_rounds(rounds, updates, measured)
            document |= scene.many_tabs(rounds + updates, tabs, seconds)
            browser.close()
    return document


def load(pid: int) -> float:
    """The share of a processor that a process takes in the next second."""
    before = cpu_seconds(pid)
    time.sleep(1.0)  # the second that is measured
    return cpu_seconds(pid) - before


@contextmanager
def record(fed: Federation, rounds: int, members: int, updates: int) -> Iterator[tuple[Database, str]]:
    """The database of a federation, with a run of which `rounds` rounds have ended."""
    progress(f"writing a record of {rounds} rounds with {members} members")
    home = CoordinatorHome.load(fed.home)
    database = home.open_database(durable=False)
    database.entry_key = home.log_key.entry_key
    try:
        add_members(database, members)
        planned = rounds + updates + 1000
        yield database, add_run(database, NAME, rounds=planned, done=rounds, members=members, state=RunState.PAUSED)
    finally:
        database.close()


class Scene:
    """A console, and a browser that shows the run."""

    def __init__(
        self, fed: Federation, console: Served, browser: Any, database: Database, run: str, members: int, pid: int
    ) -> None:
        self.console, self.browser, self.database = console, browser, database
        self.run, self.members, self.pid = run, members, pid
        self.admin = AdminStub(fed.administrator())
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.received = 0
        self.paused = True

    def page(self, path: str) -> Any:
        page = self.context.new_page()
        page.set_default_timeout(120_000)
        session = self.context.new_cdp_session(page)
        session.send("Network.enable")
        session.on("Network.dataReceived", self._count)
        page.add_init_script(f"({TASKS})()")
        page.goto(f"{self.console.base}{path}")
        return page

    def _count(self, event: dict[str, Any]) -> None:
        self.received += event["encodedDataLength"]

    def first_screens(self) -> Document:
        progress("first screens")
        self.context.add_cookies([self._cookie()])
        times = []
        for held in (False, True):
            if held:
                wait_for(lambda: self.console.reader.run(self.run).complete, "all rounds to be read", 600)
            self.received, began = 0, time.perf_counter()
            page = self.page(f"/runs/{self.run}")
            page.wait_for_selector("#head .verdict")
            page.wait_for_selector("#table tbody tr")
            times.append(time.perf_counter() - began)
            page.wait_for_selector("#chart canvas")
            if held:
                page.wait_for_timeout(1000)
                document = {
                    "first screen, run not held (s)": times[0],
                    "first screen, run held (s)": times[1],
                    "page with scripts and chart (bytes)": self.received,
                    "nodes": page.evaluate("document.querySelectorAll('*').length"),
                }
            page.close()
        return document

    def _cookie(self) -> dict[str, str]:
        name, _, value = self.console.cookie.partition("=")
        return {"name": name, "value": value, "url": self.console.base}

    def add_round(self, page: Any, number: int) -> None:
        """Adds a round, and waits until the page shows it. Resuming or pausing wakes watchers; nobody attends."""
        add_rounds(self.database, self.run, number, number + 1, self.members)
        if self.paused:
            self.admin.ResumeRun(v1.ResumeRunRequest(run=self.run))
        else:
            self.admin.PauseRun(v1.PauseRunRequest(run=self.run))
        self.paused = not self.paused
        page.locator(f"#round-{number}").wait_for(state="attached")  # a handle of the element would keep it in memory

    def new_rounds(self, rounds: int, updates: int, measured: int) -> Document:
        page = self.page(f"/runs/{self.run}")
        page.wait_for_selector("#chart canvas")
        page.evaluate("longTasks.length = 0")
        costs, memory = [], list[tuple[float, float]]()
        for at in range(updates):
            before = self.received
            self.add_round(page, rounds + at)
            if at < measured:
                page.wait_for_timeout(300)
                costs.append(self.received - before)
            if at == measured:
                tasks = page.evaluate("longTasks")
            if at % max(1, updates // 10) == 0 or at == updates - 1:
                memory.append(self._memory(page))
            if at % 50 == 0:
                progress(f"update {at} of {updates}")
        tasks = tasks if updates > measured else page.evaluate("longTasks")
        page.close()
        (browser_first, console_first), (browser_last, console_last) = memory[min(1, len(memory) - 1)], memory[-1]
        return {
            "a new round: median (bytes)": statistics.median(costs),
            "a new round: most (bytes)": max(costs),
            "tasks of the browser over 50 ms": len(tasks),
            "longest of them (ms)": max(tasks, default=0.0),
            "updates": updates,
            "browser's heap over the updates (MB)": [{"heap": heap / 1e6} for heap, _ in memory],
            "browser's heap after a tenth of them (MB)": browser_first / 1e6,
            "browser's heap after all (MB)": browser_last / 1e6,
            "console's memory after a tenth (MB)": console_first / 1e6,
            "console's memory after all (MB)": console_last / 1e6,
        }

    def _memory(self, page: Any) -> tuple[float, float]:
        session = self.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        session.send("Performance.enable")
        metrics = {item["name"]: item["value"] for item in session.send("Performance.getMetrics")["metrics"]}
        session.detach()
        gc.collect()
        return metrics["JSHeapUsedSize"], psutil.Process().memory_info().rss

    def many_tabs(self, number: int, tabs: int, seconds: float) -> Document:
        """The coordinator's CPU while pages are open and a round ends every few seconds."""
        progress(f"{tabs} pages are open for {seconds:g} s")
        shares = {}
        for count in (0, tabs):
            contexts = [self.browser.new_context() for _ in range(count)]  # one browser has six connections to a server
            for context in contexts:
                context.add_cookies([self._cookie()])
                page = context.new_page()
                page.goto(f"{self.console.base}/runs/{self.run}", timeout=120_000)
                page.wait_for_selector("#chart canvas", timeout=120_000)
            began, before = time.monotonic(), cpu_seconds(self.pid)
            while time.monotonic() < began + seconds:
                time.sleep(min(5.0, seconds / 2))  # the time that is measured, in steps
            shares[count] = (cpu_seconds(self.pid) - before) / (time.monotonic() - began)
            for context in contexts:
                context.close()
        return {
            "coordinator's CPU without a page": shares[0],
            f"coordinator's CPU with {tabs} pages": shares[tabs],
        }
