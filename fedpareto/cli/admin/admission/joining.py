"""`fedpareto admin ...`: join strings of new members, one or many at once."""

from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.admin.app import Answer, ClientName, Home, command
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.v1 import admin_pb2 as v1
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto import admin_messages
    from fedpareto.cli.admin.admission import join_files
    from fedpareto.cli.show import member_tables


def join_string(
    context: typer.Context,
    client: Annotated[
        str | None,
        typer.Argument(metavar="MEMBER", help="Name of the new member, such as hospital-a.", show_default=False),
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Make one for each name in a file: one name a line, # begins a comment.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --names: the directory of the files, DIR/MEMBER.join. Default: join-strings.",
            show_default=False,
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.01, max=720, help="Hours until it expires. Default: the federation's setting.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="For a member that joins again, because its certificate has ended.")
    ] = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Make a join string for a new member. It is shown once, works once, and expires.

    There is one for a name at a time: another one replaces it.

    With --names it makes one for each name in a file, and writes each to a file that only you can read. First it
    compares all names with the rules for names and with the members. If one of them cannot be used, it makes nothing,
    and lists each. It overwrites no file: a name with a file is left out. So after an interruption, the same command
    makes the rest.
    """
    if (client is None) == (names is None):
        raise CommandFailure("name one member, or give a file of names with --names FILE", code=USAGE)
    if out is not None and names is None:
        raise CommandFailure("--out is the directory of the files of --names: give both", code=USAGE)
    request = v1.CreateJoinStringRequest(lifetime_seconds=round((hours or 0) * 3600), again=again)
    if names is not None:
        join_files.make_all(context, home, request, names, out or Path("join-strings"), as_json=as_json)
    elif client is not None:
        request.client_id = client
        join_files.make_one(context, home, request, as_json=as_json)


@command
def join_strings(
    stub: "AdminStub",
    every: Annotated[bool, typer.Option("--all", help="Also list used, cancelled and expired join strings.")] = False,
) -> Answer:
    """List the join strings that can still be used. Their secrets are not kept."""
    response = admin_messages.whole(stub.ListJoinStrings, v1.ListJoinStringsRequest(all=every))
    return response, lambda: member_tables.join_strings(response.join_strings)


@command
def cancel_join_string(stub: "AdminStub", client: ClientName) -> Answer:
    """Cancel the unused join strings for a name."""
    response = stub.CancelJoinStrings(v1.CancelJoinStringsRequest(client_id=client))
    return response, f"join strings of {client} that were cancelled: {len(response.join_strings)}"
