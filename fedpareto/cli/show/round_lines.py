"""Rounds as lines with columns: their numbers, under the titles of these."""

import math
from collections.abc import Mapping, Sequence

from coordinator.rounds.runs.metric_definitions import definition
from fedpareto.formatting import format_of

_ROUND, _NUMBER = 6, 8  # columns of the number of a round, and at least of each other number


def heading(names: Sequence[str], *more: str) -> str:
    """The titles of numbers that a round records, by their names in the record, and titles of `more` columns."""
    return "  ".join([f"{'round':>{_ROUND}}", *map(_column, names), *(f"{title:>{_NUMBER}}" for title in more)])


def line(round_: int, metrics: Mapping[str, float], names: Sequence[str], *more: str) -> str:
    """A round under `heading`; a number that is not in `metrics` is a dash."""
    cells = [f"{format_of(name)(metrics.get(name, math.nan)):>{len(_column(name))}}" for name in names]
    return "  ".join([f"{round_:>{_ROUND}}", *cells, *(f"{text:>{_NUMBER}}" for text in more)])


def _column(name: str) -> str:
    return f"{definition(name).title:>{_NUMBER}}"
