"""`fedpareto demo`: a federation of processes on this machine, with one attacker, in three parts."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpareto.cli.failure import INTERRUPTED, USAGE, Failure, require
from fedpareto.cli.options import ProgressJsonOption

if TYPE_CHECKING:
    from rich.console import Console

    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.outcomes import Ended, Outcome, Served
    from fedpareto.cli.private_act import Private
    from fedpareto.cli.rehearsal import Rehearsal

ATTACK = "scale=100,bias=1000"
DEFAULT_DIRECTORY = Path("fedpareto-demo")

_SPEC = """\
name = "{name}"
task = "{act.task}"
rounds = {rounds}
seed = {seed}

[algorithm]
{algorithm}

[train]
{act.train}

[selection]
minimum = {members}  # a round waits until this number of members attends
"""


@dataclass(frozen=True)
class _Act:
    task: str
    train: str  # the section of a specification
    algorithms: dict[str, str]  # likewise, by the beginning of the run's name


_DIGITS = _Act(
    "digits",
    "epochs = 1\nbatch_size = 10\nlearning_rate = 0.2",
    {
        # FedMGDA+ makes each update as long as every other one, so that its step needs a rate of its own.
        "fedmgda": 'name = "fedmgda+"\nepsilon = 0.1\n\n[server]\nlearning_rate = 1.5',
        "fedavg": 'name = "fedavg"',
    },
)
_TWO_DIGITS = _Act(
    "two-digits",
    "steps = 15\nbatch_size = 20\nlearning_rate = 0.4",
    {
        "scalarised": 'name = "scalarised"',
        "fsmgda": 'name = "fsmgda"',
        "fedcmoo": 'name = "fedcmoo"\nweights = "exact"\nbudget = 0.1',
    },
)
_PRIVATE = _Act(
    "digits",
    "epochs = 1\nbatch_size = 10\nlearning_rate = 0.2",
    {
        "open": 'name = "fedmgda+"\nepsilon = 0.05\n\n[server]\nlearning_rate = 1.5',
        "private": 'name = "fedmgda+"\n\n[privacy]\nsecure = "verified"\n\n[server]\nlearning_rate = 1.5',
    },
)


def demo_command(
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory for all files; the files of an earlier demo in it are replaced.")
    ] = DEFAULT_DIRECTORY,
    rounds: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Rounds of each run of the first part; the others have a half, a sixth."),
    ] = 30,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Number of members, including the attacker.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the partition, the initial model and the training.")] = 1,
    objectives: Annotated[
        bool, typer.Option("--objectives", help="Only the second part: one model for two objectives, no attacker.")
    ] = False,
    private: Annotated[
        bool,
        typer.Option("--private", help="Only the third part: private rounds, and what the coordinator can learn."),
    ] = False,
    as_json: ProgressJsonOption = False,
) -> None:
    """Run a federation of real processes, with one attacker.

    It has a coordinator and workers with their own keys, mutual TLS and a database.

    Every member holds two shards of handwritten digits sorted by class. One multiplies its update by 100 and adds
    1000 to the loss that it reports. First FedMGDA+ and then FedAvg trains a model; then both again, with that member
    honest. In the second, shorter part the members train one model for two digits, with one objective for each digit;
    one member has labels for the left digit only.

    In the third part the members train in open rounds, and then in private ones, in which one member makes its vector
    five times as long as allowed. Private rounds of multi-gradient descent need ten members here; with fewer --workers
    the third part is left out.
    """
    require("the demo trains with", "torch", "sklearn")
    from fedpareto.cli.private_act import MEMBERS
    from fedpareto.cli.processes import Processes
    from fedpareto.cli.rehearsal import Rehearsal, fresh_directory
    from fedpareto.cli.render import console as make_console

    if private and workers < MEMBERS:
        raise Failure(f"--private needs at least {MEMBERS} members: --workers {MEMBERS}", code=USAGE)
    console = make_console(stderr=as_json)
    parts = [name for name, wanted in (("objectives", objectives), ("private", private)) if wanted]
    if not parts:
        parts = ["attack", "objectives"]
        if workers >= MEMBERS:
            parts.append("private")
        else:
            console.print(f"The third part, private rounds, is left out: it needs {MEMBERS} members.")
    try:
        with fresh_directory(directory), Processes() as processes:
            rehearsal = Rehearsal(directory, processes, members=workers, seed=seed)
            results = _perform(console, rehearsal, rounds, seed, parts)
            document = _record(rehearsal, results, rounds, seed)
    except KeyboardInterrupt:
        console.print("\nstopped, and every process with it")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(document)
    else:
        _report(console, rehearsal, results)
    # Plain averaging under attack may break; every other run must complete.
    may_fail = {item.run_id for item in results.attack if item.attacked and item.algorithm == "fedavg"}
    if any(item.state != "COMPLETED" and item.run_id not in may_fail for item in results.ended()):
        raise typer.Exit(1)


@dataclass
class _Results:
    """What the parts of the demo gave; nothing of a part that was not played."""

    attack: "list[Outcome]" = field(default_factory=list)
    objectives: "list[Served]" = field(default_factory=list)
    private: "list[Private]" = field(default_factory=list)

    def ended(self) -> "list[Ended]":
        """All runs, in their order."""
        return [*self.attack, *self.objectives, *self.private]


def _perform(console: "Console", rehearsal: "Rehearsal", rounds: int, seed: int, parts: "Sequence[str]") -> "_Results":
    from fedpareto.cli import private_act
    from fedpareto.cli.client import connect
    from fedpareto.cli.outcomes import outcome, served

    results, attacker = _Results(), rehearsal.attacker
    _found(console, rehearsal)
    with connect(rehearsal.home / "admin") as stub:
        _enroll(console, rehearsal, stub)
        if "private" in parts:  # workers read the roster when they start
            with _step(console, "the owners pin a roster", "every owner has pinned the keys of all members"):
                rehearsal.pin_rosters()
        if "attack" in parts:
            for attack in (ATTACK, ""):
                _cast(console, rehearsal, stub, attack)
                suffix = "attacked" if attack else "honest"
                for run in _play(console, rehearsal, stub, _DIGITS, suffix, rounds, seed):
                    results.attack.append(outcome(stub, run, attacked=bool(attack), watched=attacker))
        if "objectives" in parts:
            if "attack" not in parts:  # after it, all are honest
                _cast(console, rehearsal, stub, "")
            console.print(
                f"✓ two digits at once, an objective for each; {rehearsal.left_only} serves the left one only"
            )
            for run in _play(console, rehearsal, stub, _TWO_DIGITS, "objectives", max(1, rounds // 2), seed):
                results.objectives.append(served(stub, run))
        if "private" in parts:
            _cast(console, rehearsal, stub, private_act.ATTACK)
            for at, run in enumerate(_play(console, rehearsal, stub, _PRIVATE, "members", max(1, rounds // 6), seed)):
                results.private.append(private_act.outcome(stub, rehearsal, run, private=at == 1))
    return results


def _cast(console: "Console", rehearsal: "Rehearsal", stub: "AdminStub", attack: str) -> None:
    """Starts the workers, or only the attacker's again where its attack is another one; waits until all attend."""
    count, attacker = len(rehearsal.names), rehearsal.attacker
    role = f"{attacker} is malicious: {attack}" if attack else f"{attacker} is honest"
    with _step(console, f"the workers start; {role}", f"{count} workers attend; {role}"):
        rehearsal.cast(attack)
        rehearsal.assemble(stub)


def _found(console: "Console", rehearsal: "Rehearsal") -> None:
    """Makes the federation and starts its coordinator."""
    made = f"a federation in {rehearsal.home}: certificate authority, keys, database"
    with _step(console, "making a federation", made):
        rehearsal.found()
    with _step(console, "starting the coordinator", "the coordinator serves"):
        rehearsal.serve()


def _enroll(console: "Console", rehearsal: "Rehearsal", stub: "AdminStub") -> None:
    count = len(rehearsal.names)
    joined = f"{count} members have their certificates, and each its own part of the data"
    with _step(console, f"{count} members join, each with a join string and keys of its own", joined):
        rehearsal.enroll(stub)


@contextmanager
def _step(console: "Console", doing: str, done: str) -> "Iterator[None]":
    with console.status(doing):
        yield
    console.print("✓", done)


def _play(
    console: "Console", rehearsal: "Rehearsal", stub: "AdminStub", act: _Act, suffix: str, rounds: int, seed: int
) -> list[str]:
    """Runs each algorithm from the same model with the same seed, one after the other; returns the ids of the runs."""
    from fedpareto.cli import upload, watch

    initial, members, ids = upload.made_model(act.task, seed), len(rehearsal.names), []
    for short, algorithm in act.algorithms.items():
        name = f"{short}-{suffix}"
        text = _SPEC.format(name=name, act=act, rounds=rounds, seed=seed, algorithm=algorithm, members=members)
        console.print(f"\n{name}  ({rehearsal.keep_spec(name, text)})", style="bold")
        ids.append(upload.submit(stub, text.encode(), initial).run.run_id)
        watch.show(stub, ids[-1], console)
    return ids


def _record(rehearsal: "Rehearsal", results: _Results, rounds: int, seed: int) -> str:
    """The results as a JSON document, which is also written into the directory."""
    from fedpareto.cli.document import dumps

    text = dumps(
        {
            "directory": str(rehearsal.directory),
            "admin_home": str(rehearsal.home / "admin"),
            "members": list(rehearsal.names),
            "attacker": rehearsal.attacker,
            "attack": ATTACK,
            "rounds": rounds,
            "seed": seed,
            "runs": [asdict(item) for item in results.attack],
            "left_only": rehearsal.left_only,
            "objectives": [asdict(item) for item in results.objectives],
            "private": [asdict(item) for item in results.private],
        }
    )
    (rehearsal.directory / "results.json").write_text(text + "\n")
    return text


def _report(console: "Console", rehearsal: "Rehearsal", results: _Results) -> None:
    from fedpareto.cli import private_act
    from fedpareto.cli.outcomes import table, table_of_objectives
    from fedpareto.formatting import percent

    if results.attack:
        console.print()
        console.print(table(results.attack, rehearsal.attacker))
        means = {(item.algorithm, item.attacked): percent(item.accuracy["mean"]) for item in results.attack}
        for name in dict.fromkeys(item.algorithm for item in results.attack):
            console.print(
                f"{name}: {means[name, True]} on average beside the attacker, {means[name, False]} without one"
            )
    if results.objectives:
        console.print()
        console.print(table_of_objectives(results.objectives))
    if results.private:
        console.print()
        console.print(private_act.table(results.private, rehearsal.attacker))
    ended = results.ended()
    for item in ended:
        if item.state != "COMPLETED":
            console.print(f"{item.name}: {item.state} after {item.rounds_done} rounds: {item.reason}")
    command = _command()
    home = "" if rehearsal.directory == DEFAULT_DIRECTORY else f" --home {rehearsal.home / 'admin'}"
    admin = f"{command} admin{home}"
    name, second, last = ended[0].name, ended[1].name, ended[-1].name
    lines = [
        f"{admin} rounds {name}",
        f"{admin} round {second} 0",
        f"{admin} run {last}",
        f"{admin} round {last} -1",
        f"{admin} replies {name} --round 0",
        f"{command} report {name}{home}",
        f"{command} coordinator serve --home {rehearsal.home}",
    ]
    console.print("\nEvery process has been stopped; the record is there to be looked at. Type next:", soft_wrap=True)
    for line in lines:
        console.print(f"    {line}", soft_wrap=True)


def _command() -> str:
    """This command as it was called."""
    return "fedpareto" if shutil.which("fedpareto") or not sys.argv[0].endswith("fedpareto") else sys.argv[0]
