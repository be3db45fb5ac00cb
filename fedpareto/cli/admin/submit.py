"""`fedpareto admin submit`: a run specification, its checks and its upload."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.text import counted
from fedpareto.cli.admin.app import Home, connected
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.shared_options import CodeOption, JsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document, separate_documents

with on_first_use():
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from federation.spec.run_spec import RunSpec
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli import document
    from fedpareto.cli.admin import upload
    from fedpareto.cli.admin.runs import follow
    from fedpareto.cli.admin.upload import InitialModel
    from fedpareto.cli.research import explain
    from fedpareto.cli.show import tables


def submit(
    context: typer.Context,
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC.toml", help="The run specification; see --explain.")
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="The initial model, a safetensors file; see below. Default: the task makes it. Of a run that "
            "evaluates: a model to measure; give it once for each.",
        ),
    ] = None,
    model_of: Annotated[
        str,
        typer.Option(
            metavar="RUN", help='With kind = "evaluate": measure the newest model of this run, or see --best.'
        ),
    ] = "",
    best: Annotated[
        str,
        typer.Option(metavar="METRIC", help="With --model-of: its best model by the mean of this validation metric."),
    ] = "",
    statistics: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Fill the layer Standardise of the task's model with the means and deviations that this run of kind = "
            '"statistics" has shown.',
        ),
    ] = "",
    code: CodeOption = None,
    paused: Annotated[bool, typer.Option("--paused", help="Wait for `resume` before the first round.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only check the run: show which members would take part, why the others would not, and how much disk "
            "space it would need.",
        ),
    ] = False,
    watch_it: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every key of a run specification, as TOML with comments.")
    ] = False,
    home: Home = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a run.

    The file of --model holds tensors under their names in the task's model, in any order: such as
    `save_file(model.state_dict(), FILE)` of PyTorch, or what `export` wrote. What the run does not share is left out.

    A run of kind = "evaluate" measures models at every member and trains nothing: `submit eval.toml --model FILE
    --model FILE`, or `submit eval.toml --model-of RUN --best accuracy`. The specification that is submitted names their
    digests; with --model-of it also has the seed and the [parameters] of that run.

    With --statistics, the specification that is submitted names the signed result of that run and the tensors of the
    layer: members compare the model with the result, and decline a model with other numbers.

    With --dry-run the exit code is 0 when the run could begin now; 1 when the coordinator would refuse it, when too few
    members could be asked or would take part, or when space on the disk is missing; 2 when the specification is wrong.

    Whether a member would take part follows from what its worker has told: its version of the task, its trainer's
    abilities, the owner's bounds on work ([limits] of its policy), and private rounds. Not told are other rules of its
    owner, such as noise or the approval of each run, and anything that shows only in the work.

    With --watch the exit code is 0 when the run completed and every member that its last round asked replied;
    otherwise 1.
    """
    if explain:
        _explain(as_json)
        return
    if spec is None:
        raise CommandFailure(
            "name the run specification: fedpareto admin submit SPEC.toml, or see --explain", code=USAGE
        )
    text, parsed = upload.read_spec(spec)
    if not statistics:  # before a passphrase is asked for
        text, models = _read(text, parsed, model or (), model_of, best)
    with connected(context, home) as stub:
        if statistics:
            text, described = upload.scaled_by(stub, text, statistics)
            text, models = _read(text, upload.checked_spec(text), model or (), model_of, best, described)
        if model_of:
            text, models = upload.model_of_run(stub, text, model_of, best)
        if dry_run:
            upload.show_prospects(upload.submit(stub, text, models, dry_run=True), as_json)
            return
        response = _submit(stub, text, models, paused)
        run = response.run
        if as_json:
            print_document(document.line(response) if watch_it else document.dumps(response))
        else:
            for warning in response.warnings:
                typer.echo(f"warning: {warning}", err=True)
            typer.echo(
                f"run {run.run_id} ({run.name}): {run.parameters:,} parameters, {counted(run.rounds_total, 'round')}"
            )
            for next_command in () if watch_it else [*(["resume"] if paused else []), "watch", "rounds"]:
                typer.echo(f"    fedpareto admin {next_command} {run.run_id}", err=True)
        if watch_it:
            follow(stub, run.run_id, as_json)


def _read(
    text: bytes, spec: "RunSpec", files: Sequence[Path], run: str, best: str, statistics: bytes = b""
) -> tuple[bytes, list["InitialModel"]]:
    """As `given_models`; tells what was converted, added or left out."""
    text, models = upload.given_models(text, spec, files, run, best, statistics=statistics)
    for remark in dict.fromkeys(remark for given in models for remark in given.remarks):
        typer.echo(remark, err=True)
    return text, models


def _submit(stub: "AdminStub", text: bytes, models: Sequence["InitialModel"], paused: bool) -> Any:
    columns = (
        "uploading the model" + ("s" if len(models) > 1 else ""),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=tables.console(stderr=True), transient=True) as progress:
        total = sum(given.size for given in models if not given.stored)
        bar = progress.add_task("upload", total=total)
        return upload.submit(
            stub, text, models, paused=paused, progress=lambda count: progress.update(bar, advance=count)
        )


def _explain(as_json: bool) -> None:
    separate_documents()  # the template is one, too: rules and stages of others are imported for it
    keys = explain.every_key()
    print_document(document.dumps([asdict(key) for key in keys]) if as_json else explain.template(keys))
