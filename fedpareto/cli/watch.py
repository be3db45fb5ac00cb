"""Following a run: its rounds as they end, and where the present one is."""

import math
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from federation.v1.admin_pb2 import RoundSummary, Run, WatchRunRequest, WatchRunResponse
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli import render
from fedpareto.cli.document import name_of

HEADER = f"{'round':>6}  {'mean':>8}  {'worst 5 %':>9}  {'improved':>8}  {'replies':>8}  {'time':>8}"


def row(summary: RoundSummary) -> Text:
    """A round in one line, under `HEADER`."""
    replies = f"{summary.accepted}/{summary.asked}"
    seconds = f"{summary.seconds:.2f} s" if math.isfinite(summary.seconds) else "–"
    line = Text(
        f"{summary.round:>6}  {render.percent(render.metric(summary, 'accuracy/mean')):>8}  "
        f"{render.percent(render.metric(summary, 'accuracy/worst5')):>9}  "
        f"{render.percent(render.metric(summary, 'improved')):>8}  {replies:>8}  {seconds:>8}"
    )
    if summary.reason:
        line.append(f"  {name_of(summary, 'state')}: {summary.reason}", style="yellow")
    return line


def status(update: WatchRunResponse) -> Text:
    """Where a run is now, in one line."""
    run = update.run
    line = Text().append(f"{run.name}  ", style="bold")
    line.append_text(render.state(name_of(run, "state")))
    line.append(f"  {run.rounds_done}/{run.rounds_total} rounds")
    if update.HasField("phase"):
        kind = name_of(update.phase, "kind").lower()
        line.append(f"  round {update.phase.round}: {kind}, {update.phase.replied} of {update.phase.asked} replied")
    elif run.reason:
        line.append(f"  {run.reason}")
    return line


def follow(stub: AdminStub, run_id: str, each: Callable[[WatchRunResponse], None]) -> Run:
    """Calls `each` with everything that happens until the run has ended.

    Returns:
        The run as it is then.
    """
    update = WatchRunResponse()
    for update in _stream(stub, run_id):
        each(update)
    return update.run


def _stream(stub: AdminStub, run_id: str) -> Iterator[WatchRunResponse]:
    call = stub.WatchRun(WatchRunRequest(run=run_id))
    try:
        yield from call
    finally:
        call.cancel()


def show(stub: AdminStub, run_id: str, console: Console) -> Run:
    """Follows a run on the terminal: a line for each round that ends, a line at the bottom for the present.

    Returns:
        The run as it is when it has ended.
    """
    console.print(Text(HEADER, style="bold"))
    if not console.is_terminal:
        return follow(stub, run_id, lambda update: _print_ended(console, update))
    with Live(console=console, transient=True, refresh_per_second=8) as live:

        def each(update: WatchRunResponse) -> None:
            _print_ended(live.console, update)
            live.update(status(update))

        return follow(stub, run_id, each)


def _print_ended(console: Console, update: WatchRunResponse) -> None:
    if update.HasField("ended"):
        console.print(row(update.ended))
