"""A heat map: a row for each member, a column for each round."""

import math
from collections.abc import Sequence

from fedpareto.pages import drawing
from fedpareto.pages.html import Html, join, tag
from fedpareto.pages.scales import Format, cut
from fedpareto.series import known, mean

_COLUMNS = 360  # of more rounds, several are averaged
_SHADES = 12
_ROW, _LEAST_ROW, _MOST = 18.0, 4.0, 560.0  # pixels: of a row, if there are few and many of them, and of all


def heat(
    rounds: Sequence[int],
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    format_: Format,
    *,
    alt: str,
    words: str = "",
) -> Html:
    """Shades for `values` (a row for each name, a column for each round), from 0 to the largest; NaN is left blank.

    There is an element for each shade, not for each cell. `alt` and `words` are as for `drawing.plot`.
    """
    together = -(-len(rounds) // _COLUMNS)
    rows = [[mean(row[i : i + together]) for i in range(0, len(row), together)] for row in values]
    largest = max(known(value for row in rows for value in row), default=0.0)
    columns = len(rows[0]) if rows else 1
    row_height = min(_ROW, max(_LEAST_ROW, _MOST / max(len(names), 1)))
    height = row_height * len(names)
    cells = _cells(rows, largest)
    every = max(1, math.ceil(13 / row_height))
    labels = [
        tag("text", cut(name), x=0, dx=-8, y=(i + 0.5) * row_height + 4, text_anchor="end", class_="name")
        for i, name in enumerate(names)
        if i % every == 0
    ]
    places = [(i // together + 0.5) / columns for i in range(len(rounds))]
    parts = [
        drawing.stretched(height, cells, units=len(names), along=columns),
        *labels,
        drawing.round_axis(rounds, places, height),
    ]
    keys = [
        tag("span", tag("i", class_=f"key b0 o{step}"), f" {format_(largest * step / 4)}", class_="key-name")
        for step in range(5)
    ]
    averaged = [f"each column is the mean of {together} rounds"] if together > 1 else []
    return join([drawing.legend([*keys, *averaged]), drawing.plot(height, parts, alt=alt, words=words, look="rows")])


def _cells(rows: Sequence[Sequence[float]], largest: float) -> list[Html]:
    shades: dict[int, list[str]] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if math.isfinite(value):
                shade = round(_SHADES * (max(value, 0.0) / largest)) if largest > 0 else 0
                shades.setdefault(shade, []).append(f"M{j} {i}h1v1h-1z")
    return [
        tag("path", d="".join(squares), class_="f0", fill_opacity=0.06 + 0.94 * shade / _SHADES, stroke="none")
        for shade, squares in sorted(shades.items())
    ]
