"""`fedpareto experiment`: the papers' experiments, run and set beside the published numbers."""

# ruff: noqa: PLC0415 - torch, numpy and matplotlib are loaded by the commands, not by `fedpareto --help`
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpareto.cli import completion
from fedpareto.cli.code_option import CodeOption
from fedpareto.cli.failure import INTERRUPTED, USAGE, Failure

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.definition import Experiment
    from experiments.results import Job, Store
    from experiments.runner import Settings

_HELP = """Run the papers' experiments.

The results are compared with the published numbers.

An experiment has a run specification, methods to compare, and several seeds. List the experiments, with their time
and whether their data was found:

    fedpareto experiment list --data DATA

Run the quick form in minutes, then the whole experiment. After Ctrl-C, the same command continues:

    fedpareto experiment run fedfv-table3 --data DATA --quick

    fedpareto experiment run fedfv-table3 --data DATA

Results go to results/NAME (results/NAME-quick, with --rounds results/NAME-N-rounds): results.csv, curves.csv, table.md,
figures, run.json.
"""

app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="See `fedpareto experiment list`; or a file of your own, ./my.toml.",
        autocompletion=completion.experiments,
    ),
]
Data = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory of the data sets, as their tasks expect them.")
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the results. Default: results/NAME...")]
QuickForm = Annotated[bool, typer.Option("--quick", help="Use the quick form, which takes minutes on two cores.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document; progress on stderr.")]


@app.command("list")
def list_command(data: Data = None, code: CodeOption = None, as_json: Json = False) -> None:
    """List the experiments.

    The list shows their source, their size, and whether their data was found.

    The time is estimated from measured rounds, for one core of an AMD EPYC of 2024; the time of the quick form is in
    brackets. --jobs divides it among cores.
    """
    from experiments.definition import ExperimentError
    from experiments.loading import load, names, plugins
    from fedpareto.cli.render import console as make_console

    packages = {offer.name: offer.package for offer in plugins()}
    found, unusable = [], []
    for name in names():
        brought = {"package": packages[name]} if name in packages else {}
        try:
            found.append(_overview(load(name), data) | brought)
        except ExperimentError as error:
            unusable.append({"name": name, "error": str(error)} | brought)
    if as_json:
        typer.echo(json.dumps({"experiments": found, "unusable": unusable}, indent=2, ensure_ascii=False))
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("experiment", "runs", "quick", "on a core", "data", "what"):
        table.add_column(title, justify="right" if title in {"runs", "quick"} else "left")
    for item in found:
        whole, small = item["core_seconds"], item["quick_core_seconds"]
        table.add_row(
            item["name"],
            str(item["runs"]),
            str(item["quick_runs"]),
            f"{_span(whole)} ({_span(small)})" if whole and small else "–",
            {None: "give --data", True: "there", False: "missing"}[item["data_there"]],
            f"{item['title']}\n{item['source']}" + (f" [package {item['package']}]" if "package" in item else ""),
        )
    for item in unusable:
        table.add_row(item["name"], "", "", "", "", f"cannot be used: {item['error']}")
    make_console().print(table)


@app.command("run")
def run_command(
    name: Name,
    quick: QuickForm = False,
    seeds: Annotated[str, typer.Option(metavar="N,N,...", help="Use these seeds.")] = "",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Another number of rounds; the table says how many.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,NAME,...", help="Only these methods; may be repeated, for names with commas."),
    ] = None,
    conditions: Annotated[
        list[str] | None, typer.Option(metavar="NAME,NAME,...", help="Only these conditions, such as attacks.")
    ] = None,
    data: Data = None,
    code: CodeOption = None,
    out: Out = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Number of runs at once, each in its own process.")] = 1,
    device: Annotated[str, typer.Option(help="Where clients train: auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[str, typer.Option(help="stacked, loop, compiled, or auto; see `fedpareto simulate`.")] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume/--anew", help="Keep finished runs and make the missing ones, or make all again.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Run an experiment: every method with every seed.

    Finished runs are files; another call makes only the missing runs. Tables and figures contain all finished runs.
    """
    from importlib.util import find_spec

    missing = [package for package in ("torch", "matplotlib") if find_spec(package) is None]
    if missing:
        raise Failure(f"experiments need {' and '.join(missing)}: install fedpareto[torch,experiments]")
    from experiments.provenance import session
    from experiments.results import Store
    from experiments.runner import Settings
    from fedpareto.cli.render import console as make_console

    experiment = _experiment(name, quick, rounds)
    _must_have_data(experiment, data)
    chosen = _seeds(seeds)
    wanted = _jobs(experiment, chosen or experiment.seeds, methods or [], conditions or [])
    _must_train(device, backend)
    made_by = session(["fedpareto", *sys.argv[1:]], datetime.now(UTC), device)
    store, console = Store(_directory(experiment.name, quick, rounds, out), made_by), make_console(stderr=as_json)
    with _usable(store.directory, USAGE):
        store.directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=store.directory).close()
        _restore(console, store)
        if resume:
            _must_be_of_these_specifications(store, wanted)
        else:
            _forget(store, wanted)
        _tell_damage(console, store, wanted, "made again")
    left = [job for job in wanted if store.find(job) is None]
    takes = experiment.core_seconds([job.cell for job in left], 1)
    _say(
        console,
        f"{experiment.title}: {len(wanted)} runs, {len(wanted) - len(left)} of them done before"
        + (f"; the others take a core about {_span(takes)}" if takes else ""),
    )
    settings = Settings(data if experiment.data else None, device, backend, experiment.exclude_attackers, jobs)
    ended = _make(console, store, settings, left)
    with _usable(store.directory):
        _show(console, experiment, store, ended["failed"], as_json=as_json)
    if ended["failed"]:
        label, reason = next(iter(ended["failed"].items()))
        raise Failure(f"{len(ended['failed'])} of {len(left)} runs failed, the first of them {label}: {reason}")
    if ended["stopped"]:
        _say(console, "stopped; what was done is kept, and the same command goes on")
        raise typer.Exit(INTERRUPTED)


@app.command("compare")
def compare_command(
    name: Name,
    quick: QuickForm = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Another number of rounds; the table says how many.")
    ] = None,
    code: CodeOption = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare the finished runs with the published numbers.

    Table, CSV files, run.json and figures are written anew.
    """
    from experiments.results import Store
    from fedpareto.cli.render import console as make_console

    experiment = _experiment(name, quick, rounds)
    store, console = Store(_directory(experiment.name, quick, rounds, out)), make_console(stderr=as_json)
    with _usable(store.directory):
        _restore(console, store)
        if not store.names():
            raise Failure(f"no results in {store.directory}: `fedpareto experiment run {name}` makes them", code=USAGE)
        jobs = _jobs(experiment, experiment.seeds, [], [])
        _tell_damage(console, store, jobs, "left out")
        if not any(store.find(job) for job in jobs):
            many = f"{len(store.names())} finished runs in {store.directory}"
            raise Failure(f"{many}, none of this specification: was it --quick, --rounds N?", code=USAGE)
        _show(console, experiment, store, {}, as_json=as_json)


def _experiment(name: str, quick: bool, rounds: int | None) -> "Experiment":
    from experiments.definition import ExperimentError
    from experiments.loading import load

    try:
        experiment = load(name)
    except ExperimentError as error:
        raise Failure(str(error), code=USAGE) from None
    if quick:
        experiment = experiment.in_quick_form()
    if rounds is not None:
        experiment = experiment.with_rounds(rounds)
    return experiment


def _seeds(text: str) -> tuple[int, ...]:
    """The seeds of --seeds; none when it was not given."""
    try:
        return tuple(dict.fromkeys(int(seed) for seed in text.split(","))) if text else ()
    except ValueError:
        raise Failure(f"--seeds {text!r}: expected whole numbers, such as 0,12,37", code=USAGE) from None


def _jobs(
    experiment: "Experiment", seeds: Sequence[int], methods: Sequence[str], conditions: Sequence[str]
) -> "list[Job]":
    """Seed by seed, so that an interrupted experiment has all methods with few seeds, not few methods."""
    from experiments.definition import ExperimentError
    from experiments.results import Job

    try:
        cells = experiment.cells(
            _names(methods, [method.name for method in experiment.methods]),
            _names(conditions, [condition.name for condition in experiment.conditions]),
        )
        jobs = [Job(cell, seed) for seed in seeds for cell in cells]
        for job in jobs:
            job.cell.spec(job.seed)
    except ExperimentError as error:
        raise Failure(str(error), code=USAGE) from None
    return jobs


def _names(values: Sequence[str], existing: Sequence[str]) -> list[str]:
    """What was asked for: each value is a name, commas and all, or names with commas between them."""
    from experiments.definition import slug

    known = {slug(name) for name in existing}
    return [name for value in values for name in ([value] if slug(value) in known else value.split(","))]


def _must_have_data(experiment: "Experiment", data: Path | None) -> None:
    if _data_there(experiment, data):
        return
    places = " or ".join(experiment.data)
    if data is None:
        raise Failure(f"{experiment.name} needs data: --data DIR, with {places} in it", code=USAGE)
    raise Failure(f"{data} lacks the data of {experiment.name}: {places}", code=USAGE)


def _must_train(device: str, backend: str) -> None:
    from federation.training.determinism import pick_device
    from simulation.backends import BACKENDS

    if backend not in BACKENDS:
        raise Failure(f"no backend {backend!r}: there are {', '.join(BACKENDS)}", code=USAGE)
    try:
        pick_device(device)
    except ValueError as error:
        raise Failure(str(error), code=USAGE) from None


def _must_be_of_these_specifications(store: "Store", jobs: "Sequence[Job]") -> None:
    """What was made with other settings is not replaced unasked."""
    from experiments.runner import other

    found = [difference for job in jobs if (difference := other(store, job))]
    if found:
        raise Failure(
            f"{len(found)} of these {len(jobs)} runs are in {store.directory} with another specification "
            f"({found[0]}): name another --out, or --anew to replace them",
            code=USAGE,
        )


def _forget(store: "Store", jobs: "Sequence[Job]") -> None:
    from experiments.runner import forget
    from storage.database import DatabaseBusy

    try:
        forget(store, jobs)
    except DatabaseBusy as error:
        raise Failure(
            f"--anew removes nothing while another process makes one of these runs: {error}", code=USAGE
        ) from None


@contextmanager
def _usable(directory: Path, code: int = 1) -> Iterator[None]:
    """What goes wrong with the files in a directory becomes a Failure."""
    try:
        yield
    except BrokenPipeError:  # nobody reads what is printed
        raise
    except OSError as error:
        path = directory if error.filename is None else error.filename
        raise Failure(f"cannot use {path}: {error.strerror}", code=code) from error


def _say(console: "Console", text: str, style: str | None = None) -> None:
    """A line with names in it, whose brackets are no markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _tell_damage(console: "Console", store: "Store", jobs: "Sequence[Job]", consequence: str) -> None:
    for damage in filter(None, map(store.damage, jobs)):
        _say(console, f"{damage}: {consequence}", style="yellow")


def _restore(console: "Console", store: "Store") -> None:
    """Makes files of the runs that only the tables have."""
    from experiments import record
    from experiments.results import DamagedError

    try:
        record.restore(store)
    except DamagedError as error:
        kept = " and ".join(record.set_aside(store))
        _say(console, f"{error}: kept as {kept}, and begun anew", style="yellow")


def _data_there(experiment: "Experiment", data: Path | None) -> bool | None:
    """Whether the data is at hand; None when nobody said where to look."""
    if not experiment.data:
        return True
    return None if data is None else any((data / path).exists() for path in experiment.data)


def _directory(name: str, quick: bool, rounds: int | None, out: Path | None) -> Path:
    form = "-quick" if quick else ""
    return out or Path("results") / (name + form + ("" if rounds is None else f"-{rounds}-rounds"))


def _overview(experiment: "Experiment", data: Path | None) -> dict[str, Any]:
    quick = experiment.in_quick_form()
    return {
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "methods": [method.name for method in experiment.methods],
        "conditions": [condition.name for condition in experiment.conditions if condition.name],
        "seeds": list(experiment.seeds),
        "rounds": experiment.spec["rounds"],
        "runs": len(experiment.cells()) * len(experiment.seeds),
        "quick_runs": len(quick.cells()) * len(quick.seeds),
        "core_seconds": experiment.core_seconds(experiment.cells(), len(experiment.seeds)),
        "quick_core_seconds": quick.core_seconds(quick.cells(), len(quick.seeds)),
        "data": list(experiment.data),
        "data_there": _data_there(experiment, data),
    }


def _make(console: "Console", store: "Store", settings: "Settings", jobs: "list[Job]") -> dict[str, Any]:
    """Makes the runs, with progress over all of them.

    Returns:
        How many were finished and stopped, and what failed with its reason.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from experiments.runner import Event, Runner

    ended: dict[str, Any] = {"finished": 0, "failed": {}, "stopped": 0}
    rounds = {job.name: job.cell.spec(job.seed).rounds for job in jobs}
    done = dict.fromkeys(rounds, 0)
    runner = Runner(store, settings)
    before = signal.signal(signal.SIGINT, lambda *_: runner.stop())
    began = time.monotonic()
    columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    try:
        with Progress(
            *columns, console=console, disable=not console.is_terminal, speed_estimate_period=600
        ) as progress:
            bar = progress.add_task("", total=sum(rounds.values()))

            def tell(event: Event) -> None:
                done[event.job.name] = rounds[event.job.name] if event.kind == "finished" else event.done
                progress.update(bar, completed=sum(done.values()))
                if event.kind == "finished":
                    ended["finished"] += 1
                    left = (time.monotonic() - began) * (sum(rounds.values()) / max(sum(done.values()), 1) - 1)
                    _say(console, f"{ended['finished']}/{len(jobs)}  {_line(store, event.job)}; {_span(left)} left")
                elif event.kind == "failed":
                    ended["failed"][event.job.label] = event.reason
                    _say(console, f"{event.job.label}: failed: {event.reason}", style="red")

            runner.run(jobs, tell)
    finally:
        signal.signal(signal.SIGINT, before)
    ended["stopped"] = len(jobs) - ended["finished"] - len(ended["failed"])
    return ended


def _line(store: "Store", job: "Job") -> str:
    result = store.find(job)
    final = result.final if result is not None else {}
    mean = f"mean {final['mean']:.2f} %, std {final['std']:.2f}, " if {"mean", "std"} <= final.keys() else ""
    return f"{job.label}: {mean}{_span(final.get('seconds', 0.0))}"


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 86400:.0f} days"


def _show(
    console: "Console", experiment: "Experiment", store: "Store", failed: dict[str, str], *, as_json: bool
) -> None:
    """Writes run.json, and everything that is made of results, where there are any; prints the table."""
    from experiments import plots, record, tables
    from experiments.derived import derived
    from experiments.results import Job

    others = sorted(store.seeds().difference(experiment.seeds))
    experiment = experiment.model_copy(update={"seeds": (*experiment.seeds, *others)})
    jobs = [Job(cell, seed) for cell in experiment.cells() for seed in experiment.seeds]
    for job in jobs:
        if difference := store.other(job):
            _say(console, f"{job.label} is of another specification ({difference}): left out", style="yellow")
    if strange := sorted(store.names().difference(job.name for job in jobs)):
        _say(console, f"the experiment has no run {strange[0]} (one of {len(strange)}): left out", style="yellow")
    found = {job.label: result for job in jobs if (result := store.find(job)) is not None}
    results = derived(experiment, list(found.values()))
    failed = {label: why for label, why in {**record.read(store).failed, **failed}.items() if label not in found}
    written = record.write(store, experiment.name, results, failed)
    figures = list[Path]()
    if results:
        (store.directory / "table.md").write_text(tables.page(experiment, results), encoding="utf-8")
        figures = plots.draw(experiment, results, store.directory)
    shown = tables.shown(experiment, results)
    if as_json:
        document = {
            "experiment": experiment.name,
            "directory": str(store.directory),
            "results": [
                {"method": item.method, "condition": item.condition, "seed": item.seed, **item.final}
                for item in results
            ],
            "tables": [{"title": table.title, "header": table.header, "rows": table.rows} for table in shown],
            "figures": [path.name for path in figures],
            "record": written.model_dump(mode="json"),
        }
        from fedpareto.cli.document import dumps

        typer.echo(dumps(document))
        return
    if not results:
        return
    for table in filter(lambda item: item.rows, shown):
        narrow = table.title == experiment.title  # with the published columns it does not fit a terminal
        console.print(_rich(tables.summary(experiment, results) if narrow else table))
    _say(console, f"in {store.directory}: table.md, results.csv, curves.csv, run.json, {len(figures)} figures")


def _rich(table: Any) -> Any:
    from rich.table import Table

    made = Table(title=table.title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index, name in enumerate(table.header):
        made.add_column(name, justify="left" if index == 0 else "right")
    for row in table.rows:
        made.add_row(*row)
    return made
