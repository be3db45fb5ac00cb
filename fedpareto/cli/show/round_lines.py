"""Rounds as lines with columns: their numbers, under the titles of these."""

from collections.abc import Container, Mapping, Sequence

from federation.record.metric_definitions import definition
from fedpareto.formatting import NOT_DISCLOSED, recorded

# Columns of the number of a round, of each recorded number, and at least of what follows.
_ROUND, _NUMBER, _MORE = 6, len(NOT_DISCLOSED), 8


def heading(names: Sequence[str], *more: str) -> str:
    """The titles of numbers that a round records, by their names in the record, and titles of `more` columns."""
    return "  ".join([f"{'round':>{_ROUND}}", *map(_column, names), *(f"{title:>{_MORE}}" for title in more)])


def line(
    round_: int, metrics: Mapping[str, float], undisclosed: Container[str], names: Sequence[str], *more: str
) -> str:
    """A round under `heading`; a number that is not in `metrics` is a dash, or "not disclosed"."""
    cells = [f"{recorded(name, metrics, undisclosed):>{len(_column(name))}}" for name in names]
    return "  ".join([f"{round_:>{_ROUND}}", *cells, *(f"{text:>{_MORE}}" for text in more)])


def _column(name: str) -> str:
    return f"{definition(name).title:>{_NUMBER}}"
