"""Text for people: counts in words, and text from outside, made safe for a terminal, a log line or a table.

A control character can move the cursor or change colours; a bidirectional control can reverse the order of letters; a
line break can forge a further line of a log.
"""

import re
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

LIMIT = 1000
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\([^)\s]*\)")  # of Markdown; the words may have brackets
_WORD = 64  # characters of a word that is compared
_KNOWN = 2000  # words that it is compared with


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: "; did you mean 'runs'?", or empty if no known word is like it."""
    words = {each.lower(): each for each in islice(known, _KNOWN) if len(each) <= _WORD}
    near = get_close_matches(word[:_WORD].lower(), words, n=1, cutoff=0.7)
    return f"; did you mean {words[near[0]]!r}?" if near else ""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 round", "2 rounds"; `plural` is for nouns that take more than an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def without_links(text: str) -> str:
    """A text in Markdown with the words of its links alone, for a terminal or a comment."""
    return _LINK.sub(r"\1", text)


def comment(text: str) -> list[str]:
    """A text in Markdown as lines of a comment in TOML, at most 120 characters each."""
    return [f"# {line}" for line in textwrap.wrap(without_links(text), 118, break_on_hyphens=False)]


def escaped(text: str, limit: int = LIMIT) -> str:
    r"""Returns `text` on one line, with each character that is not printable shown as a visible escape.

    Escaped are controls, line and paragraph separators, format characters, lone surrogates, undefined characters, and
    every space but the ordinary one: "\x1b[2J" becomes the seven letters `\x1b[2J`. Backslashes stay, so that escaping
    twice changes nothing. The result has at most `limit` characters, which must be 40 or more: a text that needs more
    is cut, and ends with its full length.
    """
    shown = text[: limit + 1]
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else _escape(letter) for letter in shown)
    if len(shown) <= limit:
        return shown
    end = f"... ({len(text)} characters)"
    return shown[: limit - len(end)] + end


def escaped_lines(text: str, limit: int = LIMIT) -> str:
    """Returns `text` with its lines and tabs, and with each part of a line escaped up to `limit` characters."""
    return "\n".join("\t".join(escaped(part, limit) for part in line.split("\t")) for line in text.split("\n"))


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
