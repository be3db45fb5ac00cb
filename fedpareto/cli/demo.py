"""`fedpareto demo`: a federation of processes on this machine, with one attacker."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpareto.cli.failure import INTERRUPTED, require
from fedpareto.cli.options import ProgressJsonOption

if TYPE_CHECKING:
    from rich.console import Console

    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.outcomes import Ended, Outcome, Served
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
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Rounds of each run.")] = 30,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Number of members, including the attacker.")] = 8,
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

    The third part runs only with --private, and alone: ten members train in open rounds, and then in private ones, in
    which one member makes its vector five times as long as allowed.
    """
    require("the demo trains with", "torch", "sklearn")
    from fedpareto.cli.processes import Processes
    from fedpareto.cli.rehearsal import Rehearsal, fresh_directory
    from fedpareto.cli.render import console as make_console

    console = make_console(stderr=as_json)
    try:
        with fresh_directory(directory), Processes() as processes:
            if private:
                from fedpareto.cli.private_act import MEMBERS

                rehearsal = Rehearsal(directory, processes, members=max(workers, MEMBERS), seed=seed)
                completed = _perform_private(console, rehearsal, rounds, seed, as_json=as_json)
                raise typer.Exit(0 if completed else 1)
            rehearsal = Rehearsal(directory, processes, members=workers, seed=seed)
            outcomes, served = _perform(console, rehearsal, rounds, seed, attack=not objectives)
            document = _record(rehearsal, outcomes, served, rounds, seed)
    except KeyboardInterrupt:
        console.print("\nstopped, and every process with it")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(document)
    else:
        _report(console, rehearsal, outcomes, served)
    # Plain averaging under attack may break; every other run must complete.
    must = [item.state for item in outcomes if not (item.attacked and item.algorithm == "fedavg")]
    if any(state != "COMPLETED" for state in [*must, *(item.state for item in served)]):
        raise typer.Exit(1)


def _perform(
    console: "Console", rehearsal: "Rehearsal", rounds: int, seed: int, *, attack: bool
) -> "tuple[list[Outcome], list[Served]]":
    from fedpareto.cli.client import connect
    from fedpareto.cli.outcomes import outcome, served

    count, attacker = len(rehearsal.names), rehearsal.attacker
    _found(console, rehearsal)
    with connect(rehearsal.home / "admin") as stub:
        _enroll(console, rehearsal, stub)
        malicious = f"; {attacker} is malicious: {ATTACK}" if attack else ""
        with _step(console, f"{count} workers start", f"{count} workers attend{malicious}"):
            for name in rehearsal.names:
                rehearsal.work(name, ATTACK if attack and name == attacker else "")
            rehearsal.assemble(stub)
        outcomes: list[Outcome] = []
        for attacked in (True, False) if attack else ():
            if not attacked:
                with _step(console, f"{attacker} is replaced by an honest worker", f"{attacker} is honest now"):
                    rehearsal.rest(attacker)
                    rehearsal.work(attacker)
                    rehearsal.assemble(stub)
            for run in _play(console, rehearsal, stub, _DIGITS, "attacked" if attacked else "honest", rounds, seed):
                outcomes.append(outcome(stub, run, attacked=attacked, watched=attacker))
        console.print(f"✓ two digits at once, an objective for each; {rehearsal.left_only} serves the left one only")
        second = _play(console, rehearsal, stub, _TWO_DIGITS, "objectives", max(1, rounds // 2), seed)
        return outcomes, [served(stub, run) for run in second]


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


def _perform_private(console: "Console", rehearsal: "Rehearsal", rounds: int, seed: int, *, as_json: bool) -> bool:
    """The third part; whether both runs completed."""
    from fedpareto.cli.client import connect
    from fedpareto.cli.document import dumps
    from fedpareto.cli.private_act import ATTACK as STRETCH
    from fedpareto.cli.private_act import outcome, table

    _found(console, rehearsal)
    with connect(rehearsal.home / "admin") as stub:
        _enroll(console, rehearsal, stub)
        with _step(console, "the owners pin a roster", "every owner has pinned the keys of all members"):
            rehearsal.pin_rosters()
        count, attacker = len(rehearsal.names), rehearsal.attacker
        with _step(console, f"{count} workers start", f"{count} workers attend; {attacker} is malicious: {STRETCH}"):
            for name in rehearsal.names:
                rehearsal.work(name, STRETCH if name == attacker else "")
            rehearsal.assemble(stub)
        runs = _play(console, rehearsal, stub, _PRIVATE, "members", rounds, seed)
        found = [outcome(stub, rehearsal, run, private=at == 1) for at, run in enumerate(runs)]
    text = dumps({"attacker": attacker, "rounds": rounds, "seed": seed, "runs": [asdict(one) for one in found]})
    (rehearsal.directory / "results.json").write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        console.print()
        console.print(table(found, attacker))
    return all(one.state == "COMPLETED" for one in found)


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


def _record(
    rehearsal: "Rehearsal", outcomes: "Sequence[Outcome]", served: "Sequence[Served]", rounds: int, seed: int
) -> str:
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
            "runs": [asdict(item) for item in outcomes],
            "left_only": rehearsal.left_only,
            "objectives": [asdict(item) for item in served],
        }
    )
    (rehearsal.directory / "results.json").write_text(text + "\n")
    return text


def _report(
    console: "Console", rehearsal: "Rehearsal", outcomes: "Sequence[Outcome]", served: "Sequence[Served]"
) -> None:
    from fedpareto.cli.outcomes import table, table_of_objectives
    from fedpareto.formatting import percent

    if outcomes:
        console.print()
        console.print(table(outcomes, rehearsal.attacker))
    means = {(item.algorithm, item.attacked): percent(item.accuracy["mean"]) for item in outcomes}
    for name in dict.fromkeys(item.algorithm for item in outcomes):
        console.print(f"{name}: {means[name, True]} on average beside the attacker, {means[name, False]} without one")
    console.print()
    console.print(table_of_objectives(served))
    ended: list[Ended] = [*outcomes, *served]
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
