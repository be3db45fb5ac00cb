"""A radar chart: an axis for each objective, a polygon for each run."""

import math
from collections.abc import Sequence

from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.drawing import legend
from fedpareto.web.pages.html import Html, join, points, tag
from fedpareto.web.pages.marks import line_key, outline
from fedpareto.web.pages.scales import cut, general

WIDTH, HEIGHT = 380.0, 320.0
_RADIUS = 112.0
_RINGS = (0.25, 0.5, 0.75, 1.0)
_DASHES = ("none", "7 4", "2 3", "10 3 2 3", "4 4", "12 5")  # of the runs, which can be distinguished without colours


def radar(names: Sequence[str], runs: Sequence[Series], largest: Sequence[float], *, alt: str, words: str = "") -> Html:
    """Shares of the largest value along each of M >= 3 axes, an objective each.

    It keeps its proportions, and so its own width. `alt` names the drawing, `words` describe it.

    A run has M shares in [0, 1]; axes with NaN are left out. `largest` are the values of share 1.
    """
    parts = [_web(names, largest)]
    for index, run in enumerate(runs):
        known = [(k, value) for k, value in enumerate(run.values) if math.isfinite(value)]
        corners = [_at(k, len(names), value) for k, value in known]
        look = {"class_": f"line s{run.colour} f{run.colour}", "fill_opacity": 0.07}
        parts.append(tag("polygon", points=points(corners), stroke_dasharray=_DASHES[index % len(_DASHES)], **look))
        for (k, value), (x, y) in zip(known, corners, strict=True):
            title = f"{run.name}, {names[k]}: {general(value * largest[k])}, {value:.2f} of the largest"
            shape = points(outline(run.colour, x, y, 2.6))
            parts.append(tag("polygon", tag("title", title), points=shape, class_=f"f{run.colour}"))
    keys = (line_key(run.name, run.colour, dashed=False) for run in runs)
    told = [tag("desc", words)] if words else []
    box = f"0 0 {WIDTH:g} {HEIGHT:g}"
    drawing = tag("svg", *told, *parts, viewBox=box, class_="radar", role="img", aria_label=alt)
    return join([legend(keys), tag("div", drawing, class_="chart")])


def _web(names: Sequence[str], largest: Sequence[float]) -> Html:
    M = len(names)
    parts = [
        tag("polygon", points=points([_at(k, M, share) for k in range(M)]), class_="grid", fill="none")
        for share in _RINGS
    ]
    for k, name in enumerate(names):
        (x, y), (label_x, label_y) = _at(k, M, 1.0), _at(k, M, 1.0 + 16 / _RADIUS)
        parts.append(tag("line", x1=WIDTH / 2, y1=HEIGHT / 2, x2=x, y2=y, class_="grid"))
        side = label_x - WIDTH / 2
        anchor = "middle" if abs(side) < 12 else "start" if side > 0 else "end"
        label = f"{cut(name, 14)} ({general(largest[k])})" if M <= 12 else cut(name, 14)
        parts.append(tag("text", label, x=label_x, y=label_y + 3.5, text_anchor=anchor, class_="axis"))
    return join(parts)


def _at(k: int, M: int, share: float) -> tuple[float, float]:
    angle = 2 * math.pi * k / M - math.pi / 2
    return WIDTH / 2 + _RADIUS * share * math.cos(angle), HEIGHT / 2 + _RADIUS * share * math.sin(angle)
