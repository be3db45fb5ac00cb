"""A JSON object of another party, read one entry at a time: a bad entry is refused before the next one takes memory."""

import json
from collections.abc import Callable, Iterator
from typing import Any


def entries(text: str, most: Callable[[str], int]) -> Iterator[tuple[str, Any]]:
    """The names and values of an object; `most` gives the characters that the value of a name may have.

    Raises:
        ValueError: it is not the JSON of an object, a value is too long, or a name appears twice.
        RecursionError: a value is nested too deeply.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    seen = set()
    at = _after("{", text, 0)
    more = not text.startswith("}", at)
    while more:
        if not text.startswith('"', at):
            raise ValueError(f"a name is expected at character {at}")
        name, at = decoder.raw_decode(text, at)
        if name in seen:
            raise ValueError("a name appears twice")
        seen.add(name)
        at = _after(":", text, _after_space(text, at))
        try:
            value, length = decoder.raw_decode(text[at : at + most(name)])
        except ValueError as error:
            raise ValueError(
                f"the value of {name[:80]!r} is no JSON of at most {most(name)} characters: {error}"
            ) from None
        yield name, value
        at = _after_space(text, at + length)
        if more := text.startswith(",", at):
            at = _after(",", text, at)
    if _after("}", text, at) != len(text):
        raise ValueError("it goes on after its end")


def _after(character: str, text: str, at: int) -> int:
    """The place after a character and the white space that follows. Raises ValueError if another one is there."""
    if not text.startswith(character, at):
        raise ValueError(f"{character!r} is expected at character {at}")
    return _after_space(text, at + 1)


def _after_space(text: str, at: int) -> int:
    while text.startswith((" ", "\n", "\t", "\r"), at):
        at += 1
    return at


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name appears twice")
    return values
