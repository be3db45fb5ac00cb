"""Text that came from outside, made safe to show: on a terminal, in a log line, in a table.

A control character can move the cursor, change colours or rewrite what stands there; a bidirectional control can turn
the order of the letters around; a line break can forge a further line of a log.
"""

LIMIT = 1000


def escaped(text: str, limit: int = LIMIT) -> str:
    r"""Returns `text` on one line, with each character that is not printable shown as a visible escape.

    Escaped are controls, line and paragraph separators, bidirectional and other format characters, lone surrogates,
    characters that Unicode does not define, and every space but the ordinary one: "\x1b[2J" becomes the seven letters
    `\x1b[2J`. Letters of all scripts stay. Backslashes stay as they are, so that escaping twice changes nothing.

    Args:
        text: from a peer, a file or a database.
        limit: characters of `text` to show at most; a longer text ends with its full length.
    """
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else _escape(letter) for letter in shown)
    return shown if len(text) <= limit else f"{shown}... ({len(text)} characters)"


def escaped_lines(text: str, limit: int = LIMIT) -> str:
    """Returns `text` with its lines and tabs, and with each of its lines escaped.

    Args:
        text: a document of several lines, from a peer, a file or a database.
        limit: characters of one line to show at most, tabs aside.
    """
    return "\n".join("\t".join(escaped(part, limit) for part in line.split("\t")) for line in text.split("\n"))


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
