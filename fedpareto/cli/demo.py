"""`fedpareto demo`: a federation of this machine's processes learns, survives an attacker, and shows its work."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpareto.cli.failure import INTERRUPTED, Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.outcomes import Outcome
    from fedpareto.cli.rehearsal import Rehearsal
    from fedpareto.cli.second_act import Served
    from fedpareto.cli.upload import InitialModel

ATTACK = "scale=100,bias=1000"
DEFAULT_DIRECTORY = Path("fedpareto-demo")

_SPEC = """\
name = "{name}"
task = "digits"
rounds = {rounds}
seed = {seed}

[algorithm]
{algorithm}

[train]
epochs = 1
batch_size = 10
learning_rate = 0.2

[selection]
minimum = {members}  # a round waits until this number of members attends
"""
# FedMGDA+ makes each update as long as every other one, so that its step needs a rate of its own.
_ALGORITHMS = {
    "fedmgda": 'name = "fedmgda+"\nepsilon = 0.1\n\n[server]\nlearning_rate = 1.5',
    "fedavg": 'name = "fedavg"',
}


def demo_command(
    directory: Annotated[
        Path, typer.Option("--dir", help="Directory for all files; the files of an earlier demo in it are replaced.")
    ] = DEFAULT_DIRECTORY,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Rounds of each run.")] = 30,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Number of members, including the attacker.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the partition, the initial model and the training.")] = 1,
    objectives: Annotated[
        bool, typer.Option("--objectives", help="Only the second act: one model for two objectives, no attacker.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; progress on stderr.")] = False,
) -> None:
    """Run a federation of real processes, with one attacker.

    It has a coordinator and workers with their own keys, mutual TLS and a database.

    Every member holds two shards of handwritten digits sorted by class. One multiplies its update by 100 and adds
    1000 to the loss that it reports. First FedMGDA+ and then FedAvg trains a model; then both again, with that member
    honest. In a second, shorter act the members train one model for two digits, one objective for each digit, and one
    member has labels for the left digit only.
    """
    from importlib.util import find_spec

    missing = [name for name in ("torch", "sklearn") if find_spec(name) is None]
    if missing:
        raise Failure(f"the demo trains with {' and '.join(missing)}, not installed here: install fedpareto[torch]")
    from fedpareto.cli.processes import Processes
    from fedpareto.cli.rehearsal import Rehearsal, fresh_directory
    from fedpareto.cli.render import console as make_console

    console = make_console(stderr=as_json)
    try:
        with fresh_directory(directory), Processes() as processes:
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
    # That plain averaging breaks under attack may be; that anything else does may not.
    must = [item.state for item in outcomes if not (item.attacked and item.algorithm == "fedavg")]
    if any(state != "COMPLETED" for state in [*must, *(item.state for item in served)]):
        raise typer.Exit(1)


def _perform(
    console: "Console", rehearsal: "Rehearsal", rounds: int, seed: int, *, attack: bool
) -> "tuple[list[Outcome], list[Served]]":
    from fedpareto.cli import second_act
    from fedpareto.cli.client import connect
    from fedpareto.cli.upload import made_model

    count = len(rehearsal.names)
    with console.status("making a federation"):
        rehearsal.found()
    _tick(console, f"a federation in {rehearsal.home}: certificate authority, keys, database")
    with console.status("starting the coordinator"):
        rehearsal.serve()
    _tick(console, "the coordinator serves")
    with connect(rehearsal.home / "admin") as stub:
        with console.status(f"{count} members join, each with a one-time token and keys of its own"):
            rehearsal.enroll(stub)
        _tick(console, f"{count} members have their certificates, and each its own part of the data")
        with console.status(f"{count} workers start"):
            for name in rehearsal.names:
                rehearsal.work(name, ATTACK if attack and name == rehearsal.attacker else "")
            initial = made_model("digits", seed)
            rehearsal.assemble(stub)
        outcomes: list[Outcome] = []
        if attack:
            _tick(console, f"{count} workers attend; {rehearsal.attacker} is malicious: {ATTACK}")
            outcomes += _both(console, rehearsal, stub, initial, rounds, seed, attacked=True)
            with console.status(f"{rehearsal.attacker} is replaced by an honest worker"):
                rehearsal.rest(rehearsal.attacker)
                rehearsal.work(rehearsal.attacker)
                rehearsal.assemble(stub)
            _tick(console, f"{rehearsal.attacker} is honest now")
            outcomes += _both(console, rehearsal, stub, initial, rounds, seed, attacked=False)
        _tick(console, f"two digits at once, an objective for each; {rehearsal.left_only} serves the left one only")
        return outcomes, second_act.perform(console, rehearsal, stub, max(1, rounds // 2), seed)


def _both(
    console: "Console",
    rehearsal: "Rehearsal",
    stub: "AdminStub",
    initial: "InitialModel",
    rounds: int,
    seed: int,
    *,
    attacked: bool,
) -> "list[Outcome]":
    """Both algorithms from the same model with the same seed, one after the other."""
    from fedpareto.cli import watch
    from fedpareto.cli.outcomes import outcome
    from fedpareto.cli.upload import submit

    found = []
    for short, algorithm in _ALGORITHMS.items():
        name = f"{short}-{'attacked' if attacked else 'honest'}"
        text = _SPEC.format(name=name, rounds=rounds, seed=seed, algorithm=algorithm, members=len(rehearsal.names))
        spec = rehearsal.keep_spec(name, text)
        console.print(f"\n{name}  ({spec})", style="bold")
        run_id = submit(stub, text.encode(), initial).run.run_id
        watch.show(stub, run_id, console)
        found.append(outcome(stub, run_id, attacked=attacked, watched=rehearsal.attacker))
    return found


def _tick(console: "Console", message: str) -> None:
    console.print("✓", message)


def _record(
    rehearsal: "Rehearsal", outcomes: "Sequence[Outcome]", served: "Sequence[Served]", rounds: int, seed: int
) -> str:
    """The results as a JSON document, also kept in the directory."""
    from dataclasses import asdict

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
    from fedpareto import formatting
    from fedpareto.cli import second_act
    from fedpareto.cli.outcomes import table

    if outcomes:
        console.print()
        console.print(table(outcomes, rehearsal.attacker))
    means = {(item.algorithm, item.attacked): formatting.percent(item.accuracy["mean"]) for item in outcomes}
    for name in dict.fromkeys(item.algorithm for item in outcomes):
        console.print(f"{name}: {means[name, True]} on average beside the attacker, {means[name, False]} without one")
    console.print()
    console.print(second_act.table(served))
    ended: list[Outcome | Served] = [*outcomes, *served]
    for item in ended:
        if item.state != "COMPLETED":
            console.print(f"{item.name}: {item.state} after {item.rounds_done} rounds: {item.reason}")
    command = _command()
    home = "" if rehearsal.directory == DEFAULT_DIRECTORY else f" --home {rehearsal.home / 'admin'}"
    admin = f"{command} admin{home}"
    names = [item.name for item in ended]
    name, last = names[0], names[-1]
    console.print("\nEvery process has been stopped; the record is there to be looked at. Type next:", soft_wrap=True)
    for line in (
        f"rounds {name}",
        f"round {names[1]} 0",
        f"run {last}",
        f"round {last} -1",
        f"updates {name} --round 0",
    ):
        console.print(f"    {admin} {line}", soft_wrap=True)
    console.print(f"    {command} report {name}{home}", soft_wrap=True)
    console.print(f"    {command} coordinator serve --home {rehearsal.home}", soft_wrap=True)


def _command() -> str:
    """How this command was called, so that what is printed can be typed."""
    import shutil
    import sys

    return "fedpareto" if shutil.which("fedpareto") or not sys.argv[0].endswith("fedpareto") else sys.argv[0]
