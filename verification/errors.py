"""The findings of a verification."""

from dataclasses import dataclass


class Wrong(Exception):
    """A part of the bundle does not follow from the signed messages. The message names it."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The findings about one round.

    Attributes:
        number: of the round, from 0.
        words: the verified parts, as text.
        missing: the reasons why parts could not be verified; empty if all were.
    """

    number: int
    words: str
    missing: tuple[str, ...] = ()
