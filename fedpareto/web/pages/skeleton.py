"""The skeleton of every page: head, navigation, main part; in one file, or served with its style sheet beside it."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from fedpareto.web.pages.html import Html, join, tag

STYLE = files("fedpareto.web.pages").joinpath("style.css").read_text("utf-8")
"""The style sheet, to be served or put into the page."""


@dataclass(frozen=True)
class Link:
    """An entry of the navigation; `current` marks the page that is shown."""

    title: str
    href: str
    current: bool = False


@dataclass(frozen=True, kw_only=True)
class WebPage:
    """The content of a page.

    Attributes:
        title: of the browser's tab.
        body: the main part.
        nav: the navigation, which `nav_label` names to screen readers.
        header: further parts of the bar at the top.
    """

    title: str
    body: Sequence[str]
    nav: Sequence[Link] = ()
    nav_label: str = "Parts of this page"
    header: Sequence[str] = ()


def in_one_file(page: WebPage, *, more_style: str = "") -> Html:
    """A page in one file: the browser loads nothing else and runs no script, even if a text in it looks like one.

    The policy allows the page's own style sheet by its digest, and no other style.
    """
    sheet = f"\n{STYLE}{more_style}"
    digest = b64encode(sha256(sheet.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = [tag("meta", http_equiv="Content-Security-Policy", content=policy)]
    return _document(page, head, [Html(f"<style>{sheet}</style>")], {})


def served(
    page: WebPage, *, styles: Sequence[str], scripts: Sequence[str] = (), attributes: dict[str, str] | None = None
) -> Html:
    """A page that loads style sheets and scripts from these addresses; `attributes` are those of its body."""
    links = [tag("link", rel="stylesheet", href=style) for style in styles]
    links += [tag("script", src=script, defer=True) for script in scripts]
    return _document(page, [], links, attributes or {})


def _document(page: WebPage, first: Sequence[Html], last: Sequence[Html], attributes: dict[str, str]) -> Html:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        *first,
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", page.title),
        *last,
    )
    links = [tag("a", link.title, href=link.href, aria_current="page" if link.current else None) for link in page.nav]
    navigation = [tag("nav", *links, aria_label=page.nav_label)] if links else []
    body = [
        tag("a", "Skip to the content", href="#main", class_="skip"),
        tag("header", tag("div", tag("span", "fedpareto", class_="brand"), *navigation, *page.header, class_="bar")),
        tag("main", join(page.body), id="main", tabindex="-1"),
    ]
    return Html("<!doctype html>\n" + tag("html", head, tag("body", *body, **attributes), lang="en") + "\n")
