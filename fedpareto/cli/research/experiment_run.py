"""`fedpareto experiment run`: makes the runs that are missing, and shows all."""

import sys
import tempfile
from datetime import UTC, datetime
from typing import Annotated

import typer

from federation.text import counted
from fedpareto.cli.failure import INTERRUPTED, USAGE, CommandFailure, require
from fedpareto.cli.research.experiment import Data, Name, Out, QuickForm, Rounds
from fedpareto.cli.shared_options import CodeOption, ProgressJsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.cli.research import experiment_results as results
    from fedpareto.cli.research import experiment_runs as runs
    from fedpareto.cli.show.tables import console as make_console
    from fedpareto.experiments.experiment_runner import RunnerSettings
    from fedpareto.experiments.origins import session
    from fedpareto.experiments.result_store import Store
    from fedpareto.formatting import span


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

    Finished runs are kept; another call makes only the missing runs. Tables and figures contain all finished runs.
    """
    require("experiments need", "torch", "matplotlib", extra="torch,experiments")
    experiment = results.load(name, quick, rounds)
    runs.check_data(experiment, data)
    wanted = results.jobs(experiment, runs.seeds(seeds) or experiment.seeds, methods or [], conditions or [])
    runs.check_training(device, backend)
    made_by = session(["fedpareto", *sys.argv[1:]], datetime.now(UTC), device)
    store = Store(out or results.directory(experiment.name, quick, rounds), made_by)
    console = make_console(stderr=as_json)
    with results.usable(store.directory, USAGE):
        store.directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=store.directory).close()
        results.mend(console, store)
        if resume:
            runs.check_specifications(store, wanted)
        else:
            runs.forget(store, wanted)
        left = [job for job in wanted if store.find(job) is None]
    seconds = experiment.core_seconds([job.cell for job in left], 1)
    estimate = f"; the others take a core about {span(seconds)}" if seconds else ""
    done = len(wanted) - len(left)
    results.say(console, f"{experiment.title}: {counted(len(wanted), 'run')}, {done} of them done before{estimate}")
    settings = RunnerSettings(data if experiment.data else None, device, backend, experiment.exclude_attackers, jobs)
    finished, failed = runs.make(console, store, settings, left)
    with results.usable(store.directory), store.locked():
        results.show(console, experiment, store, failed, as_json=as_json)
    if failed:
        label, reason = next(iter(failed.items()))
        raise CommandFailure(f"{len(failed)} of {len(left)} runs failed, the first of them {label}: {reason}")
    if finished < len(left):
        results.say(console, "stopped; finished rounds are kept, and the same command continues")
        raise typer.Exit(INTERRUPTED)
