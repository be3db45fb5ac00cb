"""The results of `fedpareto experiment`: the runs of an experiment, and their tables and figures."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from federation.text import counted
from fedpareto.cli.document import dumps
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.experiments import comparison_tables, loading, plots
from fedpareto.experiments.definition import Experiment, ExperimentError, slug
from fedpareto.experiments.derived import derived
from fedpareto.experiments.result_store import RUNS, DamagedError, Job, Store
from fedpareto.standard_streams import print_document


def load(name: str, quick: bool, rounds: int | None) -> Experiment:
    """An experiment in the form that the options choose."""
    try:
        experiment = loading.load(name)
    except ExperimentError as error:
        raise CommandFailure(str(error), code=USAGE) from None
    if quick:
        experiment = experiment.in_quick_form()
    return experiment if rounds is None else experiment.with_rounds(rounds)


def directory(name: str, quick: bool, rounds: int | None) -> Path:
    """The default directory of the results."""
    return Path("results") / (name + ("-quick" if quick else "") + ("" if rounds is None else f"-{rounds}-rounds"))


def jobs(experiment: Experiment, seeds: Sequence[int], methods: Sequence[str], conditions: Sequence[str]) -> list[Job]:
    """The runs, ordered by seed, so that an interrupted experiment has all methods with few seeds."""
    try:
        cells = experiment.cells(
            _names(methods, [method.name for method in experiment.methods]),
            _names(conditions, [condition.name for condition in experiment.conditions]),
        )
        all_jobs = [Job(cell, seed) for seed in seeds for cell in cells]
        for job in all_jobs:
            job.cell.spec(job.seed)
    except ExperimentError as error:
        raise CommandFailure(str(error), code=USAGE) from None
    return all_jobs


def _names(values: Sequence[str], existing: Sequence[str]) -> list[str]:
    """The names in the values of an option: each value is a name, which can contain commas, or a list of names."""
    slugs = {slug(name) for name in existing}
    return [name for value in values for name in ([value] if slug(value) in slugs else value.split(","))]


@contextmanager
def usable(directory: Path, code: int = 1) -> Iterator[None]:
    """Turns errors of the files in a directory into a CommandFailure."""
    try:
        yield
    except OSError as error:
        raise CommandFailure(f"cannot use {error.filename or directory}: {error.strerror}", code=code) from error
    except DamagedError as error:
        raise CommandFailure(str(error), code=code) from error


def mend(console: Console, store: Store) -> None:
    """Drops the half-written line of a run whose command was killed."""
    if store.mend():
        say(console, f"{RUNS} ends in half a line, of a run that was being written: dropped", style="yellow")


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a line without wrapping it."""
    console.print(text, style=style, soft_wrap=True)


def show(console: Console, experiment: Experiment, store: Store, failed: Mapping[str, str], *, as_json: bool) -> None:
    """Writes table.md and figures, if there are results; prints the table."""
    stored = store.runs()
    others = sorted({run.seed for run in stored.values()}.difference(experiment.seeds))
    experiment = experiment.model_copy(update={"seeds": (*experiment.seeds, *others)})
    jobs = [Job(cell, seed) for cell in experiment.cells() for seed in experiment.seeds]
    for job in jobs:
        if difference := store.other(job):
            say(console, f"{job.label} is of another specification ({difference}): left out", style="yellow")
    if unknown := sorted(stored.keys() - {job.name for job in jobs}):
        say(console, f"the experiment has no run {unknown[0]} (one of {len(unknown)}): left out", style="yellow")
    results = derived(experiment, [result for job in jobs if (result := store.find(job)) is not None])
    figures = list[Path]()
    if results:
        (store.directory / "table.md").write_text(comparison_tables.page(experiment, results), encoding="utf-8")
        figures = plots.draw(experiment, results, store.directory)
    shown = comparison_tables.shown(experiment, results)
    if as_json:
        document = {
            "experiment": experiment.name,
            "directory": str(store.directory),
            "results": [item.row for item in results],
            "tables": [asdict(table) for table in shown],
            "figures": [path.name for path in figures],
            "failed": dict(failed),
        }
        print_document(dumps(document))
    elif results:
        for table in filter(lambda item: item.rows, shown):
            wide = table.title == experiment.title  # the published columns do not fit into a terminal
            console.print(_rich(comparison_tables.comparison(experiment, results, narrow=True) if wide else table))
        say(console, f"in {store.directory}: {RUNS}, table.md, {counted(len(figures), 'figure')}")


def _rich(table: comparison_tables.Table) -> RichTable:
    rich = RichTable(title=table.title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index, name in enumerate(table.header):
        rich.add_column(name, justify="left" if index == 0 else "right")
    for row in table.rows:
        rich.add_row(*row)
    return rich
