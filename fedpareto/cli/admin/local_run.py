"""`fedpareto local`: a run of members with data of their own, as processes on this machine."""

import os
import shlex
import signal
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from federation.text import counted
from fedpareto.cli.failure import INTERRUPTED, USAGE, CommandFailure, failing, require
from fedpareto.cli.research.member_option import MemberOption, members_of
from fedpareto.cli.shared_options import CodeOption, ProgressJsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import has_display, print_document

with on_first_use():
    from rich.console import Console

    from federation.spec.run_spec import RunSpec, SpecError
    from federation.text_files import EncodingError, read_text
    from federation.v1.admin_pb2 import Run
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.admin.client import connect
    from fedpareto.cli.document import dumps
    from fedpareto.cli.show import participation_table
    from fedpareto.cli.show.tables import console as make_console
    from fedpareto.demo.demo_results import Ended, how_it_ended
    from fedpareto.demo.show import accuracies, follow, step
    from fedpareto.formatting import number
    from fedpareto.processes.federation_directory import DirectoryError, fresh_directory, is_of, stop_running
    from fedpareto.processes.forked import start_server
    from fedpareto.processes.local_federation import LocalFederation
    from fedpareto.processes.process_federation import ProcessError, leaving_on_signals
    from fedpareto.web.sections.shown_run import ShownRun


DEFAULT_DIRECTORY = Path("fedpareto-local")
OPEN = "[statistics]\nopen = true\n"  # the policy of members that let a run describe their data


def local_command(
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="SPEC.toml", help="A run specification (docs/reference/run-spec.md).", show_default=False
        ),
    ] = None,
    member: MemberOption = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            metavar="SPEC.toml",
            help='First do this run of kind = "statistics", which the members\' owners allow here, and fill the layer '
            "Standardise of the task's model from its result.",
        ),
    ] = None,
    code: CodeOption = None,
    directory: Annotated[
        Path,
        typer.Option("--dir", help="Directory for all files; the files of an earlier `local` in it are replaced."),
    ] = DEFAULT_DIRECTORY,
    device: Annotated[str, typer.Option(help="Where members train: auto, cpu, cuda or cuda:N.")] = "auto",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the console in a browser.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the federation that `local` runs in --dir, and do nothing else.")
    ] = False,
    as_json: ProgressJsonOption = False,
) -> None:
    """Start a federation of your members on this machine, and do a run.

    A coordinator and a worker for each member start as processes of their own, with keys, mutual TLS and a database,
    as in a federation of several machines. Each member has the data in its own directory.

        fedpareto local run.toml --member east=data/east --member west=data/west --code .

    At a terminal the console is there from the first round on, and goes on after the last one. Ctrl-C stops
    everything. The record stays in --dir. `fedpareto simulate` with the same --member gives the same models, up to
    rounding, without processes.
    """
    screen = make_console(stderr=as_json)
    if stop:
        _stop(screen, directory)
        return
    if spec is None:
        raise CommandFailure("name the run specification: fedpareto local SPEC.toml --member NAME=DIR", code=USAGE)
    members = members_of(member)
    if not members:
        raise CommandFailure("name the members: --member NAME=DIR for each, with the directory of its data", code=USAGE)
    require("members train with", "torch")
    text, run = _specification(spec)
    described = None if statistics is None else _specification(statistics)
    if described is not None and not described[1].describes:
        raise CommandFailure(f'{statistics}: a run of kind = "statistics" is needed', code=USAGE)
    shown = sys.stdout.isatty() and not as_json and not os.environ.get("CI")
    result: _Result | None = None
    try:
        with (
            failing(DirectoryError, code=USAGE),
            failing(ProcessError, OSError),
            leaving_on_signals(),
            fresh_directory(directory, "local"),
        ):
            start_server()  # it imports PyTorch while this process imports the rest
            with LocalFederation(directory, sorted(members)) as stage:
                _found(screen, stage)
                with connect(stage.home / "admin") as stub:
                    options, filled = ["--device", device, "--set", f"spec={spec}"], []
                    policy = "" if described is None else OPEN
                    _attend(screen, stage, stub, run.task, members, options, policy)
                    if described is not None:
                        filled = ["--statistics", _describe(screen, stage, stub, described[1].name, described[0])]
                    result = _run(screen, stage, stub, run.name, text, *filled, console=shown, browse=not no_browser)
                if not as_json:
                    _report(screen, directory, result)
                if shown:
                    screen.print("\nEverything goes on, so that you can look at the run. Ctrl-C stops it.")
                    while True:
                        signal.pause()
    except KeyboardInterrupt:
        screen.print("\nstopped, and every process with it")
        if result is None:
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_document(dumps(asdict(result) | {"directory": str(directory), "admin_home": str(_admin(directory))}))
    elif not shown:
        screen.print("Every process has been stopped; the commands read the record that they have left.")
    if result is not None and result.run.state != "COMPLETED":
        raise typer.Exit(1)


def _specification(path: Path) -> tuple[str, "RunSpec"]:
    """A run specification from a file, as text and parsed."""
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read {path}"):
        text = read_text(path)
    with failing(SpecError, code=USAGE, what=str(path)):
        return text, RunSpec.parse(text.encode())


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The result of the run.

    Attributes:
        run: how it ended.
        split, measure: of the values: such as "test" and "accuracy"; empty without an evaluation.
        values: of each member after the last evaluated round.
        failures: of members whose replies did not all come or count, in words.
    """

    run: "Ended"
    split: str
    measure: str
    values: Mapping[str, float]
    failures: Sequence[str]


def _stop(screen: "Console", directory: Path) -> None:
    if directory.exists() and not is_of(directory, "local"):
        raise CommandFailure(f"{directory} is not the directory of fedpareto local: name it with --dir", code=USAGE)
    with failing(ProcessError):
        stopped = stop_running(directory)
    screen.print(f"the federation in {directory} has {'stopped' if stopped else 'not been running'}", soft_wrap=True)


def _found(screen: "Console", stage: "LocalFederation") -> None:
    with step(screen, "making a federation", "a federation, with its certificate authority and its database"):
        stage.finish(stage.founding("local"))
        stage.serve()


def _attend(
    screen: "Console",
    stage: "LocalFederation",
    stub: "AdminStub",
    task: str,
    members: Mapping[str, Path],
    options: Sequence[str],
    policy: str,
) -> None:
    joined = f"{counted(len(members), 'member')} joined, each with keys and a certificate of its own"
    with step(screen, "the members join", joined):
        stage.enroll(stub)
        stage.pin_rosters(policy)  # workers read both when they start
    with step(screen, "their workers start", f"their workers attend, over mutual TLS, for the task {task}"):
        common = ["--task", task, *options]
        stage.attend(stub, {name: [*common, "--data", str(own)] for name, own in members.items()})


def _describe(screen: "Console", stage: "LocalFederation", stub: "AdminStub", name: str, text: str) -> str:
    """The id of a run that has described the members' data."""
    run = follow(stub, stage.submit(name, text), name, screen)
    ended = how_it_ended(run)
    if ended["state"] != "COMPLETED":
        raise CommandFailure(f"{name}: {ended['state']}: {ended['reason'] or 'no data were described'}")
    return str(run.run_id)


def _run(
    screen: "Console",
    stage: "LocalFederation",
    stub: "AdminStub",
    name: str,
    text: str,
    *options: str,
    console: bool,
    browse: bool,
) -> _Result:
    run_id = stage.submit(name, text, *options)
    if console:
        _open_console(screen, stage, run_id, browse=browse)
    run = follow(stub, run_id, name, screen)
    final = ShownRun.read(stub, run_id).final
    return _Result(
        run=Ended(**how_it_ended(run)),
        split="" if final is None else final.split,
        measure="" if final is None else final.measure,
        values={} if final is None else final.values,
        failures=_failures(run),
    )


def _failures(run: "Run") -> list[str]:
    return [participation_table.tally(member) for member in run.members if participation_table.failures(member)]


def _open_console(screen: "Console", stage: "LocalFederation", run_id: str, *, browse: bool) -> None:
    """Starts the console as a process of the federation, and prints its address."""
    url = stage.open_console(run_id)
    screen.print(f"The console is at this address, which works once, within a minute:\n    {url}", soft_wrap=True)
    if browse and has_display():
        webbrowser.open(url)


def _report(screen: "Console", directory: Path, result: _Result) -> None:
    screen.print()
    if result.measure == "accuracy":
        screen.print(accuracies(f"{result.split} accuracy", result.values))
    for name, value in sorted(result.values.items()) if result.measure != "accuracy" else ():
        screen.print(f"{name}  {result.split} {result.measure} {number(value)}")
    for failure in result.failures:
        screen.print(failure, style="yellow")
    run = result.run
    if run.state != "COMPLETED":
        screen.print(f"{run.name}: {run.state} after {counted(run.rounds_done, 'round')}: {run.reason}", style="red")
    home = shlex.quote(str(_admin(directory)))
    screen.print("\nType next, in another terminal:")
    for command in (f"admin --home {home} run {run.run_id}", f"console {run.run_id} --home {home}"):
        screen.print(f"    fedpareto {command}", soft_wrap=True)


def _admin(directory: Path) -> Path:
    return directory / "coordinator" / "admin"
