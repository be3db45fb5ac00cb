"""Writes the picture and the table of the demo that the README shows, from the demo's own results.

    fedpareto demo --seed 1
    python tools/demo_picture.py [fedpareto-demo/results.json]

It copies the results into docs/pictures/demo.json, draws docs/pictures/demo-light.svg and demo-dark.svg from them, and
replaces the table in README.md. Without an argument it starts from docs/pictures/demo.json.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpareto.demo.hospitals import EIGHT, HOSPITALS, TWO
from fedpareto.demo.story import TITLES, HospitalAccuracies
from fedpareto.formatting import percent
from fedpareto.series import mean
from fedpareto.web.pages.html import Html, join, tag

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
TABLE = re.compile(r"\| accuracy after .*?\n\n", re.DOTALL)
_KEPT = ("rounds", "seed", "runs", "seconds")
_OF_A_RUN = ("name", "algorithm", "rounds_done", "accuracy", "cosine")

_WIDTH = 380.0
_LEFT, _RIGHT, _TOP, _ROW = 92.0, 24.0, 64.0, 24.0
_RADIUS = 5.5
_HEIGHT = _TOP + _ROW * len(HOSPITALS) + 30.0
_MARGIN = 16.0
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"

# FedAvg, FedMGDA+, ink, soft ink, rule, paper.
_THEMES: Mapping[str, Sequence[str]] = {
    "light": ("#d55e00", "#0072b2", "#1b1f24", "#667", "#d8dce2", "#fff"),
    "dark": ("#f0803c", "#58b4e8", "#e4e7eb", "#9aa4b0", "#353b43", "#0d1117"),
}


def main() -> None:
    """Reads the results, and writes the files."""
    if len(sys.argv) > 1:
        results = json.loads(Path(sys.argv[1]).read_text())
        kept = {name: results[name] for name in _KEPT}
        kept["runs"] = [{name: run[name] for name in _OF_A_RUN} for run in results["runs"]]
        (PICTURES / "demo.json").write_text(json.dumps(kept, indent=1) + "\n")
    for file, text in drawn().items():
        file.write_text(text)
    readme = ROOT / "README.md"
    readme.write_text(TABLE.sub(lambda _: table() + "\n", readme.read_text(), count=1))


def runs() -> Mapping[str, Any]:
    """The runs of the committed results, by name."""
    return {run["name"]: run for run in json.loads((PICTURES / "demo.json").read_text())["runs"]}


def drawn() -> dict[Path, str]:
    """The pictures, by file."""
    columns = [HospitalAccuracies(title, runs()[name]["accuracy"]) for name, title in TITLES.items()]
    return {PICTURES / f"demo-{theme}.svg": picture(panels(columns), theme) for theme in _THEMES}


def table() -> str:
    """The table of the README."""
    found = runs()
    rounds = {name: found[name]["rounds_done"] for name in TITLES}
    lines = [
        f"| accuracy after {rounds['fedmgda']} rounds | " + " | ".join(TITLES.values()) + " |",
        "|---|---:|---:|---:|---:|",
    ]
    for words, names in (("the eight", EIGHT), ("the two", TWO), ("all ten", (*EIGHT, *TWO))):
        cells = [percent(mean(found[name]["accuracy"][hospital] for hospital in names)) for name in TITLES]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# --- the picture


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


def picture(drawn: Sequence[Panel], theme: str) -> str:
    """Panels side by side as an SVG document in one of the themes."""
    average, fair, ink, soft, rule, paper = _THEMES[theme]
    width = len(drawn) * _WIDTH + 2 * _MARGIN
    style = (
        f"text {{ fill: {soft}; font: 12px {_FONT}; }} .axis {{ fill: {ink}; }} .title {{ font-weight: 600; }} "
        f".grid {{ stroke: {rule}; }} .hollow {{ fill: {paper}; stroke-width: 2; }} "
        f".s1 {{ stroke: {average}; }} .s0 {{ stroke: {fair}; }} .f0 {{ fill: {fair}; }} .bell {{ stroke-width: 3; }}"
    )
    groups = [
        tag("g", *_drawn(panel), transform=f"translate({_MARGIN + at * _WIDTH:g} 0)") for at, panel in enumerate(drawn)
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
                viewBox=f"0 0 {width:g} {_HEIGHT:g}",
                width=f"{width:g}",
                height=f"{_HEIGHT:g}",
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
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share


if __name__ == "__main__":
    main()
