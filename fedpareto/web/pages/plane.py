"""A plane with one path for each run: losses against each other, or a measure against its cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpareto.web.pages import drawing
from fedpareto.web.pages.html import Html, join, share, tag
from fedpareto.web.pages.marks import GLYPHS
from fedpareto.web.pages.scales import LARGEST, Axis, Scale

HEIGHT = 320.0
_MARKERS = 80  # points of a path that get a marker, each with a tooltip


@dataclass(frozen=True)
class Path:
    """Points in order, with a tooltip each; NaN leaves a point out. `colour`, 0 to 5, is also the shape of the end."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    labels: Sequence[str]
    colour: int

    @property
    def known(self) -> list[tuple[float, float, str]]:
        """The points that can be drawn."""
        marked_points = zip(self.xs, self.ys, self.labels, strict=True)
        return [(x, y, label) for x, y, label in marked_points if abs(x) <= LARGEST and abs(y) <= LARGEST]


@dataclass(frozen=True)
class Guide:
    """A dashed line to compare with: through the origin with `slope`, vertical at `x`, or horizontal at `y`."""

    name: str
    slope: float | None = None
    x: float | None = None
    y: float | None = None


def plane(paths: Sequence[Path], x: Axis, y: Axis, *, guides: Sequence[Guide] = (), alt: str, words: str = "") -> Html:
    """Paths in a plane with linear axes: a ring where each begins, a shape where it ends.

    `alt` and `words` are as for `drawing.plot`.
    """
    shown = [point for path in paths for point in path.known]
    across = Scale(x, [*(a for a, _, _ in shown), *(guide.x for guide in guides if guide.x is not None)], 0.0, 1.0)
    up = Scale(y, [*(b for _, b, _ in shown), *(guide.y for guide in guides if guide.y is not None)], HEIGHT, 0.0)
    parts = [drawing.grid(up, y)]
    for tick in across.ticks:
        at = share(across.at(tick))
        parts.append(tag("line", x1=at, x2=at, y1=0, y2=HEIGHT, class_="grid"))
        parts.append(tag("text", x.format(tick), x=at, y=HEIGHT + 18, text_anchor="middle"))
    parts.append(tag("text", x.name, x="50%", y=HEIGHT + 36, text_anchor="middle", class_="axis"))
    parts += [_guide(guide, across, up) for guide in guides]
    curves, marks = [], []
    for path in paths:
        places = [(across.at(a), up.at(b)) for a, b, _ in path.known]
        if not places:
            continue
        curves.append(drawing.curve(places, f"line s{path.colour}"))
        labelled = list(zip(places, path.known, strict=True))
        every = max(1, math.ceil(len(labelled) / _MARKERS))
        for (at_x, at_y), (_, _, label) in labelled[::every]:
            title = tag("title", f"{path.name}, {label}")
            marks.append(tag("circle", title, cx=share(at_x), cy=at_y, r=2.2, class_=f"f{path.colour}"))
        (at_x, at_y), end = places[0], path.known[-1][2]
        marks.append(tag("circle", cx=share(at_x), cy=at_y, r=5.0, class_=f"hollow s{path.colour}"))
        marks.append(drawing.mark(path.colour, *places[-1], 6.0, f"{path.name}, {end}"))
    keys = [
        tag("span", tag("span", GLYPHS[path.colour], class_=f"g{path.colour}"), f" {path.name}", class_="key-name")
        for path in paths
    ]
    parts += [drawing.stretched(HEIGHT, curves), *marks]
    return join([drawing.legend([*keys, "a ring where it begins"]), drawing.plot(HEIGHT, parts, alt=alt, words=words)])


def _guide(guide: Guide, across: Scale, up: Scale) -> Html:
    """The line as far as the axes go, with its name at the inner side of its end."""
    low_x, high_x, low_y, high_y = across.ticks[0], across.ticks[-1], up.ticks[0], up.ticks[-1]
    label: dict[str, object]
    if guide.slope is not None:
        far = min(high_x, high_y / guide.slope)
        ends = (max(low_x, 0.0), max(low_x, 0.0) * guide.slope), (far, far * guide.slope)
        steep = far < high_x  # it ends at the upper edge, and the name has room on its left; else above it
        label = {"x": share(across.at(far)), "dx": -8, "y": up.at(far * guide.slope) + (14 if steep else -8)}
        label["text_anchor"] = "end"
    elif guide.x is not None:
        ends = (guide.x, low_y), (guide.x, high_y)
        label = {"x": share(across.at(guide.x)), "dx": 5, "y": 14}
    else:
        height = guide.y or 0.0
        ends = (low_x, height), (high_x, height)
        label = {"x": "100%", "dx": -4, "y": up.at(height) - 5, "text_anchor": "end"}
    (x1, y1), (x2, y2) = ends
    line = {"x1": share(across.at(x1)), "y1": up.at(y1), "x2": share(across.at(x2)), "y2": up.at(y2)}
    return join([tag("line", **line, class_="guide"), tag("text", guide.name, **label)])
