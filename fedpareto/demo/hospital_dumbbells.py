"""Dumbbells as SVG: for each hospital the accuracy under FedAvg and under FedMGDA+, joined by a line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedpareto.demo.hospitals import HOSPITALS, TWO
from fedpareto.demo.story import HospitalAccuracies
from fedpareto.formatting import percent
from fedpareto.web.pages.html import Html, join, tag

WIDTH = 380.0
_LEFT, _RIGHT, _TOP, _ROW = 92.0, 24.0, 64.0, 24.0
_RADIUS = 5.5
HEIGHT = _TOP + _ROW * len(HOSPITALS) + 30.0
_MARGIN = 16.0
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"

# FedAvg, FedMGDA+, ink, soft ink, rule, paper.
THEMES: Mapping[str, Sequence[str]] = {
    "light": ("#d55e00", "#0072b2", "#1b1f24", "#667", "#d8dce2", "#fff"),
    "dark": ("#f0803c", "#58b4e8", "#e4e7eb", "#9aa4b0", "#353b43", "#0d1117"),
}


@dataclass(frozen=True)
class Panel:
    """Two runs that are compared: the first is a hollow mark, the second a filled one."""

    title: str
    first: HospitalAccuracies
    second: HospitalAccuracies


def panels(columns: Sequence[HospitalAccuracies]) -> list[Panel]:
    """Two panels from the story's four columns: without an attack, and with one."""
    average, fair, average_attacked, fair_attacked = columns
    return [
        Panel("All are honest", average, fair),
        Panel("hospital-1 attacks", average_attacked, fair_attacked),
    ]


def figure(panel: Panel) -> Html:
    """A panel for a page with the style sheet of reports."""
    return tag("svg", *_drawn(panel), viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", aria_label=_summary(panel))


def picture(drawn: Sequence[Panel], theme: str) -> str:
    """Panels side by side as an SVG document in one of `THEMES`."""
    average, fair, ink, soft, rule, paper = THEMES[theme]
    width = len(drawn) * WIDTH + 2 * _MARGIN
    style = (
        f"text {{ fill: {soft}; font: 12px {_FONT}; }} .axis {{ fill: {ink}; }} .title {{ font-weight: 600; }} "
        f".grid {{ stroke: {rule}; }} .hollow {{ fill: {paper}; stroke-width: 2; }} "
        f".s1 {{ stroke: {average}; }} .s0 {{ stroke: {fair}; }} .f0 {{ fill: {fair}; }} .bell {{ stroke-width: 3; }}"
    )
    groups = [
        tag("g", *_drawn(panel), transform=f"translate({_MARGIN + at * WIDTH:g} 0)") for at, panel in enumerate(drawn)
    ]
    summary = " ".join(map(_summary, drawn))
    return (
        str(
            tag(
                "svg",
                tag("title", summary),
                tag("style", Html(style)),
                *groups,
                xmlns="http://www.w3.org/2000/svg",
                viewBox=f"0 0 {width:g} {HEIGHT:g}",
                width=f"{width:g}",
                height=f"{HEIGHT:g}",
                role="img",
            )
        )
        + "\n"
    )


def _summary(panel: Panel) -> str:
    return f"{panel.title}: {panel.first.title} and {panel.second.title}, test accuracy of each hospital."


def _drawn(panel: Panel) -> list[Html]:
    bottom = _TOP + _ROW * len(HOSPITALS)
    elements = [tag("text", panel.title, x=_LEFT, y=16.0, class_="axis title"), *_legend(panel)]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _x(tick)
        elements.append(tag("line", x1=x, x2=x, y1=_TOP - 8, y2=bottom, class_="grid"))
        elements.append(tag("text", f"{100 * tick:.0f} %", x=x, y=bottom + 18, text_anchor="middle"))
    return [*elements, *(_row(panel, name, at) for at, name in enumerate(HOSPITALS))]


def _legend(panel: Panel) -> list[Html]:
    second = _LEFT + 130.0
    return [
        tag("circle", cx=_LEFT + _RADIUS, cy=34.0, r=_RADIUS, class_="hollow s1"),
        tag("text", panel.first.title, x=_LEFT + 17.0, y=38.0),
        tag("circle", cx=second + _RADIUS, cy=34.0, r=_RADIUS, class_="f0"),
        tag("text", panel.second.title, x=second + 17.0, y=38.0),
    ]


def _row(panel: Panel, name: str, at: int) -> Html:
    y = _TOP + _ROW * (at + 0.5)
    before, after = (column.accuracy.get(name, math.nan) for column in (panel.first, panel.second))
    title = tag("title", f"{name}: {panel.first.title} {percent(before)}, {panel.second.title} {percent(after)}")
    marks = [tag("text", f"{name} *" if name in TWO else name, x=_LEFT - 12, y=y + 4, text_anchor="end", class_="axis")]
    if math.isfinite(before) and math.isfinite(after):
        marks.append(tag("line", x1=_x(before), x2=_x(after), y1=y, y2=y, class_="s0 bell"))
    if math.isfinite(before):
        marks.append(tag("circle", cx=_x(before), cy=y, r=_RADIUS, class_="hollow s1"))
    if math.isfinite(after):
        marks.append(tag("circle", cx=_x(after), cy=y, r=_RADIUS, class_="f0"))
    return tag("g", title, join(marks))


def _x(share: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * share
