"""The skeleton of every page: head, navigation, main part; in one file, or served with its style sheet beside it."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fedpareto.web.pages.html import Html
from fedpareto.web.pages.rendering import rendered

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
    return _document(page, policy=policy, sheet=Html(sheet))


def served(
    page: WebPage,
    *,
    icon: str,
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    attributes: dict[str, str] | None = None,
) -> Html:
    """A page that loads its icon, style sheets and scripts from these addresses; `attributes` are those of its body."""
    return _document(page, icon=icon, styles=styles, scripts=scripts, attributes=attributes or {})


def _document(page: WebPage, **values: Any) -> Html:
    unused = {"policy": "", "sheet": "", "icon": "", "styles": (), "scripts": (), "attributes": {}}
    return rendered("page.html", page=page, **{**unused, **values})
