"""Tables and runs on a terminal: at most 100 columns, digests abbreviated, times in the local zone."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from federation.record.metric_definitions import DEFINITIONS, OWN, of_objective
from federation.text import counted
from federation.v1.admin_pb2 import (
    AlertKind,
    AlertSeverity,
    Consent,
    GetDiskResponse,
    MemberSummary,
    RoundSummary,
    Run,
    Serving,
)
from fedpareto.admin_messages import epsilon_of_clients, name_of
from fedpareto.cli.show import alert_lines, participation_table
from fedpareto.formatting import (
    DIGITS,
    NOT_DISCLOSED,
    PERSONALISED,
    UNKNOWN,
    natural,
    number,
    percent,
    recorded,
    short,
    size,
    when,
)
from fedpareto.run_names import ENDED, EVALUATE, STATISTICS, RunNames
from fedpareto.series import metric
from fedpareto.turnout import Turnout

WIDTH = 100  # columns
NAME_WIDTH = 24  # columns; a longer name ends in an ellipsis
_NAMES = frozenset({"run", "name", "state", "algorithm", "member", "worst member", "task"})  # columns that hold no text
_NOTICE = AlertSeverity.ALERT_SEVERITY_NOTICE
_USEFUL = 10  # numbers of a round that `admin run` shows without --all
_FIRST_NUMBERS = ("accuracy/mean", "accuracy/worst5", "accuracy/worst", "stop/value", "stop/best")
_LATER_NUMBERS = (
    *("improved", "loss/train", "loss/validation", "loss/test", "loss/worst", "conflicts", "evaluated"),
    *("epsilon/clients", "epsilon/samples", "bytes/up", "bytes/down"),
)
LISTED = 5  # members with failures that a list of runs names for each run
MATRIX_ROWS = 24  # of the indicator matrix; more clients are grouped by the objectives that they serve

_GOOD = {"COMPLETED", "ACTIVE", "ALIVE", "FULFILLED", "RUNNING", "STEPPED"}
_BAD = {"FAILED", "DEAD", "REVOKED", "REFUSED", "SKIPPED", "EXPIRED"}


def console(*, stderr: bool = False) -> Console:
    """A console at most 100 columns wide; where there is no terminal, exactly so wide. A string is text, not markup."""
    new_console = Console(stderr=stderr)
    width = min(new_console.width, WIDTH) if new_console.is_terminal else WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def state(name: str) -> Text:
    """A state, coloured by how it went."""
    return Text(name, style="green" if name in _GOOD else "red" if name in _BAD else "yellow")


def state_of(message: Run | RoundSummary) -> Text:
    """The state of a run or a round, with its reason."""
    text = state(name_of(message, "state"))
    return text.append(f"  {message.reason}", style="default") if message.reason else text


def new_table(*columns: str, gap: int = 2) -> Table:
    """A table; a column whose name begins with `>` is aligned to the right; names are never broken into lines."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    first = table.columns[0]
    first.max_width = NAME_WIDTH
    for named in (first, *(each for each in table.columns if each.header in _NAMES)):
        named.overflow, named.no_wrap = "ellipsis", True
    return table


def disclosed(
    titles: Sequence[str], rows: Sequence[Sequence[str | Text]], *, gap: int = 2
) -> tuple[Table, Text | None]:
    """A table as of `new_table` with rows, without the columns that privacy hides, and a line that names these."""
    columns = [{str(cell) for cell in cells} for cells in zip(*rows, strict=True)]
    hidden = {
        index for index, texts in enumerate(columns) if NOT_DISCLOSED in texts and texts <= {NOT_DISCLOSED, UNKNOWN}
    }
    shown = [index for index in range(len(titles)) if index not in hidden]
    table = new_table(*(titles[index] for index in shown), gap=gap)
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    names = ", ".join(titles[index].lstrip(">").replace("\n", " ") for index in sorted(hidden))
    return table, Text(f"{NOT_DISCLOSED}: {names}") if names else None


def runs(items: Iterable[Run]) -> RenderableType:
    """The runs."""
    table = new_table("run", "name", "state", "algorithm", ">rounds", ">replied", ">mean", ">worst 5 %", "created")
    listed = list(items)
    for run in listed:
        asked = participation_table.asked_last(run)
        table.add_row(
            run.run_id[:DIGITS],
            run.name,
            state(name_of(run, "state")),
            run.algorithm,
            f"{run.rounds_done}/{run.rounds_total}",
            f"{len(asked) - len(participation_table.silent(run))}/{len(asked)}" if asked else UNKNOWN,
            *(_of_latest(run, name) for name in ("accuracy/mean", "accuracy/worst5")),
            when(run, "created")[:16],
        )
    if not table.row_count:
        return Text("no runs yet: submit one with `fedpareto admin submit SPEC.toml`")
    notes = list(_notes(listed))
    return Group(table, *([Text(), *notes] if notes else []))


def _of_latest(run: Run, name: str) -> str:
    """A number of the last evaluated round. With noise for members nobody evaluates."""
    if run.HasField("client_privacy") and run.rounds_done and not run.HasField("latest"):
        return NOT_DISCLOSED
    return recorded(name, run.latest.metrics, run.latest.undisclosed)


def _notes(items: Sequence[Run]) -> Iterator[Text]:
    """Lines with the reasons why runs do not go on, their alerts, and their members with failures."""
    names = RunNames(items)
    for run in items:
        name = names.named(run.run_id, run.name)
        failing = sorted(
            filter(participation_table.failures, run.members), key=participation_table.failures, reverse=True
        )
        lines = [Text(f"{name}: {name_of(run, 'state')} {run.reason}")] if run.reason else []
        lines += [
            Text(f"{name}: {alert.message}", style="yellow")
            for alert in run.alerts
            if alert.kind != AlertKind.ALERT_KIND_MEMBER_FAILS and alert.severity != _NOTICE
        ]
        lines += [Text(f"{name}: {participation_table.tally(member)}", style="yellow") for member in failing[:LISTED]]
        if more := failing[LISTED:]:
            others = counted(len(more), "more member")
            lines.append(Text(f"{name}: {others} with failures, see `fedpareto admin run {run.run_id}`"))
        yield from lines


def members(summaries: Sequence[MemberSummary]) -> RenderableType:
    """A row for each member: its replies and failures in the rounds that have ended, and the last reason."""
    if not summaries:
        return Text("no round has ended yet")
    always, rare = participation_table.COUNTS[:5], participation_table.COUNTS[5:]
    counts = [*always, *(name for name in rare if any(getattr(member, name) for member in summaries))]
    private = any(member.HasField("epsilon") for member in summaries)
    titles = [*(f">{name.replace('_', ' ')}" for name in counts), *([">epsilon"] if private else [])]
    table = new_table("member", *titles, "last reason")
    for member in sorted(summaries, key=lambda member: natural(member.client_id)):
        reason = (
            f"round {member.last_reason_round}: {participation_table.reason(member)}" if member.last_reason else UNKNOWN
        )
        name_cell = Text(member.client_id, style="yellow" if participation_table.failures(member) else "")
        values = [str(getattr(member, name)) for name in counts]
        if private:
            values.append(number(member.epsilon) if member.HasField("epsilon") else UNKNOWN)
        table.add_row(name_cell, *values, reason)
    return table


def run(item: Run, own: Sequence[RenderableType] = (), *, every: bool = False) -> RenderableType:
    """One run.

    It begins with the members that took no part. `own` are the tables of what its members measured last in the task's
    own metrics; `every` shows all numbers of the last evaluated round in place of the ten most useful ones.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_row("run", item.run_id)
    grid.add_row("name", item.name)
    grid.add_row("state", state_of(item))
    grid.add_row("kind" if item.algorithm in (EVALUATE, STATISTICS) else "algorithm", item.algorithm)
    grid.add_row("task", item.task)
    grid.add_row("rounds", f"{item.rounds_done} of {item.rounds_total}")
    mean = ", the mean of the models of all rounds" if item.averaged else ""
    grid.add_row("model", f"{short(item.model)}  ({item.parameters:,} parameters{mean})")
    for field in ("created", "started", "ended"):
        grid.add_row(field, when(item, field))
    if privacy := epsilon_of_clients(item):
        grid.add_row("privacy", privacy)
    if item.measured == "personalised":
        grid.add_row("metrics", PERSONALISED)
    several = len(item.objectives) > 1
    absent = Turnout.of(item).opening(over=item.state in ENDED)
    parts: list[RenderableType] = [*([Text(absent, style="yellow")] if absent else []), grid]
    if item.members:
        parts += [Text("\nmembers in the rounds that have ended", style="bold"), members(item.members)]
    parts += alert_lines.lines(item.alerts)
    if item.consents:
        parts += [Text("\nmembers that decide on each run", style="bold"), _consents(item.consents)]
    if own:
        parts += [Text(f"\nthe members' own metrics after round {item.latest.round}", style="bold"), *own]
    raw = Table.grid(padding=(0, 2))
    metrics, undisclosed = item.latest.metrics, [name for name in item.latest.undisclosed if name in DEFINITIONS]
    names = [name for name in {*metrics, *undisclosed} if not (several and of_objective(name))]
    shown = sorted(names) if every else _most_useful(names)
    for name in shown:
        raw.add_row(name, recorded(name, metrics, undisclosed))
    if len(names) > len(shown):
        raw.add_row(f"{len(names) - len(shown)} more", "with --all")
    if raw.row_count:
        parts += [Text(f"\nmetrics of round {item.latest.round}", style="bold"), raw]
    if several:
        if item.HasField("latest"):
            parts += [Text(f"\nobjectives after round {item.latest.round}", style="bold"), _scores(item)]
        parts += [Text("\nwho serves which objective", style="bold"), indicator(item.objectives, item.serving)]
    if item.spec:
        parts += [Text("\nspecification", style="bold"), Text(item.spec.rstrip())]
    return Group(*parts)


def _most_useful(names: Collection[str]) -> list[str]:
    """The numbers of a round that a reader asks for first, most important first; at most `_USEFUL`."""
    own = sorted(name for name in names if name.startswith(OWN) and name.endswith(("/mean", "/worst")))
    order = [*_FIRST_NUMBERS, *own, *_LATER_NUMBERS]
    return [name for name in order if name in names][:_USEFUL]


def _consents(items: Iterable[Consent]) -> RenderableType:
    """The answers of members to a run."""
    table = new_table("member", "answer", "since", "signed by", "reason")
    styles = {"accepted": "green", "waiting": "yellow", "refused": "red"}
    for consent in sorted(items, key=lambda consent: natural(consent.client_id)):
        problem = f"not verified because {consent.check.reason}: {consent.check.message}"
        key = Text(f"{consent.check.key_id[:8]} ✓") if consent.check.verified else Text(problem, style="red")
        reason = ": ".join(filter(None, (consent.reason, consent.message)))
        answer = Text(consent.answer, style=styles.get(consent.answer, ""))
        table.add_row(consent.client_id, answer, when(consent, "at")[:16], key, reason)
    return table


def _scores(item: Run) -> RenderableType:
    """The numbers of the last evaluated round for each objective."""
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("weight", "weight/", number),
        *((f"{split} loss", f"loss/{split}/", number) for split in ("train", "validation", "test")),
        ("accuracy", "accuracy/objective/", percent),
    ]
    columns = [
        column for column in columns if any(f"{column[1]}{name}" in item.latest.metrics for name in item.objectives)
    ]
    table = new_table("objective", *(f">{title}" for title, _, _ in columns))
    for name in item.objectives:
        table.add_row(name, *(text_of(metric(item.latest, f"{prefix}{name}")) for _, prefix, text_of in columns))
    return table


def indicator(objectives: Sequence[str], serving: Sequence[Serving]) -> RenderableType:
    """The indicator matrix: a row for each member, or for all members with the same objectives if there are many."""
    if not serving:
        return Text("no active member offers this task")
    groups: dict[tuple[bool, ...], list[str]] = {}
    for row in serving:
        groups.setdefault(tuple(name in row.objectives for name in objectives), []).append(row.client_id)
    if len(groups) == 1 and all(next(iter(groups))):
        return Text(f"each of the {len(serving)} members serves each of the {len(objectives)}: {', '.join(objectives)}")
    if len(serving) <= MATRIX_ROWS:
        rows = [(client, pattern) for pattern, names in groups.items() for client in names]
        rows.sort(key=lambda row: natural(row[0]))
    else:
        labelled = ((f"{len(names)}: {names[0]}, …", names, pattern) for pattern, names in groups.items())
        rows = [(label if len(names) > 1 else names[0], pattern) for label, names, pattern in labelled]
    wide = sum(max(len(name), 2) + 2 for name in objectives) + NAME_WIDTH + 2 <= WIDTH
    titles = list(objectives) if wide else [str(index + 1) for index in range(len(objectives))]
    table = new_table("member", *titles, gap=2 if wide else 1)
    for label, pattern in rows:
        table.add_row(label, *("●" if serves else "·" for serves in pattern))
    counts = [
        sum(len(names) for pattern, names in groups.items() if pattern[index]) for index in range(len(objectives))
    ]
    unserved = [name for name, count in zip(objectives, counts, strict=True) if not count]
    parts: list[RenderableType] = [table]
    if wide or max(counts) < 10:
        table.add_row("members", *map(str, counts), style="bold")
    else:
        parts.append(Text(f"members for an objective: {min(counts)} to {max(counts)}"))
    if not wide:
        parts.append(Text(", ".join(f"{index + 1} {name}" for index, name in enumerate(objectives))))
    if unserved:
        parts.append(Text(f"nobody serves {', '.join(unserved)}", style="yellow"))
    return Group(*parts)


def disk(item: GetDiskResponse, names: RunNames) -> RenderableType:
    """The disk space of the record, of each run and in all; `names` says when runs were submitted."""
    kept = f"each run keeps the last {counted(item.keep_rounds, 'round')}, with the first and the best one"
    free = f"free {size(item.free)}; " if item.HasField("free") else ""
    summary = Text(
        f"models {size(item.models)}, replies {size(item.replies)}, other blobs {size(item.other)}, "
        f"database {size(item.database)}\n"
        f"{free}runs that have not ended will still take about {size(item.needed)}\n"
        f"{kept if item.keep_rounds else 'every round is kept (keep_rounds = 0)'}"
    )
    table = new_table("run", "name", "state", ">models", ">replies", ">still needed", "created")
    for run in item.runs:
        needed = size(run.needed) if run.needed else UNKNOWN
        table.add_row(
            run.run_id[:DIGITS],
            run.name,
            state(name_of(run, "state")),
            size(run.models),
            size(run.replies),
            needed,
            names.submitted(run.run_id) or UNKNOWN,
        )
    return Group(summary, Text(), table) if item.runs else summary
