"""`fedpareto admin approve`: pending members, one, several or all."""

from typing import Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.admin.app import Home, Yes
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.cli.admin.admission import approvals


def approve(
    context: typer.Context,
    members: Annotated[
        list[str] | None,
        typer.Argument(metavar="MEMBER", help="The members.", autocompletion=completion.pending, show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all-pending", help="All members that wait for approval.")] = False,
    yes: Yes = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Approve pending members, so that they get work.

    It lists the members with the fingerprints of their signing keys, and asks once. Compare each fingerprint with the
    member's owner, who has it from `worker join`. Exactly what was listed is approved: a member that joins afterwards
    is not, and neither is a member whose key has changed meanwhile.

    If approval takes two officers, it makes a request for each member. Another officer then gives `consent --all`.

    Each member has a result of its own. Exit code 1 if one of them was not approved.
    """
    if bool(members) == every:
        raise CommandFailure("name the members, or give --all-pending for all that wait", code=USAGE)
    approvals.approve(context, home, list(dict.fromkeys(members or ())), every=every, yes=yes, as_json=as_json)
