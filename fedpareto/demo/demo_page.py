"""The page of the demo: one HTML document that needs nothing else."""

import math
from collections.abc import Iterator, Sequence

from fedpareto.demo.hospitals import HOSPITALS, TWO
from fedpareto.demo.private_act import PrivateResult
from fedpareto.demo.story import Story
from fedpareto.formatting import percent
from fedpareto.web.pages.dumbbells import Dumbbell, dumbbells
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.pages.rendering import rendered
from fedpareto.web.pages.scales import ACCURACY
from fedpareto.web.pages.skeleton import WebPage, in_one_file

_MORE = """
.told { max-width: 46rem; padding-left: 1.2rem; } .told li { margin: .5rem 0; }
.stored { display: flex; flex-wrap: wrap; gap: .8rem; } .stored figure { padding: .4rem; width: 6.4rem; }
.stored figcaption { font-size: .75rem; } .ink { fill: var(--ink); }
"""
_SHOWN = (HOSPITALS[1], *TWO)  # hospitals with pictures: an upright one and both turned ones
_SIDE = 8


def page(story: Story, private: PrivateResult | None, remarks: tuple[str, str], commands: Sequence[str]) -> Html:
    """The document, without the acts that were not played. The remarks are about FedAvg and about private rounds."""
    of_average, of_private = remarks
    body = rendered(
        "demo.html",
        panels=list(_panels(story)),
        sentences=story.sentences,
        of_average=of_average,
        pictures=[] if private is None else list(_pictures(private)),
        of_private=of_private,
        numbers=_numbers(story),
        commands=commands,
    )
    return in_one_file(WebPage(title="fedpareto demo", body=[body]), more_style=_MORE)


def _marked(name: str) -> str:
    return f"{name} *" if name in TWO else name


def _panels(story: Story) -> Iterator[tuple[str, Html]]:
    """Without an attack, and with one: for each hospital the accuracy under FedAvg and under FedMGDA+."""
    pairs = {"All are honest": story.columns[:2], "hospital-1 attacks": story.columns[2:]}
    for title, pair in pairs.items():
        if len(pair) == 2:
            first, second = pair
            rows = [
                Dumbbell(
                    _marked(name), first.accuracy.get(name, math.nan), second.accuracy.get(name, math.nan), name in TWO
                )
                for name in HOSPITALS
            ]
            alt = f"{title}: {first.title} and {second.title}, test accuracy of each hospital"
            yield title, dumbbells(rows, ACCURACY, names=(first.title, second.title), alt=alt)


def _numbers(story: Story) -> Html:
    if not story.columns:
        return Html("")
    rows = [(_marked(name), *(percent(column.accuracy[name]) for column in story.columns)) for name in HOSPITALS]
    return table(["hospital", *(column.title for column in story.columns)], rows)


def _pictures(private: PrivateResult) -> Iterator[tuple[str, Html]]:
    """The pictures that the coordinator can draw from the vectors that it stores."""
    for round_name, guess in (("open round", private.open), ("private round", private.masked)):
        for name in _SHOWN:
            if name in guess.pictures:
                title = f"{name}, {round_name}"
                yield title, _pixels(guess.pictures[name], title)


def _pixels(values: Sequence[float], title: str) -> Html:
    cells = [
        tag(
            "rect", x=float(at % _SIDE), y=float(at // _SIDE), width=1.02, height=1.02, fill_opacity=value, class_="ink"
        )
        for at, value in enumerate(values)
    ]
    return tag("svg", join(cells), viewBox=f"0 0 {_SIDE} {_SIDE}", role="img", aria_label=title)
