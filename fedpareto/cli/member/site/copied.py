"""`fedpareto worker copied`: two homes have one identity, and the owner decides which one goes on."""

from typing import Annotated

import typer

from fedpareto.cli.failure import USAGE, CommandFailure, answer
from fedpareto.cli.member.member_command import member_command
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.formatting import moment
    from worker.connection.starts import decide, known_starts, set_aside
    from worker.home import WorkerHome


@member_command(keys=False)
def copied_command(
    home: "WorkerHome",
    as_json: bool,
    this_one: Annotated[
        bool,
        typer.Option(
            "--this-one", help="The directory of --home goes on, in the place of the one that has started last."
        ),
    ] = False,
    other_one: Annotated[
        bool, typer.Option("--other-one", help="The other directory goes on: no worker starts with this one any more.")
    ] = False,
) -> None:
    """Show that a copy of this directory has started; decide which one goes on.

    The coordinator serves the copy that has started last and refuses the other one (`home-copied`), since each has
    ledgers of its own and could spend a budget once more. Stop both workers first, and let that one go on whose ledgers
    have more (`worker privacy`). If the ledgers of a copy that goes on lack what the other one has spent, lower
    `epsilon` and `secure.sessions` in policy.toml by it. A worker that runs obeys within seconds.
    """
    if this_one and other_one:
        raise CommandFailure("--this-one and --other-one: give the one that you mean", code=USAGE)
    known, aside = known_starts(home.starts), set_aside(home)
    if this_one and not known.refused and not aside:
        raise CommandFailure(
            f"{home.directory} was not refused as a copy, so there is no decision to make. Either its worker "
            "is served, or no worker has connected yet"
        )
    if this_one or other_one:
        decide(home, known, this_one=this_one)
        aside = other_one
    document = {
        "refused_since": None if known.since is None else known.since.isoformat(),
        "set_aside": aside,
        "goes_on": this_one,
    }
    if aside:
        text = "This directory is set aside: no worker starts with it. If it goes on after all: --this-one"
    elif this_one:
        text = (
            "This directory goes on. Remove the other one. If that one has worked since the copy was made, the ledgers "
            "here lack what it has spent: lower epsilon and secure.sessions in policy.toml by it."
        )
    elif known.since is not None:
        text = (
            f"Another directory with this identity has started: the coordinator refuses this one since "
            f"{moment(known.since)}. Stop both workers, then give --this-one or --other-one."
        )
    else:
        text = "No coordinator has refused this directory as a copy."
    answer(as_json, document, text)
