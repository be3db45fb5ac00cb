"""HTML that is made of elements: a value that is not `Html` is text, and is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

_VOID = frozenset({"meta", "br"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: str) -> Html:
    """Anybody's text as HTML."""
    return value if isinstance(value, Html) else Html(escape(value))


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element; in names of attributes, `_` stands for `-`, and one at the end is dropped (`class_`)."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"' for key, value in attributes.items()
    )
    if name in _VOID:
        return Html(f"<{name}{attribute_text}>")
    return Html(f"<{name}{attribute_text}>{''.join(map(text, children))}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Several pieces, one after the other."""
    return Html("".join(map(text, parts)))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Html:
    """A table of numbers, whose first `words` columns are words."""

    def row(cell: str, values: Sequence[str]) -> Html:
        return tag(
            "tr", *(tag(cell, value, **({} if i < words else {"class_": "n"})) for i, value in enumerate(values))
        )

    return tag("table", tag("thead", row("th", columns)), tag("tbody", *(row("td", values) for values in rows)))


def points(places: Sequence[tuple[float, float]]) -> str:
    """The value of the attribute of that name."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _short(value: object) -> str:
    """A coordinate to a hundredth; anything else as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
