"""`fedpareto admin ...`: logins, members and administrators."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from federation.text import did_you_mean
from fedpareto.cli import completion
from fedpareto.cli.admin.app import Answer, ClientName, Home, command, connected, show
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing, not_served
from fedpareto.cli.secret_input import passphrase_for
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.trust import admin_files, identity, keys
    from federation.v1 import admin_pb2 as v1
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto import admin_messages
    from fedpareto.cli.admin import client
    from fedpareto.cli.show import alert_lines, member_tables, status_lines
    from fedpareto.run_names import RunNames


def login(context: typer.Context, home: Home = None, as_json: JsonOption = False) -> None:
    """Log in with the signing key, for some hours.

    The command gets a certificate for a new TLS key. Other commands do this by themselves if the signing key has no
    passphrase, or with --passphrase-file.
    """
    given, passphrase_file, proxy = context.obj
    route = client.route_to(home or given, passphrase_file=passphrase_file, proxy=proxy)
    if route.stopped:
        raise not_served(route.home.parent)
    with failing(keys.IdentityError, code=USAGE):
        passphrase = passphrase_for(route.home / admin_files.SIGNING_KEY, passphrase_file)
        key = admin_files.load_admin_key(route.home, passphrase)
    files = route.log_in(key, datetime.now(UTC))
    roles = sorted(identity.parse_peer(files.certificate).roles)
    document = {"name": files.name, "federation_id": files.federation_id, "roles": roles}
    until = f"{files.not_after:%Y-%m-%d %H:%M} UTC"
    answer(
        as_json,
        {**document, "certificate_expires": files.not_after.isoformat()},
        f"{files.name} is logged in to {files.federation_id} until {until}, as {', '.join(roles)}",
    )


def status(context: typer.Context, home: Home = None, as_json: JsonOption = False) -> None:
    """Say whether all is well, and what needs you.

    It says what the first page of the console says: alerts, what waits for you with the command for it, your requests
    that wait for another officer, the open runs and how their members fare, who is not connected, and the runs that
    have ended.
    """
    given, passphrase_file, proxy = context.obj
    route = client.route_to(home or given, passphrase_file=passphrase_file, proxy=proxy)
    with connected(context, home) as stub:
        document, picture = status_lines.status(stub, route.account, live=not route.stopped)
    show(as_json, document, picture)


@command
def clients(stub: "AdminStub") -> Answer:
    """List the members, and what is wrong with each."""
    response = admin_messages.whole(stub.ListClients, v1.ListClientsRequest())
    names = RunNames.read(stub) if any(client.undecided for client in response.clients) else RunNames()
    return response, lambda: member_tables.clients(response.clients, datetime.now(UTC), names)


@command
def show_client(stub: "AdminStub", client: ClientName) -> Answer:
    """Show a member.

    That is: its state, its key and its machine, and for each task its samples, quotas and abilities.
    """
    listed = admin_messages.whole(stub.ListClients, v1.ListClientsRequest()).clients
    item = next((item for item in listed if item.client_id == client), None)
    if item is None:
        near = did_you_mean(client, (item.client_id for item in listed)) or ";"
        raise CommandFailure(f"there is no member {client!r}{near} `fedpareto admin clients` lists them")
    names = RunNames.read(stub) if item.undecided else RunNames()
    return item, lambda: member_tables.client(item, datetime.now(UTC), names)


@command
def tag(
    stub: "AdminStub",
    client: ClientName,
    tags: Annotated[
        list[str] | None,
        typer.Argument(help="All its tags; without any, and without --contact, its tags are removed."),
    ] = None,
    contact: Annotated[
        str | None,
        typer.Option(help="Whom you reach there, such as a name and a number; '' removes it.", show_default=False),
    ] = None,
) -> Answer:
    """Set the tags of a member, and note its contact.

    Runs select members by tags (selection.tags). The tags replace the present ones, from the next round on. The contact
    is shown by `fedpareto admin client`, and in alerts about the member.
    """
    given = v1.Tags(tags=tags) if tags or contact is None else None
    response = stub.TagClient(v1.TagClientRequest(client_id=client, tags=given, contact=contact))
    names = ", ".join(response.client.tags)
    told = [f"{client} has the tags {names}" if names else f"{client} has no tags"] if given is not None else []
    if contact is not None:
        now = response.client.contact
        told.append(f"the contact of {client} is {now}" if now else f"{client} has no contact")
    return response, "; ".join(told)


@command
def alerts(
    stub: "AdminStub",
    every: Annotated[bool, typer.Option("--all", help="Also list alerts that have ended.")] = False,
    run: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Only those about a run: its id or its name.",
            autocompletion=completion.runs,
            show_default=False,
        ),
    ] = "",
    client: Annotated[
        str,
        typer.Option(
            metavar="MEMBER", help="Only those about a member.", autocompletion=completion.members, show_default=False
        ),
    ] = "",
    last: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="At most this many, the newest.")] = 200,
) -> Answer:
    """List what needs attention, newest first.

    Alerts are about runs, members, the disk, backups and certificates; each lasts until its cause is gone.
    """
    request = v1.ListAlertsRequest(all=every, run=run, client_id=client)
    response = admin_messages.newest_alerts(stub.ListAlerts, request, last)
    names = RunNames.read(stub) if any(alert.run_id for alert in response.alerts) else RunNames()
    return response, lambda: alert_lines.listed(response, datetime.now(UTC), names, every=every)


@command
def coordinators(stub: "AdminStub") -> Answer:
    """List the coordinators, and the runs that each conducts.

    A coordinator without a sign of life for `lease_seconds` is dead; another one then takes its runs.
    """
    response = stub.ListCoordinators(v1.ListCoordinatorsRequest())
    names = RunNames.read(stub) if any(process.runs for process in response.coordinators) else RunNames()
    return response, lambda: member_tables.coordinators(response.coordinators, names)


@command
def admins(stub: "AdminStub") -> Answer:
    """List the administrators."""
    response = stub.ListAdministrators(v1.ListAdministratorsRequest())
    return response, lambda: member_tables.administrators(response.administrators)
