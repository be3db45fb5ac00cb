"""Lists in pages, so that no answer grows with the federation's age or size."""

from collections.abc import Sequence
from typing import TypeVar

from federation.refusals import Refusal

T = TypeVar("T")


def size_of_page(wanted: int, most: int) -> int:
    """How many items a page has: as many as the caller wants, and at most `most`."""
    return min(wanted, most) if wanted else most


def number_in(token: str) -> int:
    """A page token that is a number; 0 for the first page.

    Raises:
        Refusal: `argument`.
    """
    if not token:
        return 0
    if not (token.isascii() and token.isdecimal() and len(token) <= 9):
        raise Refusal("argument", f"{token[:20]!r} is not a page token of this list: give next_page_token of an answer")
    return int(token)


def page(found: Sequence[T], size: int) -> tuple[Sequence[T], bool]:
    """The page, and whether there is another, of a query for one item more than a page has."""
    return found[:size], len(found) > size
