"""A plane with one path for each run: losses against each other, or a measure against what it cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedpareto.report.charts import WIDTH, Axis, steps, svg
from fedpareto.report.html import Html, join, points, tag
from fedpareto.report.marks import GLYPHS, mark

HEIGHT = 420.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 20.0, 26.0, 42.0
_MARKERS = 80  # points of a path that get a marker, each with a tooltip
_LARGEST = 1e100


@dataclass(frozen=True)
class Path:
    """Points in order.

    Attributes:
        name: for the legend.
        xs: from left to right.
        ys: from bottom to top; NaN in either leaves a point out.
        labels: one for each point, for its tooltip.
        colour: the number of its colour, 0 to 5, and of the shape of its end.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    labels: Sequence[str]
    colour: int

    @property
    def known(self) -> list[tuple[float, float, str]]:
        """The points that can be drawn."""
        found = zip(self.xs, self.ys, self.labels, strict=True)
        return [(x, y, label) for x, y, label in found if abs(x) <= _LARGEST and abs(y) <= _LARGEST]


@dataclass(frozen=True)
class Guide:
    """A dashed line to compare with.

    Attributes:
        name: written beside it.
        slope: of a line through the origin; or
        x: where a vertical line is; or
        y: where a horizontal one is.
    """

    name: str
    slope: float | None = None
    x: float | None = None
    y: float | None = None


class _Frame:
    """From values to coordinates of the drawing."""

    def __init__(self, paths: Sequence[Path], x: Axis, y: Axis, guides: Sequence[Guide]) -> None:
        known = [point for path in paths for point in path.known]
        at = [one.x for one in guides if one.x is not None]
        heights = [one.y for one in guides if one.y is not None]
        self.x_ticks = _ticks([point[0] for point in known] + at, x)
        self.y_ticks = _ticks([point[1] for point in known] + heights, y)

    def x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def _ticks(values: Sequence[float], axis: Axis) -> list[float]:
    known = [*values, *(value for value in (axis.low, axis.high) if value is not None)]
    return steps(min(known), max(known)) if known else steps(0.0, 1.0)


def plane(paths: Sequence[Path], x: Axis, y: Axis, *, guides: Sequence[Guide] = (), alt: str) -> Html:
    """Paths in a plane: a ring where each begins, a shape of its own where it ends.

    Args:
        paths: the runs.
        x: the horizontal axis, linear.
        y: the vertical axis, linear.
        guides: lines to compare with.
        alt: the drawing in words.
    """
    frame = _Frame(paths, x, y, guides)
    parts = [_grid(frame, x, y), *(_guide(one, frame) for one in guides)]
    for path in paths:
        places = [(frame.x(a), frame.y(b)) for a, b, _ in path.known]
        if not places:
            continue
        parts.append(tag("polyline", points=points(places), class_=f"line s{path.colour}"))
        labelled = list(zip(places, path.known, strict=True))
        every = max(1, math.ceil(len(labelled) / _MARKERS))
        for (at, height), (_, _, label) in labelled[::every]:
            parts.append(
                tag("circle", tag("title", f"{path.name}, {label}"), cx=at, cy=height, r=2.2, class_=f"f{path.colour}")
            )
        parts.append(tag("circle", cx=places[0][0], cy=places[0][1], r=5.0, class_=f"line s{path.colour}"))
        parts.append(mark(path.colour, *places[-1], 6.5, f"{path.name}, {path.known[-1][2]}"))
    keys = (
        join([tag("span", GLYPHS[path.colour], class_=f"glyph g{path.colour}"), f" {path.name} "]) for path in paths
    )
    return join([tag("p", *keys, "(a ring where it begins)", class_="legend"), svg(y.name, HEIGHT, parts, alt)])


def _grid(frame: _Frame, x: Axis, y: Axis) -> Html:
    right, foot = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for tick in frame.y_ticks:
        height = frame.y(tick)
        parts.append(tag("line", x1=_LEFT, x2=right, y1=height, y2=height, class_="grid"))
        parts.append(tag("text", y.format(tick), x=_LEFT - 6, y=height + 3.5, text_anchor="end"))
    for tick in frame.x_ticks:
        at = frame.x(tick)
        parts.append(tag("line", x1=at, x2=at, y1=_TOP, y2=foot, class_="grid"))
        parts.append(tag("text", x.format(tick), x=at, y=foot + 16, text_anchor="middle"))
    parts.append(tag("text", x.name, x=(_LEFT + right) / 2, y=HEIGHT - 6, text_anchor="middle", class_="axis"))
    return join(parts)


def _guide(guide: Guide, frame: _Frame) -> Html:
    """The line as far as the frame goes, with its name at the inner side of its end."""
    low_x, high_x, low_y, high_y = frame.x_ticks[0], frame.x_ticks[-1], frame.y_ticks[0], frame.y_ticks[-1]
    if guide.slope is not None:
        far = min(high_x, high_y / guide.slope)
        ends = (max(low_x, 0.0), max(low_x, 0.0) * guide.slope), (far, far * guide.slope)
        steep = far < high_x  # it ends at the upper edge, and the name has room on its left; else above it
        at = (frame.x(far) - 8, frame.y(far * guide.slope) + (14 if steep else -8))
        label = {"x": at[0], "y": at[1], "text_anchor": "end"}
    elif guide.x is not None:
        ends = (guide.x, low_y), (guide.x, high_y)
        label = {"x": frame.x(guide.x) + 4, "y": _TOP + 12}
    else:
        across = guide.y or 0.0
        ends = (low_x, across), (high_x, across)
        label = {"x": WIDTH - _RIGHT - 4, "y": frame.y(across) - 4, "text_anchor": "end"}
    (x1, y1), (x2, y2) = ends
    line = {"x1": frame.x(x1), "y1": frame.y(y1), "x2": frame.x(x2), "y2": frame.y(y2)}
    return join([tag("line", **line, class_="guide"), tag("text", guide.name, **label)])
