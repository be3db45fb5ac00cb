"""Debian's chromium, driven by Playwright, for tests of pages; skipped with a reason where either is absent."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import pytest

from tests.paths import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = ROOT / "tests" / "vendored" / "axe.min.js"  # axe-core 4.14.1
NARROW, WIDE = 390, 1280  # pixels
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
