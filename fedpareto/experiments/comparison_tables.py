"""Tables of an experiment beside the published numbers: means ± population standard deviations over the seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from federation.spec.run_sections import AUTO
from fedpareto.experiments import measures
from fedpareto.experiments.definition import Cell, Experiment
from fedpareto.experiments.published_numbers import number
from fedpareto.experiments.result_store import RunResult

UNKNOWN = "–"
SKIPPED = "skipped"
NOT_DISCLOSED = "not disclosed"
_METHOD, _CONDITION, _RATE = _NAMES = ("Method", "Condition", "Server rate")


@dataclass(frozen=True)
class Spread:
    """A mean and its deviation, NaN if unknown. `str` shows them with two decimals.

    Attributes:
        missing: what is shown where it is unknown: a dash, that every round of the runs was skipped, or that privacy
            hides it.
    """

    mean: float
    deviation: float = math.nan
    missing: str = UNKNOWN

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return self.missing
        return f"{self.mean:.2f} ± {self.deviation:.2f}" if math.isfinite(self.deviation) else f"{self.mean:.2f}"


@dataclass(frozen=True)
class Table:
    """A table as it is shown; the cells are text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown, with names aligned to the left and numbers to the right."""
        lines = [self.header, ["---" if name in _NAMES else "---:" for name in self.header], *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def ours(results: Iterable[RunResult], cell: Cell, measure: str) -> Spread:
    """A measure of a cell over its seeds; without a deviation if there is one seed."""
    finals = [item.final for item in results if item.is_of(cell)]
    values = [final[measure] for final in finals if measure in final]
    if not values:
        if finals and all(map(measures.all_skipped, finals)):
            return Spread(math.nan, missing=SKIPPED)
        hidden = any(measures.hides(final, measure) for final in finals)
        return Spread(math.nan, missing=NOT_DISCLOSED if hidden else UNKNOWN)
    return Spread(float(np.mean(values)), float(np.std(values)) if len(values) > 1 else math.nan)


def comparison(experiment: Experiment, results: Sequence[RunResult], *, narrow: bool = False) -> Table:
    """A row for each cell with results: the measured number, the published number, and their difference.

    A narrow table shows means only, with the difference in brackets.
    """
    conditions, rates = any(item.name for item in experiment.conditions), _some_rate_changes(results)
    header = [_METHOD, *[_CONDITION] * conditions, *[_RATE] * rates, "Seeds"]
    for column in experiment.columns:
        compared = [f"{column.title} (Δ)"] if narrow else [column.title, "published", "Δ"]
        header += compared if column.published else [column.title]
    rows = []
    for cell in _with_results(experiment, results):
        runs = [item for item in results if item.is_of(cell)]
        theirs = experiment.published_values(cell)
        row = [cell.method.name, *[cell.condition.name] * conditions, *[_rates(runs)] * rates, str(len(runs))]
        for column in experiment.columns:
            measured = ours(runs, cell, column.measure)
            printed = Spread(number(theirs, column.published), number(theirs, f"{column.published}_pm"))
            difference = measured.mean - printed.mean
            delta = f"{difference:+.2f}" if math.isfinite(difference) else UNKNOWN
            if narrow:
                mean = str(replace(measured, deviation=math.nan))
                row.append(mean if delta == UNKNOWN else f"{mean} ({delta})")
            else:
                row += [str(measured), str(printed), delta] if column.published else [str(measured)]
        rows.append(tuple(row))
    return Table(experiment.title, tuple(header), tuple(rows))


def _some_rate_changes(results: Iterable[RunResult]) -> bool:
    return any(item.final.get("rate/first") != item.final.get("rate/last") for item in results)


def _rates(results: Iterable[RunResult]) -> str:
    """The server's learning rates in the first and the last step; unknown if the runs differ, or if no run has them.

    "auto" has other rates in every run.
    """
    results = list(results)
    if results and all(item.spec.get("server", {}).get("learning_rate") == AUTO for item in results):
        return AUTO
    keys = ("rate/first", "rate/last")
    rates = {tuple(item.final[key] for key in keys) for item in results if all(key in item.final for key in keys)}
    if len(rates) != 1:
        return UNKNOWN
    first, last = rates.pop()
    return f"{first:.3g}" if first == last else f"{first:.3g} to {last:.3g}"


def grids(experiment: Experiment, results: Sequence[RunResult]) -> tuple[Table, ...]:
    """For each measure a table of the methods and conditions that have it."""
    cells = {cell.key: cell for cell in _with_results(experiment, results)}
    rates = _some_rate_changes(results)
    tables = []
    for column in experiment.columns:
        values = {key: str(ours(results, cell, column.measure)) for key, cell in cells.items()}
        methods, conditions = experiment.grid([key for key, value in values.items() if value != UNKNOWN])
        rows = []
        for method in methods:
            rate = [_rates(item for item in results if item.method == method)] * rates
            rows.append((method, *rate, *(values.get((method, condition), "") for condition in conditions)))
        tables.append(Table(column.title, (_METHOD, *[_RATE] * rates, *conditions), tuple(rows)))
    return tuple(tables)


def shown(experiment: Experiment, results: Sequence[RunResult]) -> tuple[Table, ...]:
    """The main tables: the comparison, or grids of methods and several conditions if nothing was published."""
    if len(experiment.conditions) > 1 and not any(column.published for column in experiment.columns):
        return grids(experiment, results)
    return (comparison(experiment, results),)


def page(experiment: Experiment, results: Sequence[RunResult]) -> str:
    """The text of table.md: the source, how the runs were made, and the tables."""
    lines = [f"# {experiment.title}", ""]
    lines += [f"{experiment.source}.", ""] if experiment.source else []
    lines += [_made(experiment, results), ""]
    for table in shown(experiment, results):
        lines += ([f"## {table.title}", ""] if table.title != experiment.title else []) + [table.markdown(), ""]
    if experiment.published is not None:
        lines += ["Δ is ours minus published. ± is the population standard deviation over the seeds.", ""]
    return "\n".join(lines)


def _made(experiment: Experiment, results: Sequence[RunResult]) -> str:
    seeds = ", ".join(str(seed) for seed in sorted({item.seed for item in results})) or "none yet"
    wanted = len(experiment.cells()) * len(experiment.seeds)
    text = f"{experiment.spec['rounds']} rounds; seeds {seeds}; {len(results)} of {wanted} runs."
    sessions = sorted((item.session for item in results if item.session.command), key=lambda session: session.began)
    commands = list(dict.fromkeys(session.command for session in sessions))
    if commands:
        hours = sum(item.final.get("seconds", 0.0) for item in results) / 3600
        many = f" {len(commands)} commands made them (runs.jsonl), the last of which is" if len(commands) > 1 else ""
        devices = " and ".join(dict.fromkeys(str(session.hardware.get("device")) for session in sessions))
        text += f"{many} `{commands[-1]}`, on {devices}; {hours:.2f} hours of simulation in all."
    return text


def _with_results(experiment: Experiment, results: Sequence[RunResult]) -> list[Cell]:
    return [cell for cell in experiment.cells() if any(item.is_of(cell) for item in results)]
