"""`fedpareto simulate`: a run specification on simulated clients."""

# ruff: noqa: PLC0415 - torch is loaded by the command, not by `fedpareto --help`
import json
import math
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpareto.cli.failure import INTERRUPTED, USAGE, Failure

if TYPE_CHECKING:
    from rich.console import Console

    from simulation.history import History
    from simulation.simulate import Progress as Progressed
    from simulation.simulate import Simulation

HEADER = f"{'round':>6}  {'mean':>8}  {'worst 5 %':>9}  {'improved':>8}  {'loss':>9}"


def simulate_command(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="A run specification; see docs/run-spec.md.")],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the task's data is.")] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the record goes; ./NAME-simulation unless said. A coordinator's home."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where clients train: auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[
        str,
        typer.Option(
            help="How clients train: stacked (all at once), loop (one by one), ray (over processes), or auto."
        ),
    ] = "auto",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A Ray cluster for --backend ray; without it one of this machine."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; small models are faster with 1. All cores unless said.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the simulation in --home.")] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Let the task fetch a public data set into --data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; progress on stderr.")] = False,
) -> None:
    """Run a specification on simulated clients: the same engine, algorithms and record, without a network.

    The section [simulation] of the specification says how many clients there are, what they hold, and who attacks. What
    is computed equals a federation of real workers with those names and data, but for the last bits of float32.

    Ctrl-C keeps what was done; --resume goes on. Look into the record as into any other:

        fedpareto simulate run.toml --data ~/data --home sim

        fedpareto admin --home sim/admin rounds RUN
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise Failure("simulated clients train with torch, not installed here: install fedpareto[torch]")
    from fedpareto.cli.render import console as make_console

    console = make_console(stderr=as_json)
    with _simulation(spec, home, data, download, device, backend, ray_address, threads, resume) as (
        simulation,
        directory,
    ):
        _announce(console, simulation, directory)
        history = _run(console, simulation)
    if as_json:
        typer.echo(json.dumps(_document(history, directory), indent=2))
    else:
        _summarise(console, history, directory)
    if history.state == "PAUSED":
        console.print(f"stopped; {len(history.round_records)} rounds are kept: the same command with --resume goes on")
        raise typer.Exit(INTERRUPTED)
    if history.state != "COMPLETED":
        raise Failure(f"the run ended {history.state}: {history.round_records[-1]['reason']}")


@contextmanager
def _simulation(
    spec: Path,
    home: Path | None,
    data: Path | None,
    download: bool,
    device: str,
    backend: str,
    ray_address: str | None,
    threads: int | None,
    resume: bool,
) -> "Iterator[tuple[Simulation, Path]]":
    """The simulation that was asked for; what is wrong with that becomes a Failure."""
    from coordinator.home import HomeError
    from federation.attacks import AttackError
    from federation.runs import SpecError
    from federation.tasks import DataError, PartError, TaskError
    from simulation.simulate import Simulation, SimulationError
    from storage.database import DatabaseBusy

    try:
        text = spec.read_bytes()
    except OSError as error:
        raise Failure(f"cannot read {spec}: {error.strerror}", code=USAGE) from None
    try:
        from federation.runs import RunSpec

        directory = home or Path(f"{RunSpec.parse(text).name}-simulation")
        with Simulation(
            text,
            directory,
            data=data,
            download=download,
            device=device,
            backend=backend,
            ray_address=ray_address,
            threads=threads,
            resume=resume,
        ) as simulation:
            yield simulation, directory
    except SpecError as error:
        raise Failure(f"{spec}: {error}", code=USAGE) from None
    except HomeError as error:
        more = "" if resume else "; --resume goes on with the simulation there, --home names another directory"
        raise Failure(f"{error}{more}", code=USAGE) from None
    except (TaskError, PartError, AttackError, SimulationError, DatabaseBusy, ValueError) as error:
        raise Failure(str(error), code=USAGE) from None
    except DataError as error:
        raise Failure(str(error)) from None
    except ModuleNotFoundError as error:
        raise Failure(f"--backend ray needs {error.name}, not installed here: install fedpareto[ray]") from None


def _announce(console: "Console", simulation: "Simulation", directory: Path) -> None:
    backend = simulation.backend
    why = f" ({backend.why})" if backend.why else ""
    console.print(f"{simulation.spec.name}: {simulation.spec.simulation.clients} clients, {backend.name}{why}")
    for caution in simulation.cautions:
        console.print(f"caution: {caution}", style="yellow")
    if simulation.attackers:
        console.print(f"{', '.join(simulation.attackers)}: {simulation.spec.simulation.attack}", style="red")
    console.print(f"the record: {directory}  run {simulation.run_id}")


def _run(console: "Console", simulation: "Simulation") -> "History":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fedpareto.cli.render import percent

    def stop(*_: object) -> None:
        simulation.stop()
        signal.signal(signal.SIGINT, before)  # a second Ctrl-C does not wait

    before = signal.signal(signal.SIGINT, stop)
    console.print(HEADER, style="bold")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} rounds/s"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True) as bar:
            shown = bar.add_task("rounds", total=simulation.spec.rounds, rate=0.0)

            def told(now: "Progressed") -> None:
                bar.update(shown, completed=now.done, rate=now.rate)
                metrics = defaultdict(lambda: math.nan, now.metrics)
                if "accuracy/mean" in metrics or "loss/train" in metrics:
                    console.print(
                        f"{now.done - 1:>6}  {percent(metrics['accuracy/mean']):>8}  "
                        f"{percent(metrics['accuracy/worst5']):>9}  {percent(metrics['improved']):>8}  "
                        f"{metrics['loss/train']:>9.4g}"
                    )

            return simulation.run(told)
    finally:
        signal.signal(signal.SIGINT, before)


def _document(history: "History", directory: Path) -> dict[str, Any]:
    return {
        "run_id": history.run_id,
        "state": history.state,
        "home": str(directory),
        "seconds": history.seconds,
        "attackers": list(history.attackers),
        "rounds": list(history.round_records),
        "clients": list(history.client_records),
        "updates": list(history.update_records),
    }


def _summarise(console: "Console", history: "History", directory: Path) -> None:
    rounds = len(history.round_records)
    skipped = sum(record["state"] == "SKIPPED" for record in history.round_records)
    refused = sum(not record["accepted"] for record in history.update_records)
    console.print(
        f"{rounds} rounds in {history.seconds:.1f} s"
        + (f", {skipped} skipped" if skipped else "")
        + (f", {refused} updates refused" if refused else "")
    )
    console.print(f"fedpareto admin --home {directory / 'admin'} rounds {history.run_id}", style="dim")
