"""The operators' console: the first screen of a large run, the cost of a new round, memory, and the coordinator's CPU.

A coordinator serves a record with a paused run of `--rounds` rounds and `--members` members, which is written into its
database. Chromium shows the run in a console. Then rounds are added one by one: `--updates` of them, the first
`--measured` with all that they cost. At the end `--tabs` pages are open for `--seconds`. Without
Playwright and chromium, nothing is measured.
"""

import gc
import statistics
import time
from contextlib import closing
from typing import Any

import psutil
import pytest
from measuring import Document, cpu_seconds, lone_coordinator, progress, temporary_federation

from coordinator.home import CoordinatorHome
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from storage.database import Database
from tests.browsers import chromium, chromium_path, nodes
from tests.fedpareto.web.console.scene import Served, served
from tests.harness import Federation, wait_for
from tests.large_record import add_members, add_rounds, add_run

FORMS = {
    "full": {"rounds": 1000, "members": 100, "updates": 1000, "measured": 20, "tabs": 10, "seconds": 60.0},
    "quick": {"rounds": 100, "members": 20, "updates": 40, "measured": 10, "tabs": 3, "seconds": 10.0},
    "smallest": {"rounds": 5, "members": 3, "updates": 3, "measured": 2, "tabs": 1, "seconds": 0.5},
}
TASKS = """() => { window.longTasks = [];
    new PerformanceObserver((list) => list.getEntries().forEach((entry) => longTasks.push(entry.duration)))
        .observe({ type: "longtask" }); }"""


def measure(rounds: int, members: int, updates: int, measured: int, tabs: int, seconds: float) -> Document:
    try:
        chromium_path()
    except pytest.skip.Exception as absent:
        return {"not measured": str(absent)}
    with temporary_federation() as fed, closing(opened(fed)) as database:
        progress(f"writing a record of {rounds} rounds with {members} members")
        add_members(database, members)
        run = add_run(database, "large", rounds=rounds + updates + 1000, done=rounds, members=members)
        pid = lone_coordinator(fed).popen.pid
        progress("waiting until the coordinator rests")
        wait_for(lambda: load(pid) < 0.1, "the coordinator to rest", 600)
        with served(fed.home / "admin", pause=0.02) as console, chromium() as browser:
            wait_for(lambda: console.reader.lists is not None, "the console to read the lists", 600)
            scene = Scene(fed, console, browser, run)
            document = scene.first_screens() | scene.new_rounds(database, members, rounds, updates, measured)
            return document | scene.many_tabs(pid, tabs, seconds)


def load(pid: int, seconds: float = 1.0) -> float:
    """The share of a processor that a process takes in the next seconds."""
    before, began = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)  # the time that is measured
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)


def opened(fed: Federation) -> Database:
    """The database of a federation, in which rounds can be recorded."""
    home = CoordinatorHome.load(fed.home)
    database = home.open_database(durable=False)
    database.entry_key = home.log_key.entry_key
    return database


class Scene:
    """A console, and a browser that shows the run."""

    def __init__(self, fed: Federation, console: Served, browser: Any, run: str) -> None:
        self.base, self.browser, self.run, self.reader = console.base + console.root, browser, run, console.reader
        name, _, value = console.cookie.partition("=")
        self.cookie = {"name": name, "value": value, "url": self.base}
        self.admin = AdminStub(fed.administrator())
        self.context = self.entered(viewport={"width": 1280, "height": 900})
        self.received = 0

    def entered(self, **options: Any) -> Any:
        """A new context of the browser, which has the session's cookie."""
        context = self.browser.new_context(**options)
        context.set_default_timeout(120_000)
        context.add_cookies([self.cookie])
        return context

    def page(self) -> Any:
        """The run's page, which counts what it receives."""
        page = self.context.new_page()
        session = self.context.new_cdp_session(page)
        session.send("Network.enable")
        session.on("Network.dataReceived", self._count)
        page.add_init_script(f"({TASKS})()")
        page.goto(f"{self.base}/runs/{self.run}")
        return page

    def _count(self, event: dict[str, Any]) -> None:
        self.received += event["encodedDataLength"]

    def first_screens(self) -> Document:
        progress("first screens")
        times = []
        for held in (False, True):
            if held:
                wait_for(lambda: self.reader.run(self.run).complete, "all rounds to be read", 600)
            self.received, began = 0, time.perf_counter()
            page = self.page()
            page.wait_for_selector("#head .verdict")
            page.wait_for_selector("#members tbody tr")
            times.append(time.perf_counter() - began)
            page.wait_for_selector("#chart canvas")
            page.wait_for_timeout(1000)
            shown = {"page with scripts and chart (bytes)": self.received, "nodes": nodes(page)}
            page.close()
        return {"first screen, run not held (s)": times[0], "first screen, run held (s)": times[1], **shown}

    def new_rounds(self, database: Database, members: int, rounds: int, updates: int, measured: int) -> Document:
        page = self.page()
        page.wait_for_selector("#chart canvas")
        page.evaluate("longTasks.length = 0")
        costs, memory, last = [], list[tuple[float, float]](), updates - 1
        for at in range(updates):
            before, number = self.received, rounds + at
            add_rounds(database, self.run, number, number + 1, members)
            if at % 2:  # resuming or pausing wakes watchers; nobody attends
                self.admin.PauseRun(v1.PauseRunRequest(run=self.run))
            else:
                self.admin.ResumeRun(v1.ResumeRunRequest(run=self.run))
            page.locator(f"#round-{number}").wait_for(state="attached")  # a handle of it would keep it in memory
            if at < measured:
                page.wait_for_timeout(300)
                costs.append(self.received - before)
                tasks = page.evaluate("longTasks")
            if at in (min(max(1, updates // 10), last), last):
                memory.append(self._memory(page))
            if at % 50 == 0:
                progress(f"update {at} of {updates}")
        page.close()
        (browser_first, console_first), (browser_last, console_last) = memory[0], memory[-1]
        return {
            "a new round: median (bytes)": statistics.median(costs),
            "a new round: most (bytes)": max(costs),
            "tasks of the browser over 50 ms": len(tasks),
            "longest of them (ms)": max(tasks, default=0.0),
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

    def many_tabs(self, pid: int, tabs: int, seconds: float) -> Document:
        """The coordinator's CPU while pages are open."""
        progress(f"{tabs} pages are open for {seconds:g} s")
        alone = load(pid, seconds)
        for _ in range(tabs):
            page = self.entered().new_page()  # of a context of its own: one browser has six connections to a server
            page.goto(f"{self.base}/runs/{self.run}")
            page.wait_for_selector("#chart canvas")
        shares = {"coordinator's CPU without a page": alone}
        return shares | {f"coordinator's CPU with {tabs} pages": load(pid, seconds)}
