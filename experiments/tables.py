"""Ours beside the published numbers: mean ± population standard deviation over the seeds, and the deviation."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments import measures
from experiments.definition import Cell, Column, Experiment
from experiments.published import number
from experiments.results import Result

UNKNOWN = "–"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Spread:
    """A number with what it varies by; NaN where unknown. `str` shows it with two decimals.

    Attributes:
        skipped: whether it is unknown because there were runs, but every round of them was skipped.
    """

    mean: float
    deviation: float = math.nan
    skipped: bool = False

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return SKIPPED if self.skipped else UNKNOWN
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if math.isfinite(self.deviation) else f"{self.mean:.2f}"


@dataclass(frozen=True)
class Table:
    """A table as it is shown; the cells are text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown: names to the left, numbers to the right."""
        marks = ["---" if name in _TEXTS else "---:" for name in self.header]
        lines = [self.header, tuple(marks), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


RATE = "Server rate"
_TEXTS = ("Method", "Condition", RATE)


def ours(results: Iterable[Result], cell: Cell, measure: str) -> Spread:
    """A measure of a cell over its seeds. One seed alone has no deviation."""
    own = [item.final for item in results if (item.method, item.condition) == _key(cell)]
    values = [final[measure] for final in own if measure in final]
    if not values:
        return Spread(math.nan, skipped=bool(own) and all(map(measures.all_skipped, own)))
    return Spread(float(np.mean(values)), float(np.std(values)) if len(values) > 1 else math.nan)


def published(experiment: Experiment, cell: Cell, column: Column) -> Spread:
    """What the paper prints for a cell."""
    if not column.published:
        return Spread(math.nan)
    row = experiment.published_values(cell)
    return Spread(number(row, column.published), number(row, f"{column.published}_pm"))


def comparison(experiment: Experiment, results: Sequence[Result]) -> Table:
    """A row for each cell that has results: what came out, what was published, and the difference of the two."""
    header = _names(experiment, results)
    for column in experiment.columns:
        header += [column.title, "published", "Δ"] if column.published else [column.title]
    rows = []
    for cell in _with_results(experiment, results):
        row = _named(experiment, results, cell)
        for column in experiment.columns:
            measured, printed = ours(results, cell, column.measure), published(experiment, cell, column)
            row += [str(measured), *([str(printed), _difference(measured, printed)] if column.published else [])]
        rows.append(tuple(row))
    return Table(experiment.title, tuple(header), tuple(rows))


def summary(experiment: Experiment, results: Sequence[Result]) -> Table:
    """The same where room is scarce: means, with the difference from the published ones in brackets."""
    header = _names(experiment, results) + [
        f"{item.title} (Δ)" if item.published else item.title for item in experiment.columns
    ]
    rows = []
    for cell in _with_results(experiment, results):
        row = _named(experiment, results, cell)
        for column in experiment.columns:
            measured = replace(ours(results, cell, column.measure), deviation=math.nan)
            difference = _difference(measured, published(experiment, cell, column))
            row.append(str(measured) if difference == UNKNOWN else f"{measured} ({difference})")
        rows.append(tuple(row))
    return Table(experiment.title, tuple(header), tuple(rows))


def _difference(measured: Spread, printed: Spread) -> str:
    difference = measured.mean - printed.mean
    return f"{difference:+.2f}" if math.isfinite(difference) else UNKNOWN


def _names(experiment: Experiment, results: Iterable[Result]) -> list[str]:
    conditions = ["Condition"] if any(item.name for item in experiment.conditions) else []
    return ["Method", *conditions, *([RATE] if _some_rate_changes(results) else []), "Seeds"]


def _named(experiment: Experiment, results: Sequence[Result], cell: Cell) -> list[str]:
    own = [item for item in results if (item.method, item.condition) == _key(cell)]
    names = _names(experiment, results)
    conditions = [cell.condition.name] if "Condition" in names else []
    return [cell.method.name, *conditions, *([_rates(own)] if RATE in names else []), str(len(own))]


def _some_rate_changes(results: Iterable[Result]) -> bool:
    return any(item.final.get("rate/first") != item.final.get("rate/last") for item in results)


def _rates(results: Iterable[Result]) -> str:
    """The server's learning rates in the first and the last step; unknown where they are not the same in all runs."""
    found = {(item.final.get("rate/first", math.nan), item.final.get("rate/last", math.nan)) for item in results}
    first, last = found.pop() if len(found) == 1 else (math.nan, math.nan)
    if not math.isfinite(first):
        return UNKNOWN
    return f"{first:.3g}" if first == last else f"{first:.3g} to {last:.3g}"


def grids(experiment: Experiment, results: Sequence[Result]) -> tuple[Table, ...]:
    """For each measure a table of the methods and conditions that have results; none for a single condition."""
    if len(experiment.conditions) < 2:
        return ()
    found = []
    for column in experiment.columns:
        known = {_key(cell): ours(results, cell, column.measure) for cell in _with_results(experiment, results)}
        names = [item.name for item in experiment.conditions if item.name in {condition for _, condition in known}]
        rates = _some_rate_changes(results)
        rows = [
            (
                method.name,
                *([_rates(item for item in results if item.method == method.name)] if rates else []),
                *(str(known.get((method.name, name), "")) for name in names),
            )
            for method in experiment.methods
            if method.name in {name for name, _ in known}
        ]
        found.append(Table(column.title, ("Method", *([RATE] if rates else []), *names), tuple(rows)))
    return tuple(found)


def shown(experiment: Experiment, results: Sequence[Result]) -> tuple[Table, ...]:
    """The tables that an experiment is judged by: grids of methods and conditions where nothing was published."""
    if any(column.published for column in experiment.columns):
        return (comparison(experiment, results),)
    return grids(experiment, results) or (comparison(experiment, results),)


def page(experiment: Experiment, results: Sequence[Result]) -> str:
    """table.md: where it comes from, how it was made, and the tables."""
    lines = [
        f"# {experiment.title}",
        "",
        *([f"{experiment.source}.", ""] if experiment.source else []),
        _made(experiment, results),
        "",
    ]
    for table in shown(experiment, results):
        lines += ([f"## {table.title}", ""] if table.title != experiment.title else []) + [table.markdown(), ""]
    if experiment.published is not None:
        lines += ["Δ is ours minus published. ± is the population standard deviation over the seeds.", ""]
    return "\n".join(lines)


def _made(experiment: Experiment, results: Sequence[Result]) -> str:
    seeds = ", ".join(str(seed) for seed in sorted({item.seed for item in results})) or "none yet"
    rounds = experiment.spec["rounds"]
    wanted = len(experiment.cells()) * len(experiment.seeds)
    text = f"{rounds} rounds; seeds {seeds}; {len(results)} of {wanted} runs."
    known = [item.session for item in results if item.session.command]
    sessions = sorted(known, key=lambda session: session.began)
    commands = list(dict.fromkeys(session.command for session in sessions))
    if commands:
        hours = sum(item.final.get("seconds", 0.0) for item in results) / 3600
        many = f" {len(commands)} commands made them (run.json), the last of which is" if len(commands) > 1 else ""
        devices = " and ".join(dict.fromkeys(str(session.hardware.get("device")) for session in sessions))
        text += f"{many} `{commands[-1]}`, on {devices}; {hours:.2f} hours of simulation in all."
    return text


def _with_results(experiment: Experiment, results: Iterable[Result]) -> list[Cell]:
    there = {(item.method, item.condition) for item in results}
    return [cell for cell in experiment.cells() if _key(cell) in there]


def _key(cell: Cell) -> tuple[str, str]:
    return cell.method.name, cell.condition.name
