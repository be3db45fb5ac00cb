"""What people see: tables that fit 100 columns, digests abbreviated, times in the local zone, cosines as a heat map."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from federation.v1.admin_pb2 import RoundSummary, Run, Serving
from fedpareto.cli import participation
from fedpareto.formatting import DIGITS, number, percent, short, when
from fedpareto.messages import name_of

WIDTH = 100  # columns
NAME_WIDTH = 24  # columns; a longer name ends in an ellipsis
SCORED = ("test", "validation", "train")  # what is shown of a round: the first of them that was measured
OF_OBJECTIVES = ("weight/", "accuracy/objective/", *(f"loss/{split}/" for split in SCORED))  # of one objective each
MATRIX_ROWS = 24  # of the indicator matrix; more clients are put together by what they serve

_GOOD = {"COMPLETED", "ACTIVE", "FULFILLED", "RUNNING", "STEPPED"}
_BAD = {"FAILED", "REVOKED", "REJECTED", "SKIPPED", "EXPIRED"}


def console(*, stderr: bool = False) -> Console:
    """A console at most 100 columns wide; where there is no terminal, exactly so wide. A string is text, not markup."""
    found = Console(stderr=stderr)
    width = min(found.width, WIDTH) if found.is_terminal else WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def state(name: str) -> Text:
    """A state, coloured by how it went."""
    return Text(name, style="green" if name in _GOOD else "red" if name in _BAD else "yellow")


def metric(summary: RoundSummary, name: str) -> float:
    """A number of a round, NaN when it is not known."""
    return summary.metrics.get(name, math.nan)


def new_table(*columns: str, gap: int = 2) -> Table:
    """A table; a column whose name begins with `>` is aligned to the right; the first one keeps to a line."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(
            column.lstrip(">"),
            justify=justify,
            overflow="ellipsis" if index == 0 else "fold",
            no_wrap=index == 0,
            max_width=NAME_WIDTH if index == 0 else None,
        )
    return table


def runs(items: Iterable[Run]) -> RenderableType:
    """The runs."""
    table = new_table("run", "name", "state", "algorithm", ">rounds", ">replied", ">mean", ">worst 5 %", "created")
    listed = list(items)
    for run in listed:
        asked = participation.asked_last(run)
        table.add_row(
            run.run_id[:DIGITS],
            run.name,
            state(name_of(run, "state")),
            run.algorithm,
            f"{run.rounds_done}/{run.rounds_total}",
            f"{len(asked) - len(participation.silent(run))}/{len(asked)}" if asked else "–",
            percent(metric(run.latest, "accuracy/mean")),
            percent(metric(run.latest, "accuracy/worst5")),
            when(run, "created")[:16],
        )
    if not table.row_count:
        return Text("no runs yet: submit one with `fedpareto admin submit SPEC.toml`")
    return Group(table, participation.notes(listed))


def run(item: Run) -> RenderableType:
    """One run."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("run", item.run_id)
    grid.add_row("name", item.name)
    line = state(name_of(item, "state"))
    grid.add_row("state", line.append(f"  {item.reason}", style="default") if item.reason else line)
    grid.add_row("algorithm", item.algorithm)
    grid.add_row("task", item.task)
    grid.add_row("rounds", f"{item.rounds_done} of {item.rounds_total}")
    from coordinator.aggregation.registry import algorithms  # noqa: PLC0415 - NumPy is for who looks at a run

    kind = algorithms().get(item.algorithm)
    mean = ", the mean of the models of all rounds" if kind is not None and kind.averages else ""
    grid.add_row("model", f"{short(item.model)}  ({item.parameters:,} parameters{mean})")
    for field in ("created", "started", "ended"):
        grid.add_row(field, when(item, field))
    several = len(item.objectives) > 1
    for name, value in sorted(item.latest.metrics.items()):
        if not (several and name.startswith(OF_OBJECTIVES)):
            grid.add_row(f"round {item.latest.round}", f"{name} = {number(value)}")
    parts: list[RenderableType] = [grid]
    if several:
        if item.HasField("latest"):
            parts += [Text(f"\nobjectives after round {item.latest.round}", style="bold"), _scores(item)]
        parts += [Text("\nwho serves which objective", style="bold"), indicator(item.objectives, item.serving)]
    if item.members:
        parts += [Text("\nmembers in the rounds that have ended", style="bold"), participation.table(item.members)]
        parts += participation.warnings(item)
    if item.spec:
        parts += [Text("\nspecification", style="bold"), Text(item.spec.rstrip())]
    return Group(*parts)


def _scores(item: Run) -> RenderableType:
    """What the last evaluated round came to, objective by objective."""
    columns: list[tuple[str, str, Callable[[float], str]]] = [("weight", "weight/", number)]
    columns += [(f"{split} loss", f"loss/{split}/", number) for split in ("train", "validation", "test")]
    columns.append(("accuracy", "accuracy/objective/", percent))
    columns = [one for one in columns if any(f"{one[1]}{name}" in item.latest.metrics for name in item.objectives)]
    table = new_table("objective", *(f">{title}" for title, _, _ in columns))
    for name in item.objectives:
        table.add_row(name, *(words(metric(item.latest, f"{prefix}{name}")) for _, prefix, words in columns))
    return table


def indicator(objectives: Sequence[str], serving: Sequence[Serving]) -> RenderableType:
    """The indicator matrix: a row for each client, or for all that serve the same where they are many."""
    if not serving:
        return Text("no active client offers this task")
    groups: dict[tuple[bool, ...], list[str]] = {}
    for row in serving:
        groups.setdefault(tuple(name in row.objectives for name in objectives), []).append(row.client_id)
    if len(groups) == 1 and all(next(iter(groups))):
        return Text(f"each of the {len(serving)} clients serves each of the {len(objectives)}: {', '.join(objectives)}")
    if len(serving) <= MATRIX_ROWS:
        rows = [(client, pattern) for pattern, names in groups.items() for client in names]
        rows.sort()
    else:
        rows = [(_together(names), pattern) for pattern, names in groups.items()]
    wide = sum(max(len(name), 2) + 2 for name in objectives) + NAME_WIDTH + 2 <= WIDTH
    heads = list(objectives) if wide else [str(at + 1) for at in range(len(objectives))]
    table = new_table("client", *heads, gap=2 if wide else 1)
    for label, pattern in rows:
        table.add_row(label, *("●" if serves else "·" for serves in pattern))
    counts = [sum(len(names) for pattern, names in groups.items() if pattern[at]) for at in range(len(objectives))]
    nobody = [name for name, count in zip(objectives, counts, strict=True) if not count]
    parts: list[RenderableType] = [table]
    if wide or max(counts) < 10:
        table.add_row("clients", *map(str, counts), style="bold")
    else:
        parts.append(Text(f"clients for an objective: {min(counts)} to {max(counts)}"))
    if not wide:
        parts.append(Text(", ".join(f"{at + 1} {name}" for at, name in enumerate(objectives))))
    if nobody:
        parts.append(Text(f"nobody serves {', '.join(nobody)}", style="yellow"))
    return Group(*parts)


def _together(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)}: {names[0]}, …"
