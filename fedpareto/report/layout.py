"""What figures are made of: title, chart, caption, numbers."""

import math
from collections.abc import Sequence

from fedpareto.report.charts import Format
from fedpareto.report.data import RunData
from fedpareto.report.html import Html, table, tag


def figure(title: str, chart: Html, caption: str, numbers: Html | None = None) -> Html:
    """A figure, with its numbers folded up below it."""
    parts = [tag("h3", title), chart, tag("figcaption", caption)]
    if numbers is not None:
        parts.append(tag("details", tag("summary", "The numbers"), tag("div", numbers, class_="scroll")))
    return tag("figure", *parts)


def absent(title: str, why: str) -> Html:
    """In place of a figure that a run has no numbers for."""
    return tag("figure", tag("h3", title), tag("p", why, class_="absent"))


def over_rounds(data: RunData, columns: Sequence[tuple[str, Sequence[float], Format]]) -> Html:
    """The rounds in which at least one of the numbers is known."""
    rows = []
    for i, round_ in enumerate(data.numbers):
        values = [(found[i], format_) for _, found, format_ in columns]
        if any(math.isfinite(value) for value, _ in values):
            cells = ("–" if math.isnan(value) else format_(value) for value, format_ in values)
            rows.append([str(round_), *cells])
    return table(["round", *(name for name, _, _ in columns)], rows, words=0)


def known(values: Sequence[float]) -> list[float]:
    """Without what is not known."""
    return [value for value in values if math.isfinite(value)]


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two series are equal wherever one of them is known."""
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def last(values: Sequence[float]) -> float:
    """The last one that is known; NaN where none is."""
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def whole(value: float) -> str:
    """A number that is whole, mostly."""
    return f"{value:.0f}" if abs(value - round(value)) < 1e-9 else f"{value:.1f}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
