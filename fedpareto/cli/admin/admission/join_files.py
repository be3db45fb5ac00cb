"""Makes join strings: one on the screen, or one for each name in a file, each in a file of its own."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote

import typer

from federation.text import counted
from federation.trust.join_string import JoinStringFields
from federation.trust.keys import IdentityError, make_private_directory, write_private
from federation.v1.admin_pb2 import Client, CreateJoinStringRequest, ListClientsRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import ClientState
from fedpareto.admin_messages import whole
from fedpareto.cli.admin.admission.names_file import read_names
from fedpareto.cli.admin.admission.outcomes import NOT_WRITTEN, ItemResult, one_by_one, report
from fedpareto.cli.admin.app import connected
from fedpareto.cli.document import document, dumps
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.formatting import local
from fedpareto.standard_streams import print_document

_MADE, _EXISTS = "made", "exists"


def make_one(context: typer.Context, home: Path | None, request: CreateJoinStringRequest, *, as_json: bool) -> None:
    """Makes one and shows it."""
    with connected(context, home) as stub:
        response = stub.CreateJoinString(request)
    client, again = request.client_id, request.again
    if as_json:
        print_document(dumps(response))
        return
    typer.echo(response.join_string)
    if response.replaced:
        older = counted(response.replaced, "open join string")
        typer.echo(f"\nIt replaces {older} for {client}: nobody can join with the older one any more.", err=True)
    typer.echo(
        f"\nHand it to {client} in confidence, before {local(response.expires)}. On that machine"
        + (", with the directory that it has:\n" if again else ":\n")
        + f"    fedpareto worker join --home {'DIRECTORY' if again else client}",
        err=True,
    )


def make_all(
    context: typer.Context,
    home: Path | None,
    request: CreateJoinStringRequest,
    names_file: Path,
    directory: Path,
    *,
    as_json: bool,
) -> None:
    """Makes one for each name in a file, with the settings of `request`, in a file of the directory.

    Raises:
        CommandFailure: a name cannot be used, and nothing was made; or a join string could not be made or written.
    """
    listed = read_names(names_file)
    names = list(listed.lines)
    there = {name for name in names if (directory / f"{name}.join").exists()}
    with connected(context, home) as stub:
        asked = {line: name for name, line in listed.lines.items() if name not in there}
        if wrong := {**listed.wrong, **dict(_unfit(asked, stub, again=request.again))}:
            problems = [f"line {line}: {why}" for line, why in sorted(wrong.items())]
            head = f"{names_file}: no join string was made, because of these lines:"
            raise CommandFailure("\n  ".join([head, *problems]), code=USAGE)
        with failing(OSError):
            if not directory.is_dir():
                make_private_directory(directory)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise CommandFailure(f"{directory} cannot be written to: name another directory with --out", code=USAGE)

        def act(name: str) -> ItemResult:
            file = directory / f"{name}.join"
            return _left(name, file) if name in there else _made(stub, request, name, file)

        closing = (
            f"\nHand each file of {directory} to its member in confidence. On that machine:\n"
            f"    fedpareto worker join --home {'DIRECTORY' if request.again else 'MEMBER'} --join-file MEMBER.join"
        )
        report(one_by_one(names, act), key="client_id", as_json=as_json, closing=closing, directory=str(directory))


def _unfit(asked: Mapping[int, str], stub: AdminStub, *, again: bool) -> Iterator[tuple[int, str]]:
    """The lines, of the names `asked` for, whose names are members; of those that join again, the others."""
    members = {item.client_id: item for item in whole(stub.ListClients, ListClientsRequest()).clients}
    for line, name in asked.items():
        if why := _why_not(members.get(name), again=again):
            yield line, f"{name} {why}"


def _why_not(member: Client | None, *, again: bool) -> str:
    """Why there can be no join string for a name; empty if there can be."""
    if not again:
        return "" if member is None else "is a member already, and a name is never given twice"
    if member is None:
        return "is no member, so that it cannot join again"
    revoked = member.state == ClientState.CLIENT_STATE_REVOKED
    return "was revoked, and cannot join again" if revoked else ""


def _left(name: str, file: Path) -> ItemResult:
    """The result of a name whose file is there: an earlier call has made it, if it has a join string of this name."""
    try:
        whole_one = JoinStringFields.decode(file.read_text(encoding="ascii")).client_id == name
    except (OSError, ValueError, IdentityError):
        whole_one = False
    if not whole_one:
        why = f"{file} is there, and has no whole join string of {name}: remove it, and give this command again"
        return ItemResult.failed(name, _EXISTS, why)
    message = f"{name}: {file} is there already; to make another one, remove it first"
    return ItemResult(name=name, outcome=_EXISTS, message=message, more={"file": str(file)})


def _made(stub: AdminStub, asked: CreateJoinStringRequest, name: str, file: Path) -> ItemResult:
    request = CreateJoinStringRequest()
    request.CopyFrom(asked)
    request.client_id = name
    response = stub.CreateJoinString(request)
    try:
        write_private(file, f"{response.join_string}\n".encode())
    except OSError as error:
        why = f"{file} cannot be written: {error.strerror}; the next call makes another join string in its place"
        return ItemResult.failed(name, NOT_WRITTEN, why)
    replaced = f"; it replaces {counted(response.replaced, 'open join string')}" if response.replaced else ""
    return ItemResult(
        name=name,
        outcome=_MADE,
        message=f"{name}: {quote(str(file))}, until {local(response.expires)}{replaced}",
        more={"file": str(file), "expires": document(response)["expires"], "replaced": response.replaced},
    )
