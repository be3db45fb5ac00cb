"""The findings of a verification."""

from dataclasses import dataclass


class Wrong(Exception):
    """Something in the bundle does not follow from what was signed. The message names it."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was verified of one round.

    Attributes:
        number: of the round, from 0.
        words: what was verified, in words.
        missing: why something could not be verified; empty where everything was.
    """

    number: int
    words: str
    missing: tuple[str, ...] = ()
