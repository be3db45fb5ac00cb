"""`fedpareto admin statistics`: what a run has told of the members' data."""

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.admin.app import Answer, RunName, command
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from rich.console import Group, RenderableType
    from rich.text import Text

    from federation.v1 import admin_pb2 as v1
    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.show.tables import new_table
    from fedpareto.web.sections import described_data


@command
def statistics(
    stub: "AdminStub",
    run: RunName,
    as_csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write every number to a CSV file, a line for each.")
    ] = None,
) -> Answer:
    """Show what a run has told of the members' data.

    That is a line for each column. --json prints the document whose digest the coordinator has signed.
    """
    response = stub.GetRound(v1.GetRoundRequest(run=run, round=0))
    if not response.document:
        raise CommandFailure(
            f'run {response.run.run_id} has described no data; a run with kind = "statistics" does', code=USAGE
        )
    document = json.loads(response.document)
    if as_csv is not None:
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows(described_data.lines(document))
        try:
            as_csv.write_text(written.getvalue())
        except OSError as error:
            raise CommandFailure(f"cannot write {as_csv}: {error.strerror or error}", code=USAGE) from None
        return document, f"wrote {as_csv}"

    def table() -> "RenderableType":
        first, *heads = described_data.HEADS
        grid = new_table(first, *(f">{head}" for head in heads), "histogram")
        for column in document["columns"]:
            grid.add_row(*described_data.cells(column), described_data.bars(column))
        return Group(grid, Text(described_data.sentence(document)))

    return document, table
