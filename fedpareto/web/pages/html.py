"""HTML that is made of elements: a value that is not `Html` is text, and is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

_VOID = frozenset({"meta", "br", "link"})
_STACKED = 4  # a table with more columns than that becomes a list of cards on a narrow screen


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()

    def __html__(self) -> str:
        """For templates that escape other text."""
        return self


def text(value: str) -> Html:
    """Anybody's text as HTML."""
    return value if isinstance(value, Html) else Html(escape(value))


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """An element; in names of attributes, `_` stands for `-`, and one at the end is dropped (`class_`).

    An attribute whose value is None is left out, one whose value is True has none.
    """
    attribute_text = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{attribute_text}>")
    return Html(f"<{name}{attribute_text}>{''.join(map(text, children))}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Several pieces, one after the other."""
    return Html("".join(map(text, parts)))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, caption: str = "") -> Html:
    """A table of numbers, whose first `words` columns are words; each row begins with its name."""
    stacked = len(columns) > _STACKED

    def cell(at: int, value: str) -> Html:
        look = None if at < words else "n"
        if at == 0:
            return tag("th", value, scope="row", class_=look)
        return tag("td", value, class_=look, data_label=columns[at] if stacked else None)

    head = tag(
        "tr", *(tag("th", name, scope="col", class_=None if i < words else "n") for i, name in enumerate(columns))
    )
    body = [tag("tr", *(cell(at, value) for at, value in enumerate(row))) for row in rows]
    parts = [tag("caption", caption)] if caption else []
    parts += [tag("thead", head), tag("tbody", *body)]
    return tag("table", *parts, class_="stacked" if stacked else None)


def facts(rows: Iterable[tuple[str, str]]) -> Html:
    """Names and values, one below the other."""
    return tag("dl", *(join([tag("dt", name), tag("dd", value)]) for name, value in rows), class_="facts")


def points(places: Sequence[tuple[float, float]]) -> str:
    """The value of the attribute of that name."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def share(value: float) -> str:
    """A place along a drawing, from 0 at its left end to 1 at its right end."""
    return f"{100 * value:.2f}".rstrip("0").rstrip(".") + "%"


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _short(value: object) -> str:
    """A coordinate to a hundredth; anything else as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
