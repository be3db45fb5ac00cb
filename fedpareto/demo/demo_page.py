"""The page of the demo: one HTML document that needs nothing else."""

from collections.abc import Sequence
from importlib.resources import files

from fedpareto.demo.dumbbells import figure, panels
from fedpareto.demo.hospitals import HOSPITALS, TWO
from fedpareto.demo.private_act import PrivateResult
from fedpareto.demo.story import Story
from fedpareto.formatting import percent
from fedpareto.report.html import Html, join, table, tag

# The browser loads nothing and runs no script.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = files("fedpareto.report").joinpath("style.css").read_text("utf-8")
_MORE = """
.panels { display: flex; flex-wrap: wrap; gap: 1rem 2rem; } .panels svg { flex: 1 1 20rem; max-width: 27rem; }
.panels svg text { font-size: 12px; } .panels .title { font-weight: 600; } .panels .hollow { stroke-width: 2; }
.bell { stroke-width: 3; } .told li { margin: .5rem 0; } .stored { display: flex; flex-wrap: wrap; gap: .8rem; }
.stored figure { margin: 0; width: 5.6rem; } .stored figcaption { font-size: .75rem; } .ink { fill: var(--ink); }
.wide { overflow-x: auto; }
"""
_SHOWN = (HOSPITALS[1], *TWO)  # hospitals with pictures: an upright one and both turned ones
_SIDE = 8


def page(story: Story, private: PrivateResult | None, remarks: tuple[str, str], commands: Sequence[str]) -> Html:
    """The document, without the acts that were not played. The remarks are about FedAvg and about private rounds."""
    body = [
        tag("h1", "Ten hospitals, two with another scanner"),
        tag(
            "p",
            "Ten hospitals train one model that reads handwritten digits. Hospitals 9 and 10, marked *, have a scanner "
            "that turns each image by 90 degrees. The accuracies are those on each hospital's own test images.",
            class_="soft",
        ),
    ]
    if story.columns:
        body.append(tag("div", *map(figure, panels(story.columns)), class_="panels"))
    body.append(tag("ul", *(tag("li", sentence) for sentence in story.sentences), class_="told"))
    of_average, of_private = remarks
    if of_average:
        body.append(tag("p", of_average, class_="warning"))
    if private is not None:
        body += _pictures(private, of_private)
    if story.columns:
        rows = [
            (f"{name} *" if name in TWO else name, *(percent(column.accuracy[name]) for column in story.columns))
            for name in HOSPITALS
        ]
        body.append(tag("h2", "The numbers"))
        body.append(tag("div", table(["", *(column.title for column in story.columns)], rows), class_="wide"))
    body += [tag("h2", "Type next"), tag("pre", "\n".join(commands))]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", "fedpareto demo"),
        Html(f"<style>\n{_STYLE}{_MORE}</style>"),
    )
    return Html("<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n")


def _pictures(private: PrivateResult, remark: str) -> list[Html]:
    """The pictures that the coordinator can draw from the vectors that it stores."""
    shown = []
    for round_name, guess in (("open round", private.open), ("private round", private.masked)):
        for name in _SHOWN:
            if name in guess.pictures:
                caption = tag("figcaption", f"{name}, {round_name}")
                shown.append(tag("figure", _pixels(guess.pictures[name], f"{name}, {round_name}"), caption))
    return [
        tag("h2", "What the coordinator sees of a hospital"),
        tag(
            "p",
            "The part of the stored vector that belongs to the digit 0. An open update shows the zero, and that two "
            f"scanners turn it. A masked vector shows noise. {remark}",
            class_="soft",
        ),
        tag("div", *shown, class_="stored"),
    ]


def _pixels(values: Sequence[float], title: str) -> Html:
    cells = [
        tag(
            "rect", x=float(at % _SIDE), y=float(at // _SIDE), width=1.02, height=1.02, fill_opacity=value, class_="ink"
        )
        for at, value in enumerate(values)
    ]
    return tag("svg", tag("title", title), join(cells), viewBox=f"0 0 {_SIDE} {_SIDE}", role="img")
