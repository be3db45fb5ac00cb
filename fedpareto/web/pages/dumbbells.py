"""Dumbbells: for each member a value before and one after, joined by a line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpareto.series import known
from fedpareto.web.pages import drawing
from fedpareto.web.pages.html import Html, join, share, tag
from fedpareto.web.pages.marks import GLYPHS, HOLLOW
from fedpareto.web.pages.scales import Axis, Scale, cut

_ROW, _RADIUS = 24.0, 5.0  # pixels


@dataclass(frozen=True)
class Dumbbell:
    """A row: `first` is NaN where only the last value is known; a `marked` row stands out."""

    name: str
    first: float
    last: float
    marked: bool = False


def dumbbells(
    rows: Sequence[Dumbbell],
    axis: Axis,
    *,
    names: tuple[str, str],
    alt: str,
    words: str = "",
    line: tuple[str, float] | None = None,
) -> Html:
    """A row for each member: a hollow mark for the first value, a filled one for the last.

    `names` are those of both values for the legend; `line` is a value to compare with, such as the mean, with its name.
    `alt` and `words` are as for `drawing.plot`.
    """
    values = [value for row in rows for value in (row.first, row.last)]
    scale = Scale(axis, [*values, *([line[1]] if line else [])], 0.0, 1.0)
    foot = _ROW * len(rows)
    parts = []
    for at, tick in ((share(scale.at(tick)), tick) for tick in scale.ticks):
        parts.append(tag("line", x1=at, x2=at, y1=0, y2=foot, class_="grid"))
        parts.append(tag("text", axis.format(tick), x=at, y=foot + 18, text_anchor="middle"))
    parts.append(tag("text", axis.name, x="50%", y=foot + 36, text_anchor="middle", class_="axis"))
    if line:
        at = share(scale.at(line[1]))
        parts.append(tag("line", tag("title", line[0]), x1=at, x2=at, y1=0, y2=foot, class_="guide"))
    parts += [_row(row, scale, axis, (i + 0.5) * _ROW, names) for i, row in enumerate(rows)]
    before, after = names
    keys = [
        tag("span", tag("span", glyph, class_="g0", aria_hidden="true"), f" {name}", class_="key-name")
        for glyph, name in ((HOLLOW[0], before), (GLYPHS[0], after))
        if name == after or known(row.first for row in rows)
    ]
    if line:
        keys.append(tag("span", tag("span", "┆", class_="soft", aria_hidden="true"), f" {line[0]}", class_="key-name"))
    return join([drawing.legend(keys), drawing.plot(foot, parts, alt=alt, words=words, look="rows")])


def _row(row: Dumbbell, scale: Scale, axis: Axis, y: float, names: tuple[str, str]) -> Html:
    before, after = (axis.format(value) if scale.known(value) else "–" for value in (row.first, row.last))
    colour, strong = (1, " strong") if row.marked else (0, "")
    told = (
        f"{row.name}: {names[0]} {before}, {names[1]} {after}" if math.isfinite(row.first) else f"{row.name}: {after}"
    )
    parts = [tag("title", told)]
    parts.append(tag("text", cut(row.name), x=0, dx=-12, y=y + 4, text_anchor="end", class_=f"name{strong}"))
    first, last = (scale.at(value) if scale.known(value) else None for value in (row.first, row.last))
    if first is not None and last is not None:
        parts.append(tag("line", x1=share(first), x2=share(last), y1=y, y2=y, class_=f"bell s{colour}"))
    if first is not None:
        parts.append(tag("circle", cx=share(first), cy=y, r=_RADIUS, class_=f"hollow s{colour}"))
    if last is not None:
        parts.append(tag("circle", cx=share(last), cy=y, r=_RADIUS, class_=f"f{colour}"))
    parts.append(tag("text", after, x="100%", dx=12, y=y + 4, class_=f"name{strong}"))
    return tag("g", *parts)
