"""`fedpareto admin ...`: members of the federation. Each command is one call of the Admin service."""

from typing import Annotated

import typer

from fedpareto.cli.admin_app import ClientName, Home, Json, Yes, app, confirm, connected, sentence, show


@app.command()
def token(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Name of the client to be, such as hospital-a.")],
    hours: Annotated[
        float | None, typer.Option(min=0.01, max=720, help="Until it expires; the federation's default without.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a join string for a new member. It is shown once, works once, and expires."""
    from federation.v1.admin_pb2 import CreateTokenRequest
    from fedpareto.cli.render import local

    with connected(context, home) as stub:
        request = CreateTokenRequest(client_id=client, lifetime_seconds=round((hours or 0) * 3600))
        response = stub.CreateToken(request)
    if as_json:
        show(True, response, sentence(""))
        return
    typer.echo(response.join)
    typer.echo(
        f"\nHand it to {client} in confidence, before {local(response.expires)}. On that machine:\n"
        f"    fedpareto worker join --home {client}",
        err=True,
    )


@app.command()
def clients(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    """List the members: state, attendance, tasks, certificates."""
    from federation.v1.admin_pb2 import ListClientsRequest
    from fedpareto.cli import render

    with connected(context, home, reads=True) as stub:
        response = stub.ListClients(ListClientsRequest())
    show(as_json, response, lambda: render.clients(response.clients))


@app.command()
def approve(context: typer.Context, client: ClientName, home: Home = None, as_json: Json = False) -> None:
    """Let a pending member work."""
    from federation.v1.admin_pb2 import ApproveClientRequest

    with connected(context, home) as stub:
        response = stub.ApproveClient(ApproveClientRequest(client_id=client))
    show(as_json, response, sentence(f"{client} is active and gets work"))


@app.command()
def revoke(
    context: typer.Context,
    client: ClientName,
    reason: Annotated[str, typer.Option(help="For the record.")] = "",
    yes: Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Shut a member out, at once and for good."""
    from federation.v1.admin_pb2 import RevokeClientRequest

    confirm(yes, lambda: f"Shut {client} out for good? Its name is never given again.")
    with connected(context, home) as stub:
        response = stub.RevokeClient(RevokeClientRequest(client_id=client, reason=reason))
    show(as_json, response, sentence(f"{client} is shut out; its past updates stay in the record"))
