"""The parts of every drawing: the frame, the axes, the curves in it, and the legend.

A drawing is as wide as the page lets it be. Places along it are shares of its width, heights are pixels. So its text
has the same size on every screen, and no script is needed. Only curves are stretched, in a drawing of their own.
"""

import math
from collections.abc import Iterable, Sequence

from fedpareto.web.pages.html import Html, join, points, share, tag
from fedpareto.web.pages.marks import outline
from fedpareto.web.pages.scales import Axis, Scale, cut, few

ALONG = 1000.0  # units of the width of stretched curves
_SLANT = 60  # degrees
_LETTER = 6.6  # pixels that a letter of a name takes on average, or a little more
_NARROW = 12  # slanted names that a narrow screen has room for


def plot(height: float, parts: Iterable[str], *, alt: str, words: str = "", look: str = "") -> Html:
    """A drawing that is `height` pixels high. `alt` is its name for screen readers, `words` is its description."""
    told = [tag("desc", words)] if words else []
    drawing = tag(
        "svg",
        *told,
        *parts,
        class_=f"plot {look}".rstrip(),
        height=height,
        role="img",
        aria_label=alt,
        focusable="false",
    )
    return tag("div", drawing, class_="chart")


def stretched(height: float, parts: Iterable[str], *, units: float = 0.0, along: float = ALONG) -> Html:
    """Curves as wide as the drawing, with places from 0 to `along`; `units` is their height if it is not pixels."""
    box = f"0 0 {along:g} {units or height:g}"
    return tag("svg", *parts, viewBox=box, preserveAspectRatio="none", width="100%", height=height)


def curve(places: Sequence[tuple[float, float]], look: str) -> Html:
    """A line through places: shares of the width, and pixels."""
    return tag("polyline", points=points([(x * ALONG, y) for x, y in places]), class_=look)


def mark(shape: int, x: float, y: float, size: float, title: str, *, hollow: bool = False) -> Html:
    """The shape number `shape` of `marks.GLYPHS` around a place, in the colour of that number, with a tooltip.

    `x` is a share of the width, `y` pixels; `size` is the radius of the circle, and other shapes are about as large.
    """
    look = f"hollow s{shape}" if hollow else f"f{shape}"
    if shape == 0:
        return tag("circle", tag("title", title), cx=share(x), cy=y, r=size, class_=look)
    corners = points(outline(shape, 0.0, 0.0, size))
    return tag("svg", tag("polygon", tag("title", title), points=corners, class_=look), x=share(x), y=y)


def grid(scale: Scale, axis: Axis) -> Html:
    """Horizontal lines at the ticks of a vertical axis, with their values, and the name of the quantity."""
    parts = [tag("text", axis.name, x=0, dx=-44, y=-14, class_="axis")] if axis.name else []
    for y, tick in ((scale.at(tick), tick) for tick in scale.ticks):
        parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
        parts.append(tag("text", axis.format(tick), x=0, dx=-7, y=y + 4, text_anchor="end"))
    for y in map(scale.at, scale.small_ticks):
        parts.append(tag("line", x1=0, x2=5, y1=y, y2=y, class_="tick"))
    return join(parts)


def round_axis(rounds: Sequence[int], places: Sequence[float], foot: float) -> Html:
    """The numbers of some rounds below a drawing, the last one included."""
    return bottom_axis(list(map(str, rounds)), places, foot, "round")


def bottom_axis(names: Sequence[str], places: Sequence[float], foot: float, title: str) -> Html:
    """Some of the names of places below a drawing, the last one included, and the title of the axis."""
    ticks = [tag("text", names[i], x=share(places[i]), y=foot + 18, text_anchor="middle") for i in few(len(names))]
    return join([*ticks, tag("text", title, x="50%", y=foot + 36, text_anchor="middle", class_="axis")])


def slanted_names(names: Sequence[str], places: Sequence[float], foot: float) -> tuple[Html, float]:
    """All names of places below a drawing, slanted, and the height that they take; on a narrow screen only some."""
    shown = [cut(name) for name in names]
    every = math.ceil(len(names) / _NARROW)
    labels = [
        tag(
            "svg",
            tag("text", name, transform=f"rotate(-{_SLANT})", text_anchor="end", class_="name"),
            x=share(place),
            dx=4,
            y=foot + 14,
            class_=None if i % every == 0 else "wide-only",
        )
        for i, (name, place) in enumerate(zip(shown, places, strict=True))
    ]
    return join(labels), 20 + _LETTER * max(map(len, shown), default=0) * math.sin(math.radians(_SLANT))


def round_places(rounds: Sequence[int]) -> list[float]:
    """The place of each round, a share of the width."""
    margin = 0.5 / max(len(rounds), 8)
    first, last = rounds[0], rounds[-1]
    width = max(last - first, 1)
    return [margin + (number - first) / width * (1 - 2 * margin) for number in rounds]


def box(x: float, y: float, width: float, height: float, look: str, title: str) -> Html:
    """A rectangle from its upper left corner, with a tooltip; `x` and `width` are shares."""
    return tag("rect", tag("title", title), x=share(x), y=y, width=share(width), height=height, class_=look)


def legend(keys: Iterable[str]) -> Html:
    """The entries of a legend."""
    return tag("p", *keys, class_="legend")
