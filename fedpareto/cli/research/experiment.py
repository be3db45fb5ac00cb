"""`fedpareto experiment`: runs the papers' experiments and compares the results with the published numbers."""

import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from federation.text import counted
from fedpareto.cli import completion
from fedpareto.cli.failure import INTERRUPTED, USAGE, CommandFailure, require
from fedpareto.cli.shared_options import CodeOption, ProgressJsonOption

_HELP = """Run the papers' experiments.

The results are compared with the published numbers.

An experiment has a run specification, methods to compare, and several seeds. List the experiments, with their time
and whether their data was found:

    fedpareto experiment list --data DATA

Run the quick form in minutes, then the whole experiment. After Ctrl-C, the same command continues it:

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
Rounds = Annotated[int | None, typer.Option(min=1, help="Another number of rounds; the table says how many.")]


@app.command("list")
def list_command(data: Data = None, code: CodeOption = None, as_json: ProgressJsonOption = False) -> None:
    """List the experiments.

    The list shows their source, their size, and whether their data was found.

    The time is estimated from measured rounds, for one core of an AMD EPYC of 2024; the time of the quick form is in
    brackets. --jobs divides it among cores.
    """
    from fedpareto.cli.research import experiment_list

    experiment_list.show(data, as_json=as_json)


@app.command("run")
def run_command(
    name: Name,
    quick: QuickForm = False,
    seeds: Annotated[str, typer.Option(metavar="N,N,...", help="Use these seeds.")] = "",
    rounds: Rounds = None,
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
    as_json: ProgressJsonOption = False,
) -> None:
    """Run an experiment: every method with every seed.

    Finished runs are files; another call makes only the missing runs. Tables and figures contain all finished runs.
    """
    require("experiments need", "torch", "matplotlib", extra="torch,experiments")
    from experiments.provenance import session
    from experiments.results import Store
    from experiments.runner import RunnerSettings
    from fedpareto.cli.research import experiment_results as results
    from fedpareto.cli.research import experiment_runs as runs
    from fedpareto.cli.show.tables import console as make_console
    from fedpareto.formatting import span

    experiment = results.load(name, quick, rounds)
    runs.must_have_data(experiment, data)
    wanted = results.jobs(experiment, runs.seeds(seeds) or experiment.seeds, methods or [], conditions or [])
    runs.must_train(device, backend)
    made_by = session(["fedpareto", *sys.argv[1:]], datetime.now(UTC), device)
    store = Store(out or results.directory(experiment.name, quick, rounds), made_by)
    console = make_console(stderr=as_json)
    with results.usable(store.directory, USAGE):
        store.directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=store.directory).close()
        results.restore(console, store)
        if resume:
            runs.must_be_of_these_specifications(store, wanted)
        else:
            runs.forget(store, wanted)
        results.tell_damage(console, store, wanted, "made again")
    left = [job for job in wanted if store.find(job) is None]
    seconds = experiment.core_seconds([job.cell for job in left], 1)
    estimate = f"; the others take a core about {span(seconds)}" if seconds else ""
    done = len(wanted) - len(left)
    results.say(console, f"{experiment.title}: {counted(len(wanted), 'run')}, {done} of them done before{estimate}")
    settings = RunnerSettings(data if experiment.data else None, device, backend, experiment.exclude_attackers, jobs)
    finished, failed = runs.make(console, store, settings, left)
    with results.usable(store.directory):
        results.show(console, experiment, store, failed, as_json=as_json)
    if failed:
        label, reason = next(iter(failed.items()))
        raise CommandFailure(f"{len(failed)} of {len(left)} runs failed, the first of them {label}: {reason}")
    if finished < len(left):
        results.say(console, "stopped; finished rounds are kept, and the same command continues")
        raise typer.Exit(INTERRUPTED)


@app.command("compare")
def compare_command(
    name: Name,
    quick: QuickForm = False,
    rounds: Rounds = None,
    code: CodeOption = None,
    out: Out = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Compare the finished runs with the published numbers.

    Table, CSV files, run.json and figures are written anew.
    """
    from experiments.results import Store
    from fedpareto.cli.research import experiment_results as results
    from fedpareto.cli.show.tables import console as make_console

    experiment = results.load(name, quick, rounds)
    store = Store(out or results.directory(experiment.name, quick, rounds))
    console = make_console(stderr=as_json)
    with results.usable(store.directory):
        results.restore(console, store)
        if not store.names():
            raise CommandFailure(
                f"no results in {store.directory}: `fedpareto experiment run {name}` makes them", code=USAGE
            )
        jobs = results.jobs(experiment, experiment.seeds, [], [])
        results.tell_damage(console, store, jobs, "left out")
        if not any(store.find(job) for job in jobs):
            many = f"{counted(len(store.names()), 'finished run')} in {store.directory}"
            raise CommandFailure(f"{many}, none of this specification: was it --quick, --rounds N?", code=USAGE)
        results.show(console, experiment, store, {}, as_json=as_json)
