"""Rounds as lines with columns: their numbers, under the titles of these."""

import tomllib
from collections.abc import Container, Mapping, Sequence

from federation.record.metric_definitions import definition
from federation.text import escaped
from federation.v1.admin_pb2 import Run
from fedpareto.formatting import NOT_DISCLOSED, recorded

STOP = "stop/value"
# Columns of the number of a round, of each recorded number, at least of what follows, and at most of a title.
_ROUND, _NUMBER, _MORE, _TITLE = 6, len(NOT_DISCLOSED), 8, 60


def heading(names: Sequence[str], *more: str, stop: str = "") -> str:
    """The titles of numbers that a round records, by their names in the record, and titles of `more` columns.

    `stop` is the title of the value by which the run is stopped; without it the value has no column.
    """
    titles = [
        f"{'round':>{_ROUND}}",
        *map(_column, names),
        *_stop_column(stop),
        *(f"{title:>{_MORE}}" for title in more),
    ]
    return "  ".join(titles)


def line(
    round_: int,
    metrics: Mapping[str, float],
    undisclosed: Container[str],
    names: Sequence[str],
    *more: str,
    stop: str = "",
) -> str:
    """A round under `heading`; a number that is not in `metrics` is a dash, or "not disclosed"."""
    cells = [f"{recorded(name, metrics, undisclosed):>{len(_column(name))}}" for name in names]
    cells += [f"{recorded(STOP, metrics, undisclosed):>{len(column)}}" for column in _stop_column(stop)]
    return "  ".join([f"{round_:>{_ROUND}}", *cells, *(f"{text:>{_MORE}}" for text in more)])


def stop_title(run: Run) -> str:
    """The title of the value by which a run is stopped, from its specification; empty if it is stopped by none."""
    try:
        stop = tomllib.loads(run.spec).get("stop")  # RunSpec would import NumPy
    except (ValueError, RecursionError):  # not a specification: a coordinator can send any text
        return ""
    if not isinstance(stop, dict):
        return ""
    return escaped(watched(str(stop.get("metric", "")), str(stop.get("of", "mean"))), _TITLE)


def watched(metric: str, of: str) -> str:
    """The title of the value by which a run is stopped, such as "auc (worst)"; empty without a metric."""
    return metric and f"{metric} ({of})"


def _stop_column(title: str) -> list[str]:
    return [f"{title:>{_NUMBER}}"] if title else []


def _column(name: str) -> str:
    return f"{definition(name).title:>{_NUMBER}}"
