"""Debian's chromium, driven by Playwright, for tests of pages; skipped with a reason where either is absent."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Literal

import pytest

from tests.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = ROOT / "tests" / "vendored" / "axe.min.js"  # axe-core 4.14.1
NARROW, WIDE = 390, 1280  # pixels
WAITING = 60_000.0  # milliseconds that the browser waits for a condition
Scheme = Literal["light", "dark"]  # of colours
SCHEMES: tuple[Scheme, ...] = ("light", "dark")


def chromium_path() -> str:
    """Where the browser is; the test is skipped if this machine has none, or no Playwright."""
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return path


@contextmanager
def chromium() -> Iterator["Browser"]:
    """A browser; the test is skipped if this machine has none."""
    path = chromium_path()
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def violations(page: "Page") -> list[str]:
    """What axe-core finds on a page: rule, and the first element that breaks it."""
    found = page.evaluate(f"() => {{ {AXE.read_text()}; return axe.run(); }}")
    return [f"{item['id']}: {item['nodes'][0]['html'][:160]}" for item in found["violations"]]


def fits(page: "Page") -> bool:
    """True if nothing is wider than the screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def smallest_text(page: "Page") -> float:
    """The size of the smallest text that is shown, in pixels."""
    script = """() => Math.min(...[...document.querySelectorAll("body *")]
        .filter((item) => item.checkVisibility() && [...item.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
        .map((item) => parseFloat(getComputedStyle(item).fontSize)))"""
    return float(page.evaluate(script))


def nodes(page: "Page") -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


class Screen:
    """A page that notes what the browser complains about."""

    def __init__(self, browser: "Browser", width: int = WIDE, scheme: Scheme = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAITING)
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(f"a dialog: {dialog.message}"))


@contextmanager
def another_server() -> Iterator[tuple[str, list[str]]]:
    """A server on another port of this machine: its address, and the cookies that it gets with each request."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()
