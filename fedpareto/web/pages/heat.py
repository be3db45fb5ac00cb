"""A heat map: a row for each member, a column for each round."""

import math
from collections.abc import Sequence
from itertools import groupby

from fedpareto.series import known, mean
from fedpareto.web.pages import drawing
from fedpareto.web.pages.html import Html, join, tag
from fedpareto.web.pages.scales import Format, cut

COLUMNS = 360  # of more rounds, several are averaged
_SHADES = 12
_ROW, _LEAST_ROW, _MOST = 18.0, 4.0, 560.0  # pixels: of a row, if there are few and many of them, and of all


def heat(
    columns: Sequence[object],
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    format_: Format,
    *,
    alt: str,
    words: str = "",
    largest: float | None = None,
    together: int = 1,
    named: bool = False,
) -> Html:
    """Shades for `values` (a row for each name, a column for each round), from 0 to the largest; NaN is left blank.

    There is an element for each shade, not for each cell. `alt` and `words` are as for `drawing.plot`; `largest` is the
    value of the darkest shade, None for the largest one. `columns` has the name of each column; each is the mean of
    `together` rounds. If they are `named`, they are no rounds but members, and every one has its name below.
    """
    averaged = -(-len(columns) // COLUMNS)
    rows = [[mean(row[i : i + averaged]) for i in range(0, len(row), averaged)] for row in values]
    darkest = max(known(value for row in rows for value in row), default=0.0) if largest is None else largest
    width = len(rows[0]) if rows else 1
    row_height = min(_ROW, max(_LEAST_ROW, _MOST / max(len(names), 1)))
    height = row_height * len(names)
    every = max(1, math.ceil(13 / row_height))
    labels = [
        tag("text", cut(name), x=0, dx=-8, y=(i + 0.5) * row_height + 4, text_anchor="end", class_="name")
        for i, name in enumerate(names)
        if i % every == 0
    ]
    places = [(i // averaged + 0.5) / width for i in range(len(columns))]
    parts = [
        drawing.stretched(height, [_cells(rows, darkest)], units=len(names), along=width),
        *labels,
    ]
    if named:
        names_below, room = drawing.slanted_names(list(map(str, columns)), places, height)
    else:
        names_below, room = drawing.bottom_axis(list(map(str, columns)), places, height, "round"), 0.0
    keys = [
        tag("span", tag("i", class_=f"key b0 o{step}"), f" {format_(darkest * step / 4)}", class_="key-name")
        for step in range(5)
    ]
    told = [f"each column is the mean of {averaged * together} rounds"] if averaged * together > 1 else []
    return join(
        [
            drawing.legend([*keys, *told]),
            drawing.plot(height + room, [*parts, names_below], alt=alt, words=words, look="rows"),
        ]
    )


def column(values: Sequence[float], at: int, largest: float) -> Html:
    """The cells of one column, to be put over column `at` of a map with the same rows and the same darkest value."""
    return _cells([[value] for value in values], largest, first=at)


def _cells(rows: Sequence[Sequence[float]], largest: float, first: int = 0) -> Html:
    """A path for each shade: a stroke of a row's height along cells of the same shade that stand side by side."""
    shades: dict[int, list[str]] = {}
    for i, row in enumerate(rows):
        for shade, cells in groupby(enumerate(row), key=lambda cell: _shade(cell[1], largest)):
            if shade is not None:
                places = [j for j, _ in cells]
                shades.setdefault(shade, []).append(f"M{first + places[0]} {i}h{len(places)}")
    paths = [
        tag("path", d="".join(strokes), stroke_opacity=f"{0.06 + 0.94 * shade / _SHADES:.2f}")
        for shade, strokes in sorted(shades.items())
    ]
    return tag("g", *paths, class_="cells", transform="translate(0 .5)")


def _shade(value: float, largest: float) -> int | None:
    if not math.isfinite(value):
        return None
    return round(_SHADES * min(max(value, 0.0) / largest, 1.0)) if largest > 0 else 0
