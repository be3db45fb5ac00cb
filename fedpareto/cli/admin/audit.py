"""`fedpareto admin audit ...`: shows and verifies the audit log."""

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from federation.record.log_kinds import KINDS
from federation.text import counted
from fedpareto.cli.admin.app import Home, connected
from fedpareto.cli.commands import QuickHelpGroup
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.shared_options import JsonOption, moment_of
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    import grpc

    from federation.transport import channels
    from federation.v1 import admin_pb2 as v1
    from federation.v1 import common_pb2 as common
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto import formatting
    from fedpareto.cli import document


audit = typer.Typer(
    cls=QuickHelpGroup,
    help="Show the audit log; `audit verify` verifies it.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)

_SHORTEST_SECONDS = 1.0  # of a call whose certificate was valid when it began


@audit.callback()
def show_log(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", help="Also show new entries as they come.")] = False,
    since: Annotated[
        str | None, typer.Option(help="Only entries since 90m, 12h, 7d ago, or since a time such as 2026-05-04T12:00.")
    ] = None,
    actor: Annotated[
        str,
        typer.Option(help="Only entries of this actor: as the log has it, or the name of a member or administrator."),
    ] = "",
    kind: Annotated[str, typer.Option(help=f"Only entries of this kind: {', '.join(KINDS)}.", show_default=False)] = "",
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Show the audit log: who did what, refusals included.

    With --json it prints one object for each entry.
    """
    if context.invoked_subcommand is not None:
        context.obj = (home or context.obj[0], *context.obj[1:])
        return
    request = v1.ListAuditRequest(actor=actor, follow=follow, kind=kind)
    if since is not None:
        request.since.FromDatetime(moment_of("--since", since, datetime.now(UTC), ahead=False))
    with connected(context, home) as stub:
        for entries in listed(stub, request):
            for entry in entries:
                if as_json:
                    print_document(document.line(entry))
                else:
                    typer.echo(_line(entry))


def listed(stub: "AdminStub", request: "v1.ListAuditRequest") -> "Iterator[list[v1.AuditEntry]]":
    """Yields the entries in lists. With `follow` it goes on with the next certificate when one ends."""
    last = -1
    while True:
        begun = time.monotonic()
        try:
            for response in stub.ListAudit(request):
                if entries := [entry for entry in response.entries if entry.number > last]:
                    last = entries[-1].number
                    yield entries
        except grpc.RpcError as error:
            expired = channels.refusal_from_rpc_error(error).reason == "certificate-expired"
            if not (request.follow and expired and time.monotonic() > begun + _SHORTEST_SECONDS):
                raise
        else:
            return


@audit.command()
def verify(
    context: typer.Context,
    skip_blobs: Annotated[
        bool, typer.Option("--skip-blobs", help="Do not read the models and updates, which may take long.")
    ] = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the audit log, and the record against it.

    Every entry, leaf and checkpoint is computed anew. Signed envelopes, runs, members and administrators are compared
    with the entries that tell of them, metrics of rounds with what was signed, and blobs with their digests. Noise that
    protects clients must have the length and the extremes of noise. The exit code is 1 when something is wrong.
    """
    problems, verified = list[str](), v1.AuditVerified()
    with connected(context, home) as stub:
        for response in stub.VerifyAudit(v1.VerifyAuditRequest(skip_blobs=skip_blobs)):
            kind = response.WhichOneof("message")
            if kind == "problem":
                problems.append(response.problem)
                if not as_json:
                    typer.echo(f"wrong: {response.problem}")
            elif kind == "progress" and sys.stderr.isatty():
                typer.echo(f"\r{response.progress.part}: {response.progress.done} ", nl=False, err=True)
            elif kind == "verified":
                verified = response.verified
    if sys.stderr.isatty():
        typer.echo("", err=True)
    newest = common.CheckpointManifest.FromString(verified.checkpoint.manifest)
    counts = {name: getattr(verified, name) for name in ("entries", "rounds", "blobs")}
    if as_json:
        checkpoint = {"size": newest.size, "root": newest.root.hex(), "created": newest.created.ToJsonString()}
        print_document(document.dumps({**counts, "problems": problems, "checkpoint": checkpoint}))
    else:
        blobs = "no blobs" if skip_blobs else counted(verified.blobs, "blob")
        entries, rounds = counted(verified.entries, "entry", "entries"), counted(verified.rounds, "round")
        typer.echo(
            f"{entries}, {rounds} and {blobs} verified; the newest checkpoint covers "
            f"{newest.size} entries, with root {newest.root.hex()}"
        )
    if problems:
        raise CommandFailure(f"{len(problems)} things are wrong" if len(problems) > 1 else "one thing is wrong")


def _line(entry: "v1.AuditEntry") -> str:
    when = formatting.local(entry.at)
    parts = [f"{entry.number:>7}  {when}  {entry.actor}  {entry.action}"]
    parts += [part for part in (entry.subject, entry.detail) if part]
    if entry.outcome:
        parts.append(f"refused: {entry.outcome}")
    if entry.times > 1:
        parts.append(f"{entry.times} times")
    return "  ".join(parts)
