"""The page of the demo: one HTML document that needs nothing else."""

from collections.abc import Sequence

from fedpareto.demo.hospital_dumbbells import figure, panels
from fedpareto.demo.hospitals import HOSPITALS, TWO
from fedpareto.demo.private_act import PrivateResult
from fedpareto.demo.story import Story
from fedpareto.formatting import percent
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.pages.skeleton import WebPage, in_one_file

_MORE = """
.panels { display: flex; flex-wrap: wrap; gap: 1rem 2rem; margin: 1.4rem 0; }
.panels svg { flex: 1 1 20rem; max-width: 27rem; }
.panels .hollow { stroke-width: 2; fill: var(--paper); } .panels .title { font-weight: 600; }
.told { max-width: 46rem; padding-left: 1.2rem; } .told li { margin: .5rem 0; }
.stored { display: flex; flex-wrap: wrap; gap: .8rem; } .stored figure { padding: .4rem; width: 6.4rem; }
.stored figcaption { font-size: .75rem; } .ink { fill: var(--ink); }
"""
_SHOWN = (HOSPITALS[1], *TWO)  # hospitals with pictures: an upright one and both turned ones
_SIDE = 8


def page(story: Story, private: PrivateResult | None, remarks: tuple[str, str], commands: Sequence[str]) -> Html:
    """The document, without the acts that were not played. The remarks are about FedAvg and about private rounds."""
    body = [
        tag("h1", "fedpareto demo"),
        tag("p", "Ten hospitals, two with another scanner", class_="verdict"),
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
        body.append(tag("p", of_average, class_="alert warning"))
    if private is not None:
        body += _pictures(private, of_private)
    if story.columns:
        rows = [
            (f"{name} *" if name in TWO else name, *(percent(column.accuracy[name]) for column in story.columns))
            for name in HOSPITALS
        ]
        body.append(tag("h2", "The numbers"))
        titles = ["hospital", *(column.title for column in story.columns)]
        body.append(tag("div", table(titles, rows), class_="card"))
    body += [tag("h2", "Type next"), tag("pre", "\n".join(commands))]
    return in_one_file(WebPage(title="fedpareto demo", body=body), more_style=_MORE)


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
    return tag("svg", join(cells), viewBox=f"0 0 {_SIDE} {_SIDE}", role="img", aria_label=title)
