"""`fedpareto admin consent`: the consent of a second officer to one request, to several or to all."""

from typing import Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.admin.app import Home, Yes
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.cli.admin.admission import given_consents


def consent(
    context: typer.Context,
    requests: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID",
            help="The requests' ids, or the beginnings of them.",
            autocompletion=completion.open_requests,
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All open requests of other officers.")] = False,
    yes: Yes = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Consent to requests of another officer.

    The actions are then done. It lists the requests, of an approval with the fingerprint of the member's signing key,
    and asks once. You consent to exactly what was listed: not to a request that is made afterwards, and not to the
    approval of a member whose key has changed meanwhile.

    Each request has a result of its own. Exit code 1 if one of the actions was not done.
    """
    if bool(requests) == every:
        raise CommandFailure("name the requests, or give --all for all open ones of other officers", code=USAGE)
    given_consents.consent(context, home, requests or [], every=every, yes=yes, as_json=as_json)
