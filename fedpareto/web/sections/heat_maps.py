"""Members and rounds: a row for each member, a column for each round, darker where a number is larger."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.text import counted
from fedpareto import formatting
from fedpareto.run_table import FAILURES, OUTCOMES, MemberNumber, RunTable
from fedpareto.series import known
from fedpareto.web.pages.heat import COLUMNS, column, heat
from fedpareto.web.pages.html import Html, table, tag
from fedpareto.web.sections.bins import Bins
from fedpareto.web.sections.layout import absence, absent, figure
from fedpareto.web.sections.shown_run import ShownRun

HEATS: Mapping[str, str] = MappingProxyType(
    {"weight": "Weight", "cosine": "Against the step", "loss": "Loss", "status": "Failures"}
)
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "weight": "The darker, the more the member's update weighed in the step.",
        "cosine": "The darker, the more the member's update pointed against the step: 1 less the cosine.",
        "loss": "The darker, the larger the loss that the member reported of the model before the round.",
        "status": "Dark where the member declined, was refused or did not reply; light where it replied.",
    }
)
ABSENT = "The privacy of this run hides it, or no round has made a step."
_HIDDEN = {"weight": "weight", "cosine": "cosine", "loss": "loss_before"}  # the fields that privacy hides
_MORE = (
    "Plain averaging gives even rows. Multi-gradient descent gives weight to those whom the others would leave behind: "
    "a dark row is a member with unusual data, or one that tries to steer. A single dark cell in a column is a round "
    "that one member decided."
)


def maps(data: ShownRun) -> Html:
    """A map of each kind."""
    return tag("div", *(_figure(data, measure) for measure in HEATS), class_="figures")


def _figure(data: ShownRun, measure: str) -> Html:
    title, drawing = HEATS[measure], heat_map(data, measure)
    if not drawing:
        hidden = _HIDDEN.get(measure, "")
        return absent(title, absence(data, "No round of this run has made a step.", hidden))
    if measure != "weight":
        return figure(title, drawing, WORDS[measure])
    rows = []
    for name, values in data.rows(MemberNumber.WEIGHT).items():
        own = known(values)
        least, largest = (min(own), max(own)) if own else (np.nan, np.nan)
        mean = sum(own) / len(own) if own else np.nan
        rows.append((name, str(len(own)), *map(formatting.number, (mean, least, largest))))
    numbers = table(["member", "steps", "mean λ", "least", "largest"], rows)
    return figure(title, drawing, WORDS[measure], numbers, more=_MORE)


def heat_map(data: ShownRun, measure: str) -> Html:
    """One of `HEATS`, with room for the rounds to come; empty if no number is known."""
    table = data.table
    values = shades(table, measure)
    if not np.isfinite(values).any():
        return Html("")
    columns = Bins.of(data.run.rounds_total, table.stop, COLUMNS)
    planned = table.stop if data.over or not data.live else max(data.run.rounds_total, table.stop)
    width = -(-planned // columns.together)
    means = columns.means(values)
    padded = np.pad(means, ((0, 0), (0, max(0, width - means.shape[1]))), constant_values=np.nan)
    rounds = [at * columns.together for at in range(width)]
    words = f"{HEATS[measure]} of {counted(len(table.members), 'member')} in {counted(table.stop, 'round')}"
    format_: Callable[[float], str] = formatting.number if measure != "status" else formatting.percent
    return heat(
        rounds,
        table.names,
        padded.tolist(),
        format_,
        alt=HEATS[measure],
        words=words,
        largest=_largest(values, measure),
        together=columns.together,
    )


def last_column(data: ShownRun, measure: str) -> tuple[int, Html]:
    """The last column of a map, which a new round changes, and its place."""
    columns, values = Bins.of(data.run.rounds_total, data.table.stop, COLUMNS), shades(data.table, measure)
    at = columns.count - 1
    means = columns.means(values[:, : data.table.stop], at)[:, 0].tolist()
    return at, column(means, at, _largest(values, measure))


def shades(table: RunTable, measure: str) -> NDArray[np.floating[Any]]:
    """(members, rounds), in the order of the members' names; NaN is blank."""
    order = table.order
    if measure == "status":
        codes = table.outcomes()[order]
        failed = np.isin(codes, [OUTCOMES.index(outcome) for outcome in FAILURES])
        return np.where(codes == 0, np.nan, failed.astype(np.float64))
    values = table.values(MemberNumber(measure))[order].astype(np.float64)
    return 1.0 - values if measure == "cosine" else values


def _largest(values: NDArray[np.floating[Any]], measure: str) -> float:
    """The value of the darkest shade, which the rounds to come should not change."""
    if measure in ("status", "cosine"):
        return {"status": 1.0, "cosine": 2.0}[measure]
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, 0.995)) if finite.size else 0.0
