"""`fedpareto simulate`: a run specification on simulated clients."""

# ruff: noqa: PLC0415 - torch is loaded by the command, not by `fedpareto --help`
import math
import shlex
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpareto.cli.code_option import CodeOption
from fedpareto.cli.failure import INTERRUPTED, USAGE, Failure

if TYPE_CHECKING:
    from rich.console import Console

    from simulation.history import History
    from simulation.simulate import Progress as Progressed
    from simulation.simulate import Simulation

HEADER = f"{'round':>6}  {'mean':>8}  {'worst 5 %':>9}  {'improved':>8}  {'loss':>9}"


def simulate_command(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="A run specification; see docs/run-spec.md.")],
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the task's data.")] = None,
    code: CodeOption = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the record, a new one. Default: ./NAME-simulation."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where clients train: auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[
        str,
        typer.Option(
            help="How clients train: stacked (all at once), loop (one by one), compiled (for small models; needs "
            "a C++ compiler), ray (in several processes), or auto (stacked if possible and fast, else loop)."
        ),
    ] = "auto",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A running Ray cluster, for --backend ray. Default: start one here."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; small models are faster with 1. Default: all cores.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted simulation in --home.")] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Let the task fetch a public data set into --data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; progress on stderr.")] = False,
) -> None:
    """Run a specification on simulated clients.

    It uses the engine, the algorithms and the record of a real federation, without a network.

    The section [simulation] of the specification says how many clients there are, which samples they hold, and
    which of them attack. Without it, ten clients share the data evenly. The results equal those of real workers with
    the same names and data, up to rounding in float32.

        fedpareto simulate run.toml --data ~/data --home sim

    After Ctrl-C, --resume continues. The administrator's commands read the record:

        fedpareto admin --home sim/admin rounds RUN

        fedpareto report RUN --home sim/admin

    A federation of real workers takes the same file and ignores [simulation].
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise Failure("simulated clients train with torch, not installed here: install fedpareto[torch]")
    from sqlalchemy.exc import SQLAlchemyError

    from fedpareto.cli import document
    from fedpareto.cli.render import console as make_console
    from simulation import SimulationError
    from storage.blobs import BlobCorrupt, BlobMissing

    console = make_console(stderr=as_json)
    simulation, directory = _open(spec, home, data, download, device, backend, ray_address, threads, resume)
    try:
        with simulation:
            _announce(console, simulation, directory)
            history = _run(console, simulation)
    except SimulationError as error:
        raise Failure(str(error)) from None
    except (OSError, SQLAlchemyError, BlobMissing, BlobCorrupt) as error:
        raise Failure(f"the record in {directory} cannot be used: {_first_line(error)}") from error
    except KeyboardInterrupt:
        raise Failure("interrupted; the same command with --resume goes on", code=INTERRUPTED) from None
    if as_json:
        typer.echo(document.dumps(_document(history, directory)))
    else:
        _summarise(console, history, directory)
    if history.state == "PAUSED":
        raise Failure("stopped; the same command with --resume goes on", code=INTERRUPTED)
    if history.state != "COMPLETED":
        raise Failure(f"the run ended {history.state}: {history.reason}")


def _open(
    spec: Path,
    home: Path | None,
    data: Path | None,
    download: bool,
    device: str,
    backend: str,
    ray_address: str | None,
    threads: int | None,
    resume: bool,
) -> "tuple[Simulation, Path]":
    """The simulation that was asked for, and its directory; what is wrong with that becomes a Failure."""
    from sqlalchemy.exc import SQLAlchemyError

    from federation.runs import RunSpec, SpecError
    from federation.tasks import DataError
    from simulation import SimulationError
    from simulation.simulate import Simulation
    from storage.database import DatabaseBusy

    try:
        text = spec.read_bytes()
    except OSError as error:
        raise Failure(f"cannot read {spec}: {error.strerror}", code=USAGE) from None
    try:
        directory = home or Path(f"{RunSpec.parse(text).name}-simulation")
        simulation = Simulation(
            text,
            directory,
            data=data,
            download=download,
            device=device,
            backend=backend,
            ray_address=ray_address,
            threads=threads,
            resume=resume,
        )
    except SpecError as error:
        raise Failure(f"{spec}: {error}", code=USAGE) from None
    except (SimulationError, DatabaseBusy, ValueError) as error:  # tasks, attacks, devices, homes: each says what to do
        raise Failure(str(error), code=USAGE) from None
    except DataError as error:
        raise Failure(str(error)) from None
    except (OSError, SQLAlchemyError) as error:
        raise Failure(f"{directory} cannot hold a simulation: {_first_line(error)}") from error
    return simulation, directory


def _first_line(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) else None
    return (said or str(error)).partition("\n")[0]


def _announce(console: "Console", simulation: "Simulation", directory: Path) -> None:
    backend = simulation.backend
    why = f" ({backend.why})" if backend.why else ""
    _say(console, f"{simulation.spec.name}: {simulation.spec.simulation.clients} clients, {backend.name}{why}")
    for caution in simulation.cautions:
        _say(console, f"caution: {caution}", style="yellow")
    if simulation.attackers:
        first, last = simulation.attackers[0], simulation.attackers[-1]
        who = first if first == last else f"{first} to {last}"
        _say(console, f"{who}: {simulation.spec.simulation.attack}", style="red")
    done = f", {simulation.done} of {simulation.spec.rounds} rounds done" if simulation.done else ""
    _say(console, f"run {simulation.run_id} in {directory}{done}")


def _say(console: "Console", text: str, style: str | None = None) -> None:
    """A line with names in it, whose brackets are no markup, and which can be copied."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _run(console: "Console", simulation: "Simulation") -> "History":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fedpareto.formatting import number, percent

    def stop(received: int, _: object) -> None:
        simulation.stop()
        signal.signal(received, before[signal.Signals(received)])  # a second Ctrl-C does not wait

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} rounds/s"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            shown = bar.add_task("rounds", total=simulation.spec.rounds, rate=0.0, table=False)

            def told(now: "Progressed") -> None:
                bar.update(shown, completed=now.done, rate=now.rate)
                metrics = defaultdict(lambda: math.nan, now.metrics)
                if "accuracy/mean" in metrics or "loss/train" in metrics:
                    if not bar.tasks[shown].fields["table"]:
                        bar.update(shown, table=True)
                        console.print(HEADER, style="bold")
                    console.print(
                        f"{now.done - 1:>6}  {percent(metrics['accuracy/mean']):>8}  "
                        f"{percent(metrics['accuracy/worst5']):>9}  {percent(metrics['improved']):>8}  "
                        f"{number(metrics['loss/train']):>9}"
                    )

            return simulation.run(told)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _document(history: "History", directory: Path) -> dict[str, Any]:
    return {
        "run_id": history.run_id,
        "state": history.state,
        "reason": history.reason,
        "home": str(directory),
        "seconds": history.seconds,
        "attackers": list(history.attackers),
        "rounds": list(history.round_records),
        "clients": list(history.client_records),
        "updates": list(history.update_records),
        "members": list(history.member_records),
        "warnings": list(history.warnings),
        "objectives": list(history.objective_records),
    }


def _summarise(console: "Console", history: "History", directory: Path) -> None:
    rounds = sum(record["state"] in ("COMPLETED", "SKIPPED") for record in history.round_records)
    skipped = sum(record["state"] == "SKIPPED" for record in history.round_records)
    missing = Counter(record["reason"] for record in history.update_records if not record["accepted"])
    messages = {record["reason"]: record["message"] for record in history.update_records if record["message"]}
    _say(console, f"{rounds} rounds in {history.seconds:.1f} s" + (f", {skipped} skipped" if skipped else ""))
    for warning in history.warnings:
        _say(console, f"warning: {warning}", style="yellow")
    for reason, count in missing.most_common():
        said = f": {messages[reason]}" if reason in messages else ""
        _say(console, f"{count} updates not accepted, {reason or 'without a reason'}{said}", style="yellow")
    _say(
        console, f"fedpareto admin --home {shlex.quote(str(directory / 'admin'))} rounds {history.run_id}", style="dim"
    )
