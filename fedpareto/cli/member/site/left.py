"""`fedpareto worker left`: what left the site."""

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from federation.text import escaped
from fedpareto.cli.failure import USAGE, CommandFailure, answer
from fedpareto.cli.member.member_command import member_command
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.web.site.left_table import cells, csv_text
    from worker.home import WorkerHome
    from worker.ledgers.left_reading import LeftRow, earlier_receipts, read_left

EARLIER = "replies from before this record began are in receipts.jsonl alone: `fedpareto worker receipts`"


@member_command(keys=False)
def left_command(
    home: "WorkerHome",
    as_json: bool,
    run: Annotated[str, typer.Option(metavar="RUN", help="The run's id, or its beginning. Default: all runs.")] = "",
    last: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="How many, the newest. Default: 100; CSV: all.")
    ] = None,
    before: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Older ones, from the number that the last page named.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values for a spreadsheet.")] = False,
) -> None:
    """Show what left this site: each reply, its numbers and its outcome.

    The newest come first; a private session is one row. The worker records each reply before it sends it: "kept, may
    have left" is a reply without an answer. The coefficient of a reply is shown once it is known: `worker model` asks
    for it, and a private round names it. The worker may run meanwhile.
    """
    if as_csv and (as_json or before is not None):
        raise CommandFailure(f"--csv cannot be given with {'--json' if as_json else '--before'}", code=USAGE)
    if as_csv:
        for part in csv_text(home.left, run, last):
            typer.echo(part, nl=False)
        return
    page = read_left(home.left, run=run, before=before, limit=last)
    earlier = page.before is None and earlier_receipts(home.left, home.receipts)
    if as_json:
        answer(True, {"rows": [_document(row) for row in page.rows], "before": page.before, "earlier": earlier})
        return
    for row in page.rows:
        of = cells(row)
        coefficient = "" if row.coefficient is None else f", coefficient {of['coefficient']}"
        typer.echo(f"{of['time']}  run {of['run']} round {of['round']} {of['work']}: {of['outcome']}{coefficient}")
        typer.echo(f"    {of['bytes']}, {of['numbers']}")
    if not page.rows:
        of_run = f" for a run {escaped(run, 80)!r}" if run else ""
        typer.echo(f"nothing that left this site is on record{of_run}")
    if page.before is not None:
        typer.echo(f"older ones: --before {page.before}")
    if earlier:
        typer.echo(EARLIER)


def _document(row: "LeftRow") -> dict[str, Any]:
    replies = [
        {**asdict(reply), "numbers": {name: _plain(value) for name, value in reply.numbers.items()}}
        for reply in row.replies
    ]
    return {
        "number": row.number, "private": row.private, "work": row.work, "bytes": row.bytes, "numbers": row.numbers,
        "state": row.telling.state, "reason": row.telling.reason, "coefficient": row.coefficient, "replies": replies,
    }  # fmt: skip


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
