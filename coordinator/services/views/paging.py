"""Lists in pages, so that no answer grows with the federation's age or size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from federation.refusals import Refusal


def foreign_token(token: str) -> Refusal:
    """The refusal of a page token that no answer has given."""
    return Refusal("argument", f"{token[:20]!r} is not a page token of this list: give next_page_token of an answer")


def size_of_page(wanted: int, most: int) -> int:
    """The number of items of a page: as many as the caller wants, and at most `most`."""
    return min(wanted or most, most)


@dataclass(frozen=True)
class Page:
    """A page of a list whose page tokens are numbers: `start` items are before it, and it has `size` items."""

    start: int
    size: int

    @classmethod
    def of(cls, request: Any, most: int) -> Self:
        """The page that a request asks for.

        Raises:
            Refusal: `argument`.
        """
        token = request.page_token or "0"
        if not (token.isascii() and token.isdecimal() and len(token) <= 9):
            raise foreign_token(token)
        return cls(int(token), size_of_page(request.page_size, most))

    def next_token(self, items: Sequence[object]) -> str:
        """The token of the next page, by a query for one item more; empty after the last page."""
        return str(self.start + self.size) if len(items) > self.size else ""
