"""Charts over rounds: lines, and bars in layers. Colours are classes of the style sheet; details are tooltips."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedpareto.series import last
from fedpareto.web.pages import drawing
from fedpareto.web.pages.html import Html, join, points, tag
from fedpareto.web.pages.marks import fill, fill_key, line_key
from fedpareto.web.pages.scales import Axis, Scale

HEIGHT = 216.0
_MARKERS = 60  # points of a line of which each gets a mark with a tooltip; of more, and of a dashed line, some do
_SPARSE = 12  # marks of such a line
_LAYERS = (0, 2, 3)  # how the bars of each layer are filled


@dataclass(frozen=True)
class Series:
    """A line, or a layer of bars, in one of the colours 0 to 5; NaN where a value is missing.

    A thin line has no marks, no entry in the legend, and its name as a tooltip: one of many.
    """

    name: str
    values: Sequence[float]
    colour: int
    dashed: bool = False
    weight: Literal["", "thin", "bold"] = ""


def lines(
    rounds: Sequence[int],
    series: Sequence[Series],
    axis: Axis,
    *,
    alt: str,
    words: str = "",
    band: tuple[Series, Series] | None = None,
) -> Html:
    """Lines over rounds; `band` is a shaded area between two more. `alt` and `words` are as for `drawing.plot`."""
    scale = Scale(axis, [value for line in [*series, *(band or ())] for value in line.values], HEIGHT, 0.0)
    x = drawing.round_places(rounds)
    curves: list[Html] = []
    if band:
        edges = [
            (x[i] * drawing.ALONG, scale.at(low), scale.at(high))
            for i, (low, high) in enumerate(zip(band[0].values, band[1].values, strict=True))
            if scale.known(low) and scale.known(high)
        ]
        outline = [(at, high) for at, _, high in edges] + [(at, low) for at, low, _ in reversed(edges)]
        curves.append(tag("polygon", points=points(outline), class_=f"band f{band[0].colour}"))
    marks: list[Html] = []
    named = [line for line in series if line.weight != "thin"]
    for line in series:
        shown = [(x[i], scale.at(value), i) for i, value in enumerate(line.values) if scale.known(value)]
        look = f"line s{line.colour}" + (" dashed" if line.dashed else "") + (f" {line.weight}" if line.weight else "")
        places = [(at, height) for at, height, _ in shown]
        if line.weight == "thin":
            path = points([(at * drawing.ALONG, height) for at, height in places])
            curves.append(tag("polyline", tag("title", line.name), points=path, class_=look))
            continue
        curves.append(drawing.curve(places, look))
        sparse = line.dashed or len(shown) > _MARKERS
        every = max(1, math.ceil(len(shown) / _SPARSE)) if sparse else 1
        # Marks of equal lines must not meet.
        first = min(named.index(line) * every // len(named), max(len(shown) - 1, 0))
        for at, height, i in shown[first::every]:
            title = f"round {rounds[i]}: {line.name} {axis.format(line.values[i])}"
            marks.append(drawing.mark(line.colour, at, height, 3.0, title, hollow=line.dashed))
    parts = [
        drawing.grid(scale, axis),
        drawing.round_axis(rounds, x, HEIGHT),
        drawing.stretched(HEIGHT, curves),
        *marks,
    ]
    return join([_legend(named, axis), drawing.plot(HEIGHT, parts, alt=alt, words=words)])


def _legend(series: Sequence[Series], axis: Axis) -> Html:
    """The names of the lines with their marks and their last values."""

    def name(line: Series) -> str:
        value = last(line.values)
        return f"{line.name} {axis.format(value)}" if math.isfinite(value) else line.name

    return drawing.legend(line_key(name(line), line.colour, dashed=line.dashed) for line in series)


def stacked(rounds: Sequence[int], layers: Sequence[Series], axis: Axis, *, alt: str, words: str = "") -> Html:
    """Bars over rounds, layer upon layer; `alt` and `words` are as for `drawing.plot`."""
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    scale = Scale(axis, [0.0, *totals], HEIGHT, 0.0)
    x = drawing.round_places(rounds)
    width = 0.8 / max(len(rounds), 8)
    parts = [drawing.grid(scale, axis), drawing.round_axis(rounds, x, HEIGHT)]
    for i, number in enumerate(rounds):
        base = 0.0
        for way, layer in zip(_LAYERS, layers, strict=False):
            value = layer.values[i]
            if value > 0:
                top, title = scale.at(base + value), f"round {number}: {layer.name} {axis.format(value)}"
                look = fill(layer.colour, way)
                parts.append(drawing.box(x[i] - width / 2, top, width, scale.at(base) - top, look, title))
                base += value
    keys = (fill_key(layer.name, layer.colour, way) for way, layer in zip(_LAYERS, layers, strict=False))
    return join([drawing.legend(keys), drawing.plot(HEIGHT, parts, alt=alt, words=words)])
