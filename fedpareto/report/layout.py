"""Parts of figures: title, chart, caption, numbers."""

import math
from collections.abc import Sequence

from coordinator.rounds.runs.metric_definitions import definition
from fedpareto.formatting import UNKNOWN, format_of
from fedpareto.report import charts
from fedpareto.report.charts import Axis, Format, Series
from fedpareto.report.html import Html, table, tag
from fedpareto.report.report_data import RunData
from fedpareto.series import known

Column = tuple[str, Sequence[float], Format]  # of a table: its name, its numbers, and how they are written


def figure(title: str, chart: Html, caption: str, numbers: Html | None = None) -> Html:
    """A figure, with its numbers folded up below it."""
    parts = [tag("h3", title), chart, tag("figcaption", caption)]
    if numbers is not None:
        parts.append(tag("details", tag("summary", "The numbers"), tag("div", numbers, class_="scroll")))
    return tag("figure", *parts)


def absent(title: str, why: str) -> Html:
    """A title and a reason, in place of a figure that a run has no numbers for."""
    return tag("figure", tag("h3", title), tag("p", why, class_="absent"))


def line_figure(
    data: RunData,
    title: str,
    absence: str,
    series: Sequence[Series],
    axis: Axis,
    caption: str,
    columns: Sequence[Column],
    *,
    band: tuple[Series, Series] | None = None,
) -> Html:
    """Lines over the rounds, or the reason `absence` if no value is known; `band` is as for `charts.lines`."""
    if not any(known(line.values) for line in series):
        return absent(title, absence)
    return figure(title, charts.lines(data.numbers, series, axis, band=band), caption, over_rounds(data, columns))


def recorded(data: RunData, *names: str) -> list[Column]:
    """Numbers of the rounds, by their names in the record."""
    return [(definition(name).title, data.metric(name), format_of(name)) for name in names]


def over_rounds(data: RunData, columns: Sequence[Column]) -> Html:
    """The rounds in which at least one of the numbers is known."""
    rows = []
    for i, round_ in enumerate(data.numbers):
        values = [(series[i], format_) for _, series, format_ in columns]
        if any(math.isfinite(value) for value, _ in values):
            cells = (UNKNOWN if math.isnan(value) else format_(value) for value, format_ in values)
            rows.append([str(round_), *cells])
    return table(["round", *(name for name, _, _ in columns)], rows, words=0)


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if two series are equal wherever one of them is known."""
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
