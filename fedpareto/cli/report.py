"""`fedpareto report RUN`: a run as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.admin import DEFAULT_HOME, RunName
from fedpareto.cli.failure import USAGE, Failure


def report_command(
    run: RunName,
    output: Annotated[
        Path | None, typer.Option(help="The file to write; report-NAME.html without.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    home: Annotated[Path, typer.Option(envvar="FEDPARETO_ADMIN", help="The administrator's directory.")] = DEFAULT_HOME,
    passphrase_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the passphrase of the administrator's key.")
    ] = None,
) -> None:
    """Write a report of a run: one HTML page with every figure, which needs nothing else.

    Accuracy and its spread, each client at the end, weights, conflicts, losses, replies and bytes, with the numbers.
    """
    from fedpareto.cli.client import connect
    from fedpareto.report.data import RunData
    from fedpareto.report.page import page

    with connect(home, passphrase_file=passphrase_file, reads=True) as stub:
        data = RunData.read(stub, run)
    target = output or Path(f"report-{data.run.name}.html")
    if target.exists() and not force:
        raise Failure(f"{target} exists: give --force to overwrite it", code=USAGE)
    try:
        target.write_text(page(data), encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {target}: {error.strerror or error}") from None
    typer.echo(f"{target}: {len(data.rounds)} rounds, {len(data.clients)} clients")
