"""`fedpareto admin ...`: members of the federation. Each command is one call of the Admin service."""

from typing import Annotated

import typer

from fedpareto.cli.admin_app import ClientName, Home, Json, Yes, app, confirm, connected, sentence, show


@app.command()
def token(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Name of the new client, such as hospital-a.")],
    hours: Annotated[
        float | None, typer.Option(min=0.01, max=720, help="Hours until it expires. Default: the federation's setting.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a join string for a new member. It is shown once, works once, and expires."""
    from federation.v1.admin_pb2 import CreateTokenRequest
    from fedpareto.formatting import local

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
def tokens(
    context: typer.Context,
    every: Annotated[bool, typer.Option("--all", help="Also list used, cancelled and expired join strings.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List the join strings that can still be used. Their secrets are not kept."""
    from federation.v1.admin_pb2 import ListTokensRequest
    from fedpareto.cli import render_members
    from fedpareto.messages import whole

    with connected(context, home, reads=True) as stub:
        response = whole(stub.ListTokens, ListTokensRequest(all=every))
    show(as_json, response, lambda: render_members.tokens(response.tokens))


@app.command("cancel-token")
def cancel_token(context: typer.Context, client: ClientName, home: Home = None, as_json: Json = False) -> None:
    """Cancel the unused join strings for a name."""
    from federation.v1.admin_pb2 import CancelTokensRequest

    with connected(context, home) as stub:
        response = stub.CancelTokens(CancelTokensRequest(client_id=client))
    show(as_json, response, sentence(f"join strings of {client} that were cancelled: {len(response.tokens)}"))


@app.command()
def clients(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    """List the members: state, attendance, tasks, certificates."""
    from federation.v1.admin_pb2 import ListClientsRequest
    from fedpareto.cli import render_members
    from fedpareto.messages import whole

    with connected(context, home, reads=True) as stub:
        response = whole(stub.ListClients, ListClientsRequest())
    show(as_json, response, lambda: render_members.clients(response.clients))


@app.command()
def approve(context: typer.Context, client: ClientName, home: Home = None, as_json: Json = False) -> None:
    """Approve a pending member, so that it gets work."""
    from federation.v1.admin_pb2 import ApproveClientRequest

    with connected(context, home) as stub:
        response = stub.ApproveClient(ApproveClientRequest(client_id=client))
    show(as_json, response, sentence(f"{client} is active and gets work"))


@app.command()
def revoke(
    context: typer.Context,
    client: ClientName,
    reason: Annotated[str, typer.Option(help="Reason, for the record.")] = "",
    yes: Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Revoke a member, at once and permanently."""
    from federation.v1.admin_pb2 import RevokeClientRequest

    confirm(yes, lambda: f"Shut {client} out for good? Its name is never given again.")
    with connected(context, home) as stub:
        response = stub.RevokeClient(RevokeClientRequest(client_id=client, reason=reason))
    show(as_json, response, sentence(f"{client} is revoked; its past updates stay in the record"))


# --- administrators


@app.command()
def admins(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    """List the administrators: roles, certificates, last call."""
    from federation.v1.admin_pb2 import ListAdministratorsRequest
    from fedpareto.cli import render_members

    with connected(context, home, reads=True) as stub:
        response = stub.ListAdministrators(ListAdministratorsRequest())
    show(as_json, response, lambda: render_members.administrators(response.administrators))


@app.command("revoke-admin")
def revoke_admin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The administrator's name.")],
    reason: Annotated[str, typer.Option(help="Reason, for the record.")] = "",
    yes: Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Revoke an administrator, at once. `coordinator admin` can issue the name again."""
    from federation.v1.admin_pb2 import RevokeAdministratorRequest

    confirm(yes, lambda: f"End the certificate of the administrator {name}?")
    with connected(context, home) as stub:
        response = stub.RevokeAdministrator(RevokeAdministratorRequest(name=name, reason=reason))
    show(as_json, response, sentence(f"the certificate of {name} has ended, and so have its calls"))
