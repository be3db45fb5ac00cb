"""`fedpareto demo`: ten hospitals as processes on this machine, in five acts."""

import os
import shutil
import sys
import time
import webbrowser
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.failure import INTERRUPTED, USAGE, CommandFailure, failing, require
from fedpareto.cli.shared_options import ProgressJsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import has_display, print_document

with on_first_use():
    from rich.console import Console

    from federation.tasks.pairs import TwoDigitsScaled
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.admin import watch
    from fedpareto.cli.admin.client import connect
    from fedpareto.cli.document import dumps
    from fedpareto.cli.show.tables import console as make_console
    from fedpareto.demo import acts, hospitals, show, story
    from fedpareto.demo.acts import Play
    from fedpareto.demo.demo_page import page
    from fedpareto.demo.demo_results import DemoResult, Ended, Served, how_it_ended, outcome, served
    from fedpareto.demo.hospitals import Hospitals
    from fedpareto.demo.outsider import Verification, verification
    from fedpareto.demo.private_act import PrivateResult, private
    from fedpareto.demo.show import follow, step
    from fedpareto.demo.story import of_private, of_the_record
    from fedpareto.processes.federation_directory import (
        DirectoryError,
        fresh_directory,
        is_of,
        keep_coordinator,
        stop_kept,
        wait_kept,
    )
    from fedpareto.processes.forked import start_server
    from fedpareto.processes.process_federation import ProcessError, leaving_on_signals


DEFAULT_DIRECTORY = Path("fedpareto-demo")
PAGE = "demo.html"
RESULTS = "results.json"
_KEPT_SECONDS = 60.0  # for the start of the coordinator that is left running


def demo_command(
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory for all files; the files of an earlier demo in it are replaced.")
    ] = DEFAULT_DIRECTORY,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Rounds of the runs that are compared; private rounds are two.")
    ] = 15,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, help="Seed of the deal of the images, the first model and the training."),
    ] = 1,
    objectives: Annotated[
        bool, typer.Option("--objectives", help="Another demo: one model for two losses of unequal scale.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Only the fourth act: private rounds, and what the coordinator can learn.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print a table of the rounds of each run.")] = False,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Open neither the console nor the page in a browser.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop the coordinator that an earlier demo left running, and nothing else.")
    ] = False,
    as_json: ProgressJsonOption = False,
) -> None:
    """Run a federation of ten hospitals on this machine.

    A coordinator and ten workers start as processes of their own, with keys, mutual TLS and a database. They learn to
    read handwritten digits. Two hospitals have another scanner: it turns each image, so one model can hardly suit all.

    1. FedAvg, plain averaging. 2. FedMGDA+, which gives more weight to the hospitals that would gain least. 3. Both
    again, while hospital-1 multiplies its update by 100 and adds 1000 to its loss. 4. Private rounds, in which the
    coordinator sees no update, and hospital-1 enters a vector that is too long. 5. An outsider verifies act 2 from one
    file, and again with one byte changed.

    At a terminal the coordinator goes on afterwards, for two hours, so that you can look at the record; `fedpareto demo
    --stop` ends it. Where a browser can be shown, the console opens while the acts run. Ctrl-C during the demo stops
    everything.
    """
    console = make_console(stderr=as_json)
    if stop:
        if directory.exists() and not is_of(directory, "demo"):
            raise CommandFailure(f"{directory} is not the directory of a demo: name it with --dir", code=USAGE)
        with failing(ProcessError):
            stopped = stop_kept(directory)
        console.print(f"the coordinator in {directory} has {'stopped' if stopped else 'not been running'}")
        return
    require("the demo trains with", "torch", "sklearn")
    keep = sys.stdout.isatty() and not as_json and not os.environ.get("CI")
    browse = keep and not no_browser and has_display()
    try:
        with (
            failing(DirectoryError, code=USAGE),
            failing(ProcessError, OSError),
            leaving_on_signals(),
            fresh_directory(directory, "demo"),
        ):
            start_server()  # it imports PyTorch while this process imports the rest
            results = _perform(console, directory, _Choices(rounds, seed, objectives, private, verbose, keep, browse))
            document = _record(directory, results)
    except KeyboardInterrupt:
        console.print("\nstopped, and every process with it")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_document(document)
    else:
        _report(console, directory, results)
    # Plain averaging under attack may break; every other run must complete.
    if any(run.state != "COMPLETED" and run.name != "fedavg-attacked" for run in results.ended()):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Choices:
    """The options that the user chose; `keep` leaves the coordinator running, `browse` opens a browser."""

    rounds: int
    seed: int
    objectives: bool
    private: bool
    verbose: bool
    keep: bool
    browse: bool

    @property
    def whole(self) -> bool:
        """True if the whole story is played, and not a part of it."""
        return not (self.objectives or self.private)


@dataclass
class _Results:
    """The results of the acts that were played."""

    choices: _Choices
    runs: "dict[str, DemoResult]" = field(default_factory=dict)
    objectives: "list[Served]" = field(default_factory=list)
    private: "PrivateResult | None" = None
    verification: "Verification | None" = None
    seconds: dict[str, float] = field(default_factory=dict)

    def ended(self) -> "list[Ended]":
        """All runs, in their order."""
        return [*self.runs.values(), *self.objectives, *([self.private] if self.private else [])]


def _perform(console: "Console", directory: Path, choices: _Choices) -> _Results:
    results = _Results(choices)
    tasks = [*(["scanners"] if choices.whole or choices.private else []), *(["two-digits-scaled"] * choices.objectives)]
    with Hospitals(directory, seed=choices.seed, tasks=tasks) as stage:
        clock = _Clock(results.seconds)
        with step(
            console, "making a federation", "Act 0: a federation, with its certificate authority and its database"
        ):
            stage.found()
            stage.serve()
        with connect(stage.home / "admin") as stub:
            joined = "ten hospitals have joined, each with keys, a certificate and images of its own"
            with step(console, "ten hospitals join", joined):
                stage.enroll(stub)
                stage.pin_rosters(hospitals.POLICY)  # workers read it when they start
            with step(console, "their workers start", "their ten workers attend, over mutual TLS"):
                stage.cast(stub, "")
            if choices.browse:
                webbrowser.open(stage.open_console())
            clock.note("federation")
            play = _Player(console, stage, stub, results, clock)
            if choices.whole:
                play.honest()
                play.attacked()
            if choices.objectives:
                play.objectives()
            if choices.whole or choices.private:
                console.print(
                    "\nAct 4: private rounds; the coordinator sees masked vectors and their sum", style="bold"
                )
                open_run = "fedmgda" if choices.whole else play.run(acts.OPEN).run_id
                with step(
                    console,
                    f"{hospitals.ATTACKER} starts again",
                    f"{hospitals.ATTACKER} makes its vector five times too long",
                ):
                    stage.cast(stub, acts.CHEAT)
                run = play.run(acts.PRIVATE)
                results.private = private(stub, stage.home, open_run, run.run_id)
                if choices.whole:
                    console.print(f"  {of_private(results.private)}")
                clock.note("private rounds")
        if choices.whole:
            console.print("\nAct 5: an outsider verifies act 2 from one file", style="bold")
            with step(console, "verifying", "the record was verified, and once more with one byte changed"):
                results.verification = verification(stage, "fedmgda")
            clock.note("verification")
        stage.stop(*stage.processes)
    if choices.keep:
        keep_coordinator(directory)
        try:
            with step(console, "the coordinator starts again", "the coordinator goes on for two hours"):
                wait_kept(directory, _KEPT_SECONDS)
        except BaseException:
            stop_kept(directory)
            raise
    return results


class _Clock:
    """Records the seconds that each act took."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def note(self, act: str) -> None:
        now = time.monotonic()
        self._seconds[act], self._last = round(now - self._last, 1), now


@dataclass(frozen=True)
class _Player:
    """Plays the acts that have rounds."""

    console: "Console"
    stage: "Hospitals"
    stub: "AdminStub"
    results: _Results
    clock: _Clock

    def run(self, play: "Play", title: str = "") -> "Ended":
        """Runs a play to its end, and returns its result."""
        choices = self.results.choices
        run_id = self.stage.submit(play.name, play.specification(choices.rounds, choices.seed))
        if choices.verbose:
            self.console.print(f"\n{play.name}  ({self.stage.directory / 'specs' / play.name}.toml)", style="bold")
            run = watch.show(self.stub, run_id, self.console)
        else:
            run = follow(self.stub, run_id, title or play.title, self.console)
        return Ended(**how_it_ended(run))

    def honest(self) -> None:
        """Acts 1 and 2."""
        self.console.print("\nAct 1: averaging", style="bold")
        self._compared(acts.AVERAGE)
        self.console.print(f"  {of_the_record(self.results.runs['fedavg'])}", style="yellow")
        self.clock.note("fedavg")
        self.console.print("\nAct 2: multi-gradient descent", style="bold")
        self._compared(acts.FAIR)
        self.clock.note("fedmgda+")

    def attacked(self) -> None:
        """Act 3."""
        self.console.print(
            f"\nAct 3: {hospitals.ATTACKER} multiplies its update by 100 and adds 1000 to its loss", style="bold"
        )
        self.stage.cast(self.stub, acts.ATTACK)
        self._compared(acts.AVERAGE_ATTACKED, attacked=True)
        self._compared(acts.FAIR_ATTACKED, attacked=True)
        self.clock.note("attack")

    def objectives(self) -> None:
        """The other demo."""
        self.console.print("\nTwo digits at once; the right one's loss is a tenth as large", style="bold")
        for play in acts.OBJECTIVES:
            run = self.run(play)
            self.results.objectives.append(served(self.stub, run.run_id, TwoDigitsScaled.scales))
        self.clock.note("objectives")

    def _compared(self, play: "Play", *, attacked: bool = False) -> None:
        run = self.run(play, f"{play.title}, attacked" if attacked else play.title)
        self.results.runs[play.name] = outcome(self.stub, run.run_id, attacked=attacked)


def _record(directory: Path, results: _Results) -> str:
    """The results as a JSON document, which is also written into the directory, with the page."""
    final_story = story.story(results.runs, results.private, results.verification)
    warning = story.of_the_record(results.runs["fedavg"]) if results.runs else ""
    private = "" if results.private is None else story.of_private(results.private)
    html = (
        page(final_story, results.private, (warning, private), _commands(directory, results))
        if final_story.sentences
        else None
    )
    if html is not None:
        (directory / PAGE).write_text(html, encoding="utf-8")
    text = dumps(
        {
            "directory": str(directory),
            "admin_home": str(directory / "coordinator" / "admin"),
            "hospitals": list(hospitals.HOSPITALS),
            "other_scanner": list(hospitals.TWO),
            "attacker": hospitals.ATTACKER,
            "attack": acts.ATTACK,
            "rounds": results.choices.rounds,
            "seed": results.choices.seed,
            "runs": [asdict(run) for run in results.runs.values()],
            "objectives": [asdict(run) for run in results.objectives],
            "private": asdict(results.private) if results.private else None,
            "verification": asdict(results.verification) if results.verification else None,
            "sentences": list(final_story.sentences),
            "page": str(directory / PAGE) if html is not None else None,
            "seconds": results.seconds,
        }
    )
    (directory / RESULTS).write_text(text + "\n", encoding="utf-8")
    return text


def _report(console: "Console", directory: Path, results: _Results) -> None:
    show.story(console, story.story(results.runs, results.private, results.verification))
    if results.objectives:
        console.print(show.objectives(results.objectives))
    for run in results.ended():
        if run.state != "COMPLETED":
            console.print(f"{run.name}: {run.state} after {run.rounds_done} rounds: {run.reason}")
    console.print("\nType next:")
    for command in _commands(directory, results):
        console.print(f"    {command}", soft_wrap=True)
    if results.choices.keep:
        notice = "The coordinator goes on for two hours; this stops it:"
        console.print(f"{notice}\n    {_command()} demo --stop{_where(directory)}", soft_wrap=True)
    else:
        console.print("Every process has been stopped; the commands read the record that they have left.")
    path = directory / PAGE
    if path.is_file():
        console.print(f"The page with the pictures: {path}", soft_wrap=True)
        if results.choices.browse:
            webbrowser.open(path.absolute().as_uri())


def _commands(directory: Path, results: _Results) -> list[str]:
    """Three commands to type next; the first one opens the console."""
    command = _command()
    home = "" if directory == DEFAULT_DIRECTORY else f" --home {directory / 'coordinator' / 'admin'}"
    names = [run.name for run in results.ended()]
    compared = [run.name for run in (*results.runs.values(), *results.objectives)] or names
    console = f"{command} console {' '.join(compared)}{home}"
    return [console, f"{command} admin{home} runs", f"{command} admin{home} run {names[0]}"]


def _where(directory: Path) -> str:
    return "" if directory == DEFAULT_DIRECTORY else f" --dir {directory}"


def _command() -> str:
    """This command as it was called."""
    return "fedpareto" if shutil.which("fedpareto") or not sys.argv[0].endswith("fedpareto") else sys.argv[0]
