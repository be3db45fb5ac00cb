"""`fedpareto admin ...`: runs and rounds. Each command is one call of the Admin service; `members` has the others."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpareto.cli import disk, members
from fedpareto.cli.admin_app import Home, Json, RunName, Yes, app, confirm, connected, sentence, show
from fedpareto.cli.code_option import CodeOption
from fedpareto.cli.failure import INTERRUPTED, USAGE, Failure

if TYPE_CHECKING:
    from federation.v1.admin_pb2 import Run
    from federation.v1.admin_pb2_grpc import AdminStub

__all__ = ["app", "disk", "members"]  # importing them adds their commands before those of this file

# --- runs


@app.command()
def submit(
    context: typer.Context,
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC.toml", help="The run specification; see --explain.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The initial model, a safetensors file. Default: the task makes it.")
    ] = None,
    code: CodeOption = None,
    paused: Annotated[bool, typer.Option("--paused", help="Wait for `resume` before the first round.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only check the run: show which members it would ask and how much disk space it would need.",
        ),
    ] = False,
    watch_it: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every key of a run specification, as TOML with comments.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Submit a run.

    With --dry-run the exit code is 0 when the run could begin now; 1 when the coordinator would refuse it, or it would
    wait for members or for space on the disk; 2 when the specification is wrong.

    With --watch the exit code is 0 when the run completed and every member that its last round asked replied;
    otherwise 1.
    """
    from fedpareto.cli import prospects, upload
    from fedpareto.cli.document import line

    if explain:
        _explain(as_json)
        return
    if spec is None:
        raise Failure("name the run specification: fedpareto admin submit SPEC.toml, or see --explain", code=USAGE)
    text, parsed = upload.read_spec(spec)
    initial = upload.model_file(model, parsed.task) if model else upload.made_model(parsed.task, parsed.seed)
    if dry_run:
        with connected(context, home) as stub:
            prospects.tell(upload.submit(stub, text, initial, dry_run=True), as_json)
        return
    with connected(context, home) as stub:
        response = _submit(stub, text, initial, paused)
        run = response.run
        if not as_json:
            for warning in response.warnings:
                typer.echo(f"warning: {warning}", err=True)
            typer.echo(f"run {run.run_id} ({run.name}): {run.parameters:,} parameters, {run.rounds_total} rounds")
            if not watch_it:
                first = f"    fedpareto admin resume {run.run_id}\n" if paused else ""
                typer.echo(
                    f"{first}    fedpareto admin watch {run.run_id}\n    fedpareto admin rounds {run.run_id}", err=True
                )
        if watch_it:
            if as_json:
                typer.echo(line(response))
            _follow(stub, run.run_id, as_json)
    if as_json and not watch_it:
        show(True, response, sentence(""))


def _submit(stub: "AdminStub", text: bytes, initial: Any, paused: bool) -> Any:
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from fedpareto.cli import upload
    from fedpareto.cli.render import console

    columns = ("uploading the initial model", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        bar = progress.add_task("upload", total=initial.size)
        return upload.submit(
            stub, text, initial, paused=paused, progress=lambda count: progress.update(bar, advance=count)
        )


def _explain(as_json: bool) -> None:
    from dataclasses import asdict

    from fedpareto.cli import explain

    keys = explain.every_key()
    if as_json:
        show(True, [asdict(key) for key in keys], sentence(""))
    else:
        typer.echo(explain.template(keys), nl=False)


@app.command()
def runs(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    """List the runs, newest first."""
    from federation.v1.admin_pb2 import ListRunsRequest
    from fedpareto.cli import render
    from fedpareto.messages import whole

    with connected(context, home, reads=True) as stub:
        response = whole(stub.ListRuns, ListRunsRequest())
    show(as_json, response, lambda: render.runs(response.runs))


@app.command("run")
def show_run(context: typer.Context, run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Show a run.

    That is: its state, its numbers, who serves which objective, its specification.
    """
    from federation.v1.admin_pb2 import GetRunRequest
    from fedpareto.cli import render

    with connected(context, home, reads=True) as stub:
        response = stub.GetRun(GetRunRequest(run=run))
    show(as_json, response, lambda: render.run(response.run))


@app.command()
def pause(context: typer.Context, run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Pause a run. Replies to open assignments still count."""
    from federation.v1.admin_pb2 import PauseRunRequest

    with connected(context, home) as stub:
        response = stub.PauseRun(PauseRunRequest(run=run))
    show(as_json, response, sentence(f"paused; resume it with: fedpareto admin resume {response.run.run_id}"))


@app.command()
def resume(context: typer.Context, run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Resume a paused run."""
    from federation.v1.admin_pb2 import ResumeRunRequest

    with connected(context, home) as stub:
        response = stub.ResumeRun(ResumeRunRequest(run=run))
    show(as_json, response, sentence(f"resumed; follow it with: fedpareto admin watch {response.run.run_id}"))


@app.command()
def stop(
    context: typer.Context,
    run: RunName,
    reason: Annotated[str, typer.Option(help="Reason, for the record.")] = "",
    yes: Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Stop a run for good. Its last model can still be exported."""
    from federation.v1.admin_pb2 import GetRunRequest, StopRunRequest

    def question() -> str:
        found = stub.GetRun(GetRunRequest(run=run)).run
        done = f"{found.rounds_done} of {found.rounds_total} rounds done"
        return f"End {found.name} ({found.run_id}), {done}? It cannot go on afterwards."

    with connected(context, home) as stub:
        confirm(yes, question)
        response = stub.StopRun(StopRunRequest(run=run, reason=reason))
    message = f"stopped; its model: fedpareto admin export {response.run.run_id} --out model.safetensors"
    show(as_json, response, sentence(message))


@app.command()
def watch(context: typer.Context, run: RunName, home: Home = None, as_json: Json = False) -> None:
    """Show the rounds of a run so far, and follow it until it ends.

    Ctrl-C stops watching, not the run. Watching goes on when the coordinator restarts. With --json each change is one
    JSON object on a line.

    Exit code 0 when the run completed and every member that its last round asked replied; otherwise 1.
    """
    with connected(context, home) as stub:
        _follow(stub, run, as_json)


def _follow(stub: "AdminStub", run: str, as_json: bool) -> None:
    """Watches a run to its end.

    Raises:
        Failure: it did not complete, or somebody did not reply in its last round.
    """
    from federation.v1.common_pb2 import RunState
    from fedpareto.cli import participation
    from fedpareto.cli import watch as watching
    from fedpareto.cli.render import console

    try:
        found = _stream_json(stub, run) if as_json else watching.show(stub, run, console())
    except KeyboardInterrupt:
        typer.echo(f"\nThe run goes on. Follow it again: fedpareto admin watch {run}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if found.state != RunState.RUN_STATE_COMPLETED:
        raise Failure(f"run {found.run_id} did not complete: {_state(found)}")
    if not as_json:
        typer.echo(f"completed; its model: fedpareto admin export {found.run_id} --out model.safetensors", err=True)
    if silent := participation.silent(found):
        who = "; ".join(map(participation.said, silent))
        raise Failure(
            f"{len(silent)} of {len(participation.asked_last(found))} members failed in the last round: {who}"
        )


def _stream_json(stub: "AdminStub", run: str) -> "Run":
    """Prints each change in a run as one line of JSON; returns the run as it is when it has ended."""
    from federation.v1.admin_pb2 import Run
    from fedpareto.cli import watch as watching
    from fedpareto.cli.document import line

    found = Run()
    for update in watching.changes(watching.messages(stub, run, lambda words: typer.echo(words, err=True))):
        typer.echo(line(update))
        found = update.run
    return found


def _state(run: "Run") -> str:
    from fedpareto.messages import name_of

    return f"{name_of(run, 'state')} {run.reason}".strip()


# --- rounds


@app.command()
def rounds(context: typer.Context, run: RunName, home: Home = None, as_json: Json = False) -> None:
    """List the rounds of a run.

    For each: replies, accuracy, improvement, bytes, time.
    """
    from federation.v1.admin_pb2 import ListRoundsRequest
    from fedpareto.cli import render_rounds
    from fedpareto.messages import whole

    with connected(context, home, reads=True) as stub:
        response = whole(stub.ListRounds, ListRoundsRequest(run=run))
    show(as_json, response, lambda: render_rounds.rounds(response.rounds))


@app.command("round", context_settings={"ignore_unknown_options": True})
def show_round(
    context: typer.Context,
    run: RunName,
    number: Annotated[int, typer.Argument(metavar="N", help="The round, from 0; -1 is the last one.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show a round.

    That is: its phases and objectives, every client's part, the cosines between their updates.
    """
    from federation.v1.admin_pb2 import GetRoundRequest
    from fedpareto.cli import render_rounds
    from fedpareto.cli.document import document

    with connected(context, home, reads=True) as stub:
        response = stub.GetRound(GetRoundRequest(run=run, round=number))
    found = document(response)
    found["cosines"] = _square(found["cosines"])
    if found["objectives"] is not None:
        found["objectives"]["cosines"] = _square(found["objectives"]["cosines"])
    show(as_json, found, lambda: render_rounds.round_(response))


def _square(values: list[float]) -> list[list[float]]:
    """A square matrix from its rows, one after the other."""
    side = math.isqrt(len(values))
    return [values[row * side : (row + 1) * side] for row in range(side)]


@app.command()
def updates(
    context: typer.Context,
    run: RunName,
    number: Annotated[int | None, typer.Option("--round", min=0, help="Only this round.")] = None,
    client: Annotated[str, typer.Option(help="Only this client.")] = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List the received updates, including refused ones.

    --json has the signed envelopes.
    """
    from federation.v1.admin_pb2 import ListUpdatesRequest, ListUpdatesResponse
    from fedpareto.cli import render_envelopes

    found = ListUpdatesResponse()
    with connected(context, home, reads=True) as stub:
        for some in stub.ListUpdates(ListUpdatesRequest(run=run, round=number, client_id=client)):
            found.MergeFrom(some)
    show(as_json, found, lambda: render_envelopes.updates(found.updates))


@app.command()
def export(
    context: typer.Context,
    run: RunName,
    out: Annotated[Path, typer.Option(help="The file to write, safetensors.")],
    number: Annotated[
        int | None, typer.Option("--round", min=0, help="The model after this round. Default: the newest.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write a model of a run to a file."""
    from federation.v1.admin_pb2 import ExportModelRequest
    from fedpareto.cli import download

    if out.exists() and not force:
        raise Failure(f"{out} exists: give --force to overwrite it", code=USAGE)
    with connected(context, home, reads=True) as stub:
        digest, size = download.save(stub.ExportModel(ExportModelRequest(run=run, round=number)), out)
    found = {"file": str(out), "digest": digest, "size": size}
    show(as_json, found, sentence(f"{out}: {size:,} bytes, {digest}"))
