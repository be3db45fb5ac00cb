"""Following a run: its rounds as they end, and where the present one is."""

import math
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from federation.v1.admin_pb2 import ListRoundsRequest, RoundSummary, Run, WatchRunRequest, WatchRunResponse
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RoundState
from fedpareto.cli import render
from fedpareto.cli.document import name_of

HEADER = f"{'round':>6}  {'mean':>8}  {'worst 5 %':>9}  {'improved':>8}  {'replies':>8}  {'time':>8}"

_ENDED = (RoundState.ROUND_STATE_COMPLETED, RoundState.ROUND_STATE_SKIPPED)


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
    """Shows a run on the terminal: a line for each round that has ended or ends, one at the bottom for the present.

    Returns:
        The run as it is when it has ended.
    """
    console.print(Text(HEADER, style="bold"))
    shown: int | None = None

    def print_ended(rounds: Iterable[RoundSummary]) -> None:
        nonlocal shown
        shown = -1 if shown is None else shown
        for summary in rounds:
            if summary.round > shown:
                console.print(row(summary))
                shown = summary.round

    def each(update: WatchRunResponse) -> None:
        if shown is None:  # asked for once the stream has begun, so that no round falls between the two
            print_ended(_ended_rounds(stub, run_id))
        print_ended([update.ended] if update.HasField("ended") else [])
        live.update(status(update))

    with Live(console=console, transient=True, refresh_per_second=8) as live:
        run = follow(stub, run_id, each)
    console.print(status(WatchRunResponse(run=run)))
    return run


def _ended_rounds(stub: AdminStub, run_id: str) -> list[RoundSummary]:
    rounds = stub.ListRounds(ListRoundsRequest(run=run_id)).rounds
    return [summary for summary in rounds if summary.state in _ENDED]
