"""Makes HTML of pages: their parts from templates, which escape every text, and the skeleton around them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import Message

from fedpareto import formatting
from fedpareto.admin_messages import name_of
from fedpareto.web.console.federation_reader import Reader
from fedpareto.web.console.view import PageView
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.rendering import environment
from fedpareto.web.pages.skeleton import Link, WebPage, served
from fedpareto.web.serving.security import ICON

SCRIPTS = ("htmx.min.js", "sse.min.js", "uPlot.iife.min.js", "console.js")
STYLES = ("style.css", "uPlot.min.css", "console.css")
_LAYOUT = "layout"
_NAVIGATION = {"/": "Federation", "/compare": "Compare", "/log": "Log", "/system": "System"}


def clock(message: Message, field: str) -> str:
    """A time of a message in the local zone: today's by the clock, another day's with its date; "" if unset."""
    return formatting.moment(getattr(message, field)) if message.HasField(field) else ""


def _nobreak(text: str) -> str:
    """A sentence in which no line begins with a percent sign."""
    return text.replace(" %", "\u00a0%")


def _actor(text: str, federation: str) -> str:
    """An actor of the audit log: "member hospital-a" for the URI of its certificate; other texts stay as they are."""
    kind, _, name = text.removeprefix(f"fedpareto://{federation}/").partition("/")
    title = {"client": "member", "admin": "administrator"}.get(kind)
    return f"{title} {name}" if title and name and text.startswith("fedpareto://") else text


@dataclass(frozen=True)
class ConsoleSite:
    """What the pages say about where they are.

    `command` begins the commands to copy, such as "fedpareto admin --home DIR"; `home` ends those of other groups, such
    as " --home DIR", empty for the usual directory.
    """

    federation: str
    administrator: str
    command: str = "fedpareto admin"
    home: str = ""


class Renderer:
    """Makes HTML; `root` begins all addresses; `version` is of the scripts and style sheets, and part of their own."""

    def __init__(self, site: ConsoleSite, root: str, version: str) -> None:
        self._environment = environment("fedpareto.web.console")
        names = ("number", "percent", "size", "seconds", "span", "short", "local", "when", "moment", "whole", "UNKNOWN")
        self._environment.globals |= {name: getattr(formatting, name) for name in names}
        self._environment.globals |= {"clock": clock, "name_of": name_of, "site": site, "root": root}
        self._environment.filters["nobreak"] = _nobreak
        self._environment.filters["actor"] = partial(_actor, federation=site.federation)
        self._environment.globals["recorded"] = formatting.recorded
        self._environment.globals["ui"] = self._environment.get_template("macros.html").module
        self._root, self._version = root, version

    def parts(self, view: PageView, reader: Reader) -> dict[str, str]:
        """The parts of a page that are kept up to date, by the id of their element."""
        template = self._environment.get_template(view.template)
        values = {"connection": reader.connection, "origin": reader.names.origin, **view.values}
        made = {
            name: "".join(block(template.new_context(values))).strip()
            for name, block in template.blocks.items()
            if name != _LAYOUT
        }
        return {**self.common(reader), **view.parts, **made}

    def common(self, reader: Reader) -> dict[str, str]:
        """The parts that every page has."""
        return {"connection": self._block("common.html", "connection", {"connection": reader.connection})}

    def page(
        self, view: PageView, parts: Mapping[str, str], reader: Reader, *, nav: str, stream: str, token: str
    ) -> str:
        """A whole page, whose `parts` are kept up to date by a stream."""
        shown = {name: Html(part) for name, part in parts.items()}
        values = {"origin": reader.names.origin, **view.values, "parts": shown, "token": token}
        body = self._block(view.template, _LAYOUT, values)
        links = tuple(Link(title, self._root + href, current=href == nav) for href, title in _NAVIGATION.items())
        header = self._block("common.html", "header", {"parts": shown, "token": token})
        connection = Html(f'<div id="connection" sse-swap="connection" role="status">{parts["connection"]}</div>')
        page = WebPage(
            title=f"{view.title} · fedpareto console",
            body=[connection, Html(body)],
            nav=links,
            nav_label="Console",
            header=[Html(header)],
        )
        return served(
            page,
            icon=self._root + ICON,
            styles=self._addresses(STYLES),
            scripts=self._addresses(SCRIPTS),
            attributes={"hx-ext": "sse", "sse-connect": self._root + stream},
        )

    def _addresses(self, names: Sequence[str]) -> list[str]:
        return [f"{self._root}/static/{name}?{self._version}" for name in names]

    def problem(self, status: int, text: str) -> str:
        """A page that says why there is no other."""
        body = self._block("common.html", "problem", {"status": status, "text": text})
        return served(
            WebPage(title="fedpareto console", body=[Html(body)]),
            icon=self._root + ICON,
            styles=self._addresses(STYLES),
        )

    def _block(self, template_name: str, block: str, values: Mapping[str, Any]) -> str:
        template = self._environment.get_template(template_name)
        return "".join(template.blocks[block](template.new_context(dict(values))))
