"""The findings of a verification."""

from dataclasses import dataclass

from federation.errors import Error
from federation.text import escaped


class VerificationError(Error):
    """A part of the bundle does not follow from the signed messages. The message, of one line, names it."""

    def __init__(self, message: str) -> None:
        super().__init__(escaped(message))  # it quotes the bundle


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The findings about one round.

    Attributes:
        number: of the round, from 0.
        words: the verified parts, as text.
        missing: the reasons why parts could not be verified; empty if all were.
        absent: what the specification asks for, and the record lacks.
        measured: the metrics on record that only the coordinator measured: nothing that was signed gives them.
        unchecked: the metrics on record that need a blob which the bundle does not have.
    """

    number: int
    words: str
    missing: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
