"""Parts of figures: title, chart, caption, numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar
from urllib.parse import quote

from federation.record.metric_definitions import definition
from fedpareto.formatting import NOT_DISCLOSED, UNKNOWN, format_of
from fedpareto.series import known
from fedpareto.web.pages import charts
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.html import Html, table, tag, text
from fedpareto.web.pages.scales import Axis, Format
from fedpareto.web.sections.bins import POINTS, Bins
from fedpareto.web.sections.shown_run import ShownRun

T = TypeVar("T")

UNFOLDED = 20  # members; the others are unfolded by the reader
NO_DISCLOSURE = "Not disclosed: the privacy of this run hides it."
Column = tuple[str, Sequence[float], Format]  # of a table: its name, its numbers, and how they are written


def figure(title: str, chart: Html, caption: str, numbers: Html | None = None, *, more: str = "") -> Html:
    """A figure: its title, the drawing, what it shows, and folded up how to read it (`more`) and its numbers."""
    parts = [tag("h3", title), chart, tag("figcaption", caption)]
    if more or numbers is not None:
        names = [*(["How to read it"] if more else []), *(["the numbers"] if numbers is not None else [])]
        summary = ", and ".join(names)
        folded = [
            tag("summary", summary[:1].upper() + summary[1:]),
            *([tag("p", more, class_="small")] if more else []),
        ]
        parts.append(tag("details", *folded, *([numbers] if numbers is not None else [])))
    return tag("figure", *parts)


def absent(title: str, why: str) -> Html:
    """A title and a reason, in place of a figure that a run has no numbers for."""
    return tag("figure", tag("h3", title), tag("p", why, class_="absent"))


def line_figure(
    data: ShownRun,
    title: str,
    why: str,
    series: Sequence[Series],
    axis: Axis,
    caption: str,
    columns: Sequence[Column],
    *,
    band: tuple[Series, Series] | None = None,
    more: str = "",
) -> Html:
    """Lines over the rounds, or the reason `why` if no value is known; `band` is as for `charts.lines`."""
    hidden = [name for name, _, format_ in columns if format_ is not_disclosed]
    lines = [line for line in series if known(line.values)]
    if not lines:
        return absent(title, NO_DISCLOSURE if hidden else why)
    if hidden:
        caption += f" {NOT_DISCLOSED.capitalize()} in this run: {', '.join(hidden)}."
    numbers, thin = thinned(data, [*lines, *(band or ())])
    edges = (thin[-2], thin[-1]) if band else None
    chart = charts.lines(numbers, thin[: len(lines)], axis, alt=title, band=edges)
    return figure(title, chart, caption, over_rounds(data, columns), more=more)


def thinned(data: ShownRun, series: Sequence[Series], most: int = POINTS) -> tuple[list[int], list[Series]]:
    """Rounds and lines over them: in the console, several rounds of a long run are averaged."""
    count = len(data.numbers)
    if not data.live or count <= most:
        return data.numbers, list(series)
    bins = Bins.of(data.run.rounds_total, count, most)
    numbers = [data.numbers[min(at, count - 1)] for at in bins.rounds()]
    return numbers, [replace(line, values=bins.of_line(line.values)) for line in series]


def folded(rows: Sequence[T]) -> list[Sequence[T]]:
    """The first rows, and the others, which a reader unfolds, if there are many."""
    return [rows] if len(rows) <= 3 * UNFOLDED // 2 else [rows[:UNFOLDED], rows[UNFOLDED:]]


def member_name(data: ShownRun, name: str) -> Html:
    """A member's name, which in the console leads to its page."""
    return tag("a", name, href=f"{data.root}/members/{quote(name, safe='')}") if data.live else text(name)


def absence(data: ShownRun, why: str, *names: str) -> str:
    """Why a run has no numbers of these names: `why`, unless its privacy hides them."""
    return NO_DISCLOSURE if data.undisclosed & set(names) else why


def not_disclosed(_: float) -> str:
    """The format of a number that privacy hides in all rounds."""
    return NOT_DISCLOSED


def recorded(data: ShownRun, *names: str) -> list[Column]:
    """Numbers of the rounds, by their names in the record."""
    columns: list[Column] = []
    for name in names:
        values = data.metric(name)
        hidden = name in data.undisclosed and not known(values)
        columns.append((definition(name).title, values, not_disclosed if hidden else format_of(name)))
    return columns


def over_rounds(data: ShownRun, columns: Sequence[Column]) -> Html | None:
    """The rounds in which one of the numbers is known; None in the console, which has a page for each round."""
    if data.live:
        return None
    rows = []
    for i, round_ in enumerate(data.numbers):
        values = [(series[i], format_) for _, series, format_ in columns]
        if any(math.isfinite(value) for value, _ in values):
            cells = (
                UNKNOWN if math.isnan(value) and format_ is not not_disclosed else format_(value)
                for value, format_ in values
            )
            rows.append([str(round_), *cells])
    return table(["round", *(name for name, _, _ in columns)], rows)


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if two series are equal wherever one of them is known."""
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))
