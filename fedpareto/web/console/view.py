"""A page as data: its template, what the template shows, and when it has to be made again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import QueryParams

from fedpareto.web.console.federation_reader import PageError, Reader


@dataclass(frozen=True)
class PageRequest:
    """What a browser asked for: the path's parameters, and those after the question mark; for whom the page is."""

    path: str
    parameters: Mapping[str, str]
    query: QueryParams
    token: str = ""
    administrator: str = ""

    def number(self, name: str, *, default: int, least: int = 0, most: int = 2**53) -> int:
        """A number of the path or after the question mark.

        Raises:
            PageError: 400: it is none, or out of bounds.
        """
        text = self.parameters.get(name, self.query.get(name, ""))
        if not text:
            return default
        digits = text.removeprefix("-") if least < 0 else text
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 16 and least <= int(text) <= most):
            raise PageError(400, f"{name} must be a whole number from {least} to {most}.")
        return int(text)

    def choice(self, name: str, choices: Mapping[str, str]) -> str:
        """One of some words after the question mark; the first of `choices` if none is given.

        Raises:
            PageError: 400: it is another word.
        """
        word = self.query.get(name, "") or next(iter(choices))
        if word not in choices:
            raise PageError(400, f"{name} must be one of {', '.join(filter(None, choices))}.")
        return word


@dataclass(frozen=True)
class PageView:
    """A page: `template` is the name of its file; each block of it, but "layout", is a part that is kept up to date.

    `parts` are further such parts, by the id of their element.
    """

    title: str
    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Screen:
    """How a page is made. `version` gives a value that changes when the page has to be made again."""

    view: Callable[[Reader, PageRequest], PageView]
    version: Callable[[Reader, PageRequest], object]
    nav: str  # the entry of the navigation that it belongs to
