"""`fedpareto admin disk`: what the record takes."""

# ruff: noqa: PLC0415 - commands import what they need: --help is quick
from typing import TYPE_CHECKING

import typer

from fedpareto.cli.admin_app import Home, Json, app, connected, show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from federation.v1.admin_pb2 import GetDiskResponse


@app.command()
def disk(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    """Show the disk space of the record.

    It shows models, updates and the database for each run, the free space, and an estimate of the space that open runs
    will still need.
    """
    from federation.v1.admin_pb2 import GetDiskRequest

    with connected(context, home, reads=True) as stub:
        response = stub.GetDisk(GetDiskRequest())
    show(as_json, response, lambda: _picture(response))


def _picture(response: "GetDiskResponse") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from fedpareto.formatting import size
    from fedpareto.messages import name_of

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("run", "name", "state"):
        table.add_column(title)
    for title in ("models", "updates", "still needed"):
        table.add_column(title, justify="right")
    for run in response.runs:
        words = (run.run_id, run.name, name_of(run, "state"))
        needed = size(run.needed) if run.needed else "–"
        table.add_row(*(Text(word) for word in (*words, size(run.models), size(run.updates), needed)))
    retention = (
        f"the last {response.keep_rounds} rounds of each run are kept, with the first and the best one"
        if response.keep_rounds
        else "every round is kept (keep_rounds = 0)"
    )
    lines = (
        f"models {size(response.models)}, updates {size(response.updates)}, other blobs {size(response.other)}, "
        f"database {size(response.database)}",
        f"free {size(response.free)}; runs that have not ended will still take about {size(response.needed)}",
        retention,
    )
    summary = Text("\n".join(lines))
    return Group(summary, Text(), table) if response.runs else summary
