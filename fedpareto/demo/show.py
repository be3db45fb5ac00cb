"""The output of the demo: one line for each act while it runs, and the hospitals' bars and the sentences at its end."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from federation.text import counted
from federation.v1.admin_pb2 import Run, WatchRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import name_of
from fedpareto.demo.demo_results import Served
from fedpareto.demo.hospitals import HOSPITALS, TWO
from fedpareto.demo.story import HospitalAccuracies, Story
from fedpareto.formatting import number, percent, size
from fedpareto.series import metric

_BAR = 24  # columns of the bar of an act
_CELL = 10  # columns of the bar of a hospital
_TITLE = 18


@contextmanager
def step(console: Console, doing: str, done: str) -> Iterator[None]:
    """Shows work that has no rounds: a spinner while it lasts, and a line with its seconds at its end."""
    began = time.monotonic()
    with console.status(doing):
        yield
    console.print(f"✓ {done}  ({time.monotonic() - began:.0f} s)")


def follow(stub: AdminStub, run_id: str, title: str, console: Console) -> Run:
    """Shows a run in one line until it ends, and returns it."""
    line, run = Text(), Run()
    with Live(console=console, transient=True, refresh_per_second=4, get_renderable=lambda: line):
        for message in stub.WatchRun(WatchRunRequest(run=run_id)):
            run = message.run
            line = _line(title, run)
            if name_of(run, "state") == "PAUSED":  # no administrator is present to resume it
                break
    console.print(line)
    return run


def _line(title: str, run: Run) -> Text:
    share = run.rounds_done / max(1, run.rounds_total)
    line = Text(f"  {title:<{_TITLE}} ").append(bar(share, _BAR), style="cyan")
    line.append(f"  {run.rounds_done} of {counted(run.rounds_total, 'round')}".ljust(18))
    if run.rounds_done:
        latest = run.latest
        line.append(f"  mean {percent(metric(latest, 'accuracy/mean')):>7}")
        line.append(f"  worst {percent(metric(latest, 'accuracy/worst')):>7}")
    return line.append(f"  {run.reason}", style="yellow") if run.reason else line


def bar(share: float, width: int) -> str:
    """A bar of blocks, as long as a share in [0, 1] of `width` columns."""
    filled = round(width * (share if math.isfinite(share) else 0.0))
    return "━" * filled + "─" * (width - filled)


def bars(columns: Sequence[HospitalAccuracies]) -> Table:
    """A bar for each hospital and run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("accuracy")
    for column in columns:
        table.add_column(column.title)
    for name in HOSPITALS:
        style = "yellow" if name in TWO else "cyan"
        cells = [_cell(column.accuracy.get(name, math.nan), style) for column in columns]
        table.add_row(f"{name} *" if name in TWO else name, *cells)
    return table


def accuracies(title: str, values: Mapping[str, float]) -> Table:
    """A bar for each member of one run."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("member")
    table.add_column(title)
    for name, value in sorted(values.items()):
        table.add_row(name, _cell(value, "cyan"))
    return table


def _cell(accuracy: float, style: str) -> Text:
    """A bar and its number."""
    return Text(bar(accuracy, _CELL), style=style).append(f" {percent(accuracy):>7}", style="default")


def story(console: Console, shown: Story) -> None:
    """Prints the end of the demo: the bars, and the sentences."""
    if shown.columns:
        console.print()
        console.print(bars(shown.columns))
        console.print("* has another scanner, which turns each image by 90 degrees")
    console.print()
    for sentence in shown.sentences:
        console.print(f"• {sentence}")


def objectives(runs: Sequence[Served]) -> Table:
    """Runs with two objectives side by side, the worse objective's loss first."""
    table = Table(title="Two objectives, one model", title_justify="left", caption_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.algorithm, justify="right")
    rows = {
        "loss of the worse objective": [number(run.worse) for run in runs],
        "loss, left digit": [number(run.loss["left"]) for run in runs],
        "loss, right digit": [number(run.loss["right"]) for run in runs],
        "accuracy, left digit": [percent(run.accuracy["left"]) for run in runs],
        "accuracy, right digit": [percent(run.accuracy["right"]) for run in runs],
        "upload of a member, each round": [size(run.bytes_up) for run in runs],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    table.caption = (
        "The task divides the right digit's loss by ten; the table shows both as cross-entropies. scalarised adds up "
        "the two losses, so that the right one counts a tenth. FSMGDA and FedCMOO scale the gradients of both to one "
        "length. Each has the better of the server's rates 1 and 2."
    )
    return table
