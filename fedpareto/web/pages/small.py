"""Drawings that stand in a line of text or a cell of a table: a sparkline, and a strip of outcomes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.drawing import ALONG
from fedpareto.web.pages.html import Html, points, tag
from fedpareto.web.pages.scales import Axis, Scale

_HEIGHT = 28.0
_CELL = 10.0  # pixels of an outcome in a strip

# By outcome: its path in a cell of 10 pixels, and its classes. Each has a shape of its own.
SHAPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "replied": ("M{x} 2h7v7h-7z", "f2"),
        "declined": ("M{x} 2h7v7h-7z", "hollow s4"),
        "refused": ("M{x} 2l7 7m0-7l-7 7", "line s1"),
        "missing": ("M{x} 5.5h7", "line s1"),
        "not-needed": ("M{x} 5.5m2.5-1h2v2h-2z", "f5"),
    }
)


def sparkline(series: Sequence[Series], axis: Axis, *, alt: str) -> Html:
    """Lines without axes; `alt` says what they show."""
    scale = Scale(axis, [value for line in series for value in line.values], _HEIGHT - 3, 3.0)
    parts = []
    for line in series:
        count = max(len(line.values) - 1, 1)
        places = [(i / count * ALONG, scale.at(v)) for i, v in enumerate(line.values) if scale.known(v)]
        look = f"line s{line.colour}" + (" dashed" if line.dashed else "")
        parts.append(tag("polyline", points=points(places), class_=look))
    box = f"0 0 {ALONG:g} {_HEIGHT:g}"
    return tag("svg", *parts, viewBox=box, preserveAspectRatio="none", class_="spark", role="img", aria_label=alt)


def strip(outcomes: Sequence[str], *, alt: str, most: int = 30) -> Html:
    """The last outcomes of a member as shapes, the newest on the right; one of `SHAPES` each, others are left blank.

    There is an element for each kind of outcome, not for each round; `alt` is the strip in words.
    """
    shown = outcomes[-most:]
    paths: dict[str, list[str]] = {}
    for at, outcome in enumerate(shown):
        if outcome in SHAPES:
            x = f"{(most - len(shown) + at) * _CELL + 1:g}"
            paths.setdefault(outcome, []).append(SHAPES[outcome][0].format(x=x))
    parts = [tag("path", d="".join(path), class_=SHAPES[outcome][1]) for outcome, path in paths.items()]
    box = f"0 0 {most * _CELL:g} 11"
    return tag("svg", *parts, viewBox=box, class_="strip", role="img", aria_label=alt)
