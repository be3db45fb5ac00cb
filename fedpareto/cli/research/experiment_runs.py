"""Makes the runs of `fedpareto experiment run`, and refuses runs that cannot be made."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from federation.training.determinism import pick_device
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.research.experiment_list import data_exists
from fedpareto.cli.research.experiment_results import say
from fedpareto.experiments import experiment_runner
from fedpareto.experiments.definition import Experiment
from fedpareto.experiments.experiment_runner import Event, ExperimentRunner, RunnerSettings
from fedpareto.experiments.result_store import Job, Store
from fedpareto.formatting import span
from fedpareto.simulation.backends import BACKENDS
from storage.database import DatabaseBusy


def seeds(text: str) -> tuple[int, ...]:
    """The seeds of --seeds; empty if it is not given."""
    try:
        return tuple(dict.fromkeys(int(seed) for seed in text.split(","))) if text else ()
    except ValueError:
        raise CommandFailure(f"--seeds {text!r}: expected whole numbers, such as 0,12,37", code=USAGE) from None


def check_data(experiment: Experiment, data: Path | None) -> None:
    """Refuses an experiment without its data."""
    if data_exists(experiment, data):
        return
    paths = " or ".join(experiment.data)
    if data is None:
        raise CommandFailure(f"{experiment.name} needs data: --data DIR, with {paths} in it", code=USAGE)
    raise CommandFailure(f"{data} lacks the data of {experiment.name}: {paths}", code=USAGE)


def check_training(device: str, backend: str) -> None:
    """Refuses an unknown device or backend."""
    if backend not in BACKENDS:
        raise CommandFailure(f"no backend {backend!r}: there are {', '.join(BACKENDS)}", code=USAGE)
    try:
        pick_device(device)
    except ValueError as error:
        raise CommandFailure(str(error), code=USAGE) from None


def check_specifications(store: Store, jobs: Sequence[Job]) -> None:
    """Refuses to replace runs of other specifications."""
    differences = [difference for job in jobs if (difference := experiment_runner.other(store, job))]
    if differences:
        raise CommandFailure(
            f"{len(differences)} of these {len(jobs)} runs are in {store.directory} with another specification "
            f"({differences[0]}): name another --out, or --anew to replace them",
            code=USAGE,
        )


def forget(store: Store, jobs: Sequence[Job]) -> None:
    """Removes runs, for --anew."""
    try:
        experiment_runner.forget(store, jobs)
    except DatabaseBusy as error:
        reason = f"--anew removes nothing while another process makes one of these runs: {error}"
        raise CommandFailure(reason, code=USAGE) from None


def make(console: Console, store: Store, settings: RunnerSettings, jobs: Sequence[Job]) -> tuple[int, dict[str, str]]:
    """Makes runs, and shows the progress over all of them. Ctrl-C stops it.

    Returns:
        The number of finished runs, and the reasons of failed runs by the label of the run.
    """
    finished, failed = 0, dict[str, str]()
    rounds = {job.name: job.cell.rounds for job in jobs}
    total, done = sum(rounds.values()), dict.fromkeys(rounds, 0)
    making = ExperimentRunner(store, settings)
    before = signal.signal(signal.SIGINT, lambda *_: making.stop())
    began = time.monotonic()
    columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True))
    progress = Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600)
    bar = progress.add_task("", total=total)

    def tell(event: Event) -> None:
        nonlocal finished
        done[event.job.name] = rounds[event.job.name] if event.kind == "finished" else event.done
        progress.update(bar, completed=sum(done.values()))
        if event.kind == "finished":
            finished += 1
            left = (time.monotonic() - began) * (total / max(sum(done.values()), 1) - 1)
            say(console, f"{finished}/{len(jobs)}  {_line(store, event.job)}; {span(left)} left")
        elif event.kind == "failed":
            failed[event.job.label] = event.reason
            say(console, f"{event.job.label}: failed: {event.reason}", style="red")

    try:
        with failing(OSError), progress:
            making.run(jobs, tell)
    finally:
        signal.signal(signal.SIGINT, before)
    return finished, failed


def _line(store: Store, job: Job) -> str:
    result = store.find(job)
    final = result.final if result is not None else {}
    mean = f"mean {final['mean']:.2f} %, std {final['std']:.2f}, " if {"mean", "std"} <= final.keys() else ""
    return f"{job.label}: {mean}{span(final.get('seconds', 0.0))}"
