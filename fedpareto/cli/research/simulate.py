"""`fedpareto simulate`: a run specification on simulated clients."""

import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.owners_code import described, owners_frame
from federation.text import counted
from fedpareto.cli.failure import INTERRUPTED, USAGE, CommandFailure, failing, require
from fedpareto.cli.research.member_option import MemberOption, members_of
from fedpareto.cli.shared_options import (
    CodeOption,
    DataOption,
    DownloadOption,
    ProgressJsonOption,
    ToOption,
)
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from rich.console import Console
    from sqlalchemy import exc

    from federation import plugins
    from federation.spec.run_spec import RunSpec, SpecError
    from federation.tasks import DataError
    from federation.text_files import EncodingError, read_text
    from fedpareto import simulation as simulations
    from fedpareto.cli import document
    from fedpareto.cli.research.simulation_targets import SimulationTargets
    from fedpareto.cli.show import round_lines, sink_lines
    from fedpareto.cli.show.tables import console as make_console
    from fedpareto.progress_line import bar
    from fedpareto.simulation.given_statistics import described_by
    from fedpareto.simulation.history import History
    from fedpareto.simulation.simulate import Simulation
    from fedpareto.simulation.simulation_progress import SimulationProgress
    from storage import blobs
    from storage.database import DatabaseBusy


_METRICS = ("accuracy/mean", "accuracy/worst5", "improved", "loss/train")


def simulate_command(
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC.toml", help="A run specification (docs/reference/run-spec.md).")
    ],
    model: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The initial model, a safetensors file, as `admin submit` takes it. Default: the task makes it. Of a "
            "run that evaluates: a model to measure; give it once for each.",
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fill the layer Standardise of the task's model from this result, as `fedpareto admin statistics RUN "
            '--json` writes it. If FILE is a specification (SPEC.toml) of kind = "statistics", its run is simulated '
            "first, on the same clients.",
        ),
    ] = None,
    data: DataOption = None,
    member: MemberOption = None,
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
    trainer: Annotated[
        str,
        typer.Option(metavar="NAME", help="The trainer, in place of the task's own: torch, or module:Class."),
    ] = "",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A running Ray cluster, for --backend ray. Default: start one here."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; small models are faster with 1. Default: all cores.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted simulation in --home.")] = False,
    download: DownloadOption = False,
    to: ToOption = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Run a specification on simulated clients.

    It uses the conductor, the algorithms and the record of a real federation, without a network.

    The section [simulation] of the specification says how many clients there are, which samples they hold, and
    which of them attack. Without it, ten clients share the data evenly. The results equal those of real workers with
    the same names and data, up to rounding in float32.

    With --member NAME=DIR, the clients are these members, each with the data in its own directory: the run is that of
    `fedpareto local` with the same members.

        fedpareto simulate run.toml --data ~/data --home sim

    After Ctrl-C, --resume continues. The administrator's commands read the record:

        fedpareto admin --home sim/admin rounds RUN

        fedpareto report RUN --home sim/admin

    A federation of real workers takes the same file and ignores [simulation].
    """
    require("simulated clients train with", "torch")
    members, targets = members_of(member), sink_lines.targets(to)
    if data is not None and members:
        raise CommandFailure("--data or --member: the data of all clients, or of each; not both", code=USAGE)
    console = make_console(stderr=as_json)
    say = partial(console.print, soft_wrap=True)  # lines that can be copied
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read {spec}"):
        text = read_text(spec).encode()
    with (
        _own_code(),
        failing(simulations.SimulationError, DatabaseBusy, ValueError, code=USAGE),  # tasks, attacks, devices, homes
        failing(SpecError, code=USAGE, what=str(spec)),
        failing(DataError),
    ):
        directory = home or Path(f"{RunSpec.parse(text).name}-simulation")
        try:
            simulation = Simulation(
                text,
                directory,
                data=data,
                members=members,
                download=download,
                device=device,
                backend=backend,
                trainer=trainer,
                ray_address=ray_address,
                threads=threads,
                resume=resume,
                given=model or (),
                statistics=described_by(statistics, data=data, members=members, download=download, trainer=trainer),
            )
        except (OSError, exc.SQLAlchemyError) as error:
            raise CommandFailure(f"{directory} cannot hold a simulation: {_first_line(error)}") from error
    try:
        with _own_code(), simulation:
            _announce(say, simulation, directory)
            for remark in simulation.remarks:
                say(remark)
            sending = SimulationTargets(simulation, targets, sink_lines.tell)
            history = _run(console, simulation, sending)
    except (OSError, exc.SQLAlchemyError, blobs.BlobMissing, blobs.BlobCorrupt) as error:
        raise CommandFailure(f"the record in {directory} cannot be used: {_first_line(error)}") from error
    except KeyboardInterrupt:
        raise CommandFailure("interrupted; the same command with --resume goes on", code=INTERRUPTED) from None
    if as_json:
        print_document(document.line(_document(history, directory)))
    else:
        _summarise(say, replace(history, warnings=history.warnings[len(simulation.remarks) :]), directory)
    delivered = sending.finish(history)
    if history.state == "PAUSED":
        raise CommandFailure("stopped; the same command with --resume goes on", code=INTERRUPTED)
    if history.state != "COMPLETED":
        raise CommandFailure(f"the run ended {history.state}: {history.failure}")
    sink_lines.check_complete(delivered, "the same command with --resume goes on where each target is")


@contextmanager
def _own_code() -> Iterator[None]:
    """Turns a failure of a simulation that has begun, or of own code, such as a rule's, into a CommandFailure."""
    try:
        yield
    except (simulations.SimulationError, plugins.PluginError) as error:
        raise CommandFailure(f"{error}\nOnce that is repaired, the same command with --resume goes on") from error
    except Exception as error:
        if isinstance(error, CommandFailure) or owners_frame(error) is None:
            raise
        raise CommandFailure(described(error)) from error


def _first_line(error: Exception) -> str:
    message = error.strerror if isinstance(error, OSError) else None
    return (message or str(error)).partition("\n")[0]


def _announce(say: Callable[..., None], simulation: "Simulation", directory: Path) -> None:
    backend = simulation.backend
    reason = f" ({backend.why})" if backend.why else ""
    say(f"{simulation.spec.name}: {counted(len(simulation.clients), 'client')}, {backend.name}{reason}")
    for caution in simulation.cautions:
        say(f"caution: {caution}", style="yellow")
    if simulation.attackers:
        first, last = simulation.attackers[0], simulation.attackers[-1]
        attackers = first if first == last else f"{first} to {last}"
        say(f"{attackers}: {simulation.spec.simulation.attack}", style="red")
    done = f", {simulation.done} of {counted(simulation.spec.rounds, 'round')} done" if simulation.done else ""
    say(f"run {simulation.run_id} in {directory}{done}")


def _run(console: "Console", simulation: "Simulation", sending: "SimulationTargets") -> "History":
    def stop(received: int, _: object) -> None:
        simulation.stop()
        signal.signal(received, before[signal.Signals(received)])  # a second Ctrl-C does not wait

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    watched = round_lines.watched(simulation.spec.stop.metric, simulation.spec.stop.of)
    header = [round_lines.heading(_METRICS, stop=watched)]  # printed once, before the first round with numbers
    try:
        with bar(console) as advance:

            def show(now: "SimulationProgress") -> None:
                advance(now)
                sending.send()
                if "accuracy/mean" in now.metrics or "loss/train" in now.metrics:
                    while header:
                        console.print(header.pop(), style="bold")
                    numbers = (now.metrics, now.undisclosed)
                    console.print(round_lines.line(now.done - 1, *numbers, _METRICS, stop=watched))

            return simulation.run(show)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _document(history: "History", directory: Path) -> dict[str, Any]:
    facts = ("run_id", "state", "reason", "seconds", "attackers", "warnings")
    return {
        **{name: getattr(history, name) for name in facts},
        "rounds": history.round_records,
        "clients": history.client_records,
        "replies": history.reply_records,
        "members": history.member_records,
        "objectives": history.objective_records,
        "home": str(directory),
    }


def _summarise(say: Callable[..., None], history: "History", directory: Path) -> None:
    rounds = sum(record["state"] in ("COMPLETED", "SKIPPED") for record in history.round_records)
    skipped = sum(record["state"] == "SKIPPED" for record in history.round_records)
    missing = Counter(record["reason"] for record in history.reply_records if not record["accepted"])
    messages = {record["reason"]: record["message"] for record in history.reply_records if record["message"]}
    say(f"{counted(rounds, 'round')} in {history.seconds:.1f} s" + (f", {skipped} skipped" if skipped else ""))
    for warning in history.warnings:
        say(f"warning: {warning}", style="yellow")
    for reason, count in missing.most_common():
        detail = f": {messages[reason]}" if reason in messages else ""
        say(
            f"{counted(count, 'reply', 'replies')} not accepted, {reason or 'without a reason'}{detail}", style="yellow"
        )
    home = shlex.quote(str(directory / "admin"))
    say(f"fedpareto admin --home {home} rounds {history.run_id}", style="dim")
