"""What people see: tables that fit 100 columns, digests abbreviated, times in the local zone, cosines as a heat map."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from federation.v1.admin_pb2 import (
    Administrator,
    Client,
    GetRoundResponse,
    ObjectiveResult,
    Participation,
    PhaseProgress,
    RoundSummary,
    Run,
    Serving,
    Token,
    Update,
)
from federation.v1.common_pb2 import AssignmentState, PhaseKind
from fedpareto.cli import participation
from fedpareto.cli.document import name_of

WIDTH = 100  # columns
DIGITS = 12  # of a digest
NAME_WIDTH = 24  # columns; a longer name ends in an ellipsis
SCORED = ("test", "validation", "train")  # what is shown of a round: the first of them that was measured
MATRIX_ROWS = 24  # of the indicator matrix; more clients are put together by what they serve

# A round's numbers, line by line; what an algorithm adds of its own comes last.
_MEASURED = {
    "accuracy": (
        *(f"accuracy/{name}" for name in ("mean", "std", "variance", "worst5", "best5", "p5", "p95", "best", "jain")),
        "backdoor",
        "evaluated",
    ),
    "loss": ("loss/train", "loss/validation", "loss/test", "loss/jain", "improved"),
    "direction": ("direction_norm", "stationarity", "stationarity/relative", "descent_min", "descent_share"),
    "conflicts": ("conflicts", "conflict_depth", "conflict_mean"),
    "weights": ("entropy", "step/rate"),
    "objectives": (
        *(f"objective/{name}" for name in ("conflicts", "conflict_depth", "conflict_mean", "stationarity")),
        "preference/divergence",
    ),
}
_ELSEWHERE = ("accuracy/worst", "loss/worst", "bytes/up", "bytes/refused", "bytes/down", "stationary")
_OF_OBJECTIVES = ("weight/", "accuracy/objective/", *(f"loss/{split}/" for split in SCORED))
_COUNTS = ("conflicts", "evaluated", "iterations", "objective/conflicts")
_WORDS = {  # where the name says too little without its group
    "stationarity/relative": "relative",
    "direction_norm": "norm",
    "conflicts": "pairs",
    "conflict_depth": "least cosine",
    "conflict_mean": "mean cosine",
    "descent_min": "least cosine with an update",
    "descent_share": "not against it",
    "step/rate": "server's rate",
    "objective/conflicts": "pairs in conflict",
    "objective/conflict_depth": "least cosine",
    "objective/conflict_mean": "mean cosine of these",
    "objective/stationarity": "length of their weighted sum",
    "preference/divergence": "divergence from the preference",
}
_STATIONARY = (
    "No direction is good for every participant, so the model stayed as it was. Either it is Pareto-stationary for "
    "them, or one of them brings the others to a standstill on purpose."
)
_STANDSTILL = 0.5  # of all the weight: about what a client needs that cancels the others

_GOOD = {"COMPLETED", "ACTIVE", "FULFILLED", "RUNNING", "STEPPED"}
_BAD = {"FAILED", "REVOKED", "REJECTED", "SKIPPED", "EXPIRED"}


def console(*, stderr: bool = False) -> Console:
    """A console at most 100 columns wide; where there is no terminal, exactly so wide. A string is text, not markup."""
    found = Console(stderr=stderr)
    width = min(found.width, WIDTH) if found.is_terminal else WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def short(digest: str) -> str:
    """The first digits of a digest or a key id."""
    return digest.rpartition(":")[2][:DIGITS]


def when(message: Client | Token | Administrator | Run | Update | RoundSummary | PhaseProgress, field: str) -> str:
    """A time in the local zone, to the second; a dash when it is not set."""
    if not message.HasField(field):  # type: ignore[arg-type]
        return "–"
    return local(getattr(message, field))


def local(timestamp: Timestamp) -> str:
    """A time in the local zone, to the second, with the zone's name."""
    try:
        return timestamp.ToDatetime(UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError):
        return "not a time"


def number(value: float, digits: int = 3) -> str:
    """A number with so many decimals, in scientific notation where those would hide it; a dash when it is unknown."""
    if not math.isfinite(value):
        return "–"
    if value != 0 and not 10.0**-digits <= abs(value) < 1e5:
        return f"{value:.{max(digits - 1, 1)}e}"
    return f"{value:.{digits}f}"


def percent(value: float) -> str:
    """A share in [0, 1] as a percentage."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else "–"


def size(count: float) -> str:
    """Bytes in decimal units; a dash when they are unknown."""
    if not math.isfinite(count):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


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
        if not (several and name.startswith(_OF_OBJECTIVES)):
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


def rounds(items: Sequence[RoundSummary]) -> RenderableType:
    """The rounds of a run."""
    table = new_table(
        ">round", "state", ">replies", ">refused", ">mean", ">worst\n5 %", "worst client", ">improved",
        ">conflicts", ">||d||", ">up", ">time",
        gap=1,
    )  # fmt: skip
    table.columns[6].overflow, table.columns[6].no_wrap, table.columns[6].max_width = "ellipsis", True, 13
    notes = []
    for summary in items:
        table.add_row(
            str(summary.round),
            state(name_of(summary, "state")),
            f"{summary.accepted}/{summary.asked}",
            str(summary.rejected),
            percent(metric(summary, "accuracy/mean")),
            percent(metric(summary, "accuracy/worst5")),
            summary.worst_client or "–",
            percent(metric(summary, "improved")),
            _count(metric(summary, "conflicts")),
            number(metric(summary, "direction_norm")),
            size(metric(summary, "bytes/up")),
            f"{summary.seconds:.2f} s" if math.isfinite(summary.seconds) else "–",
        )
        if summary.reason:
            more = ": no direction is good for every participant" if metric(summary, "stationary") == 1 else ""
            notes.append(Text(f"round {summary.round}: {summary.reason}{more}"))
    return Group(table, *notes) if items else Text("no rounds yet")


def round_(item: GetRoundResponse) -> RenderableType:
    """One round, whole."""
    summary = item.summary
    head = Table.grid(padding=(0, 2))
    head.add_row("round", Text(f"{summary.round} of {item.run.name} ({item.run.run_id})"))
    line = state(name_of(summary, "state"))
    head.add_row("state", line.append(f"  {summary.reason}", style="default") if summary.reason else line)
    if metric(summary, "stationary") == 1:
        head.add_row("", Text(" ".join([_STATIONARY, *_suspects(item)]), style="yellow"))
    took = f"took {summary.seconds:.2f} s" if math.isfinite(summary.seconds) else "not over yet"
    head.add_row("began", f"{when(summary, 'started')}, {took}")
    head.add_row("replies", _replies(summary))
    sent = ", ".join(
        f"{size(summary.metrics[name])} {words}"
        for name, words in (("bytes/up", "up"), ("bytes/refused", "of it refused"), ("bytes/down", "down"))
        if name in summary.metrics
    )
    head.add_row("bytes", sent or "–")
    result = short(summary.result_model) or "(no step)"
    head.add_row("model", f"{short(summary.base_model)} → {result}")
    if item.HasField("step"):
        head.add_row("step", f"signed by the coordinator's key {short(item.step.key_id.hex())}")
    for phase in item.phases:
        head.add_row(f"phase {phase.phase}", _phase(phase))
    for label, words in _measured(summary):
        head.add_row(label, words)
    parts: list[RenderableType] = [head, Text()]
    if item.HasField("objectives"):
        parts += [*_objectives(item), Text()]
    parts.append(participations(item))
    if item.gram_clients:
        parts += [
            Text("\ncosines between the accepted updates", style="bold"),
            heat_map(item.gram_clients, item.cosines),
        ]
    return Group(*parts)


def _phase(phase: PhaseProgress) -> str:
    words = f"{name_of(phase, 'kind')}: {phase.replied} of {phase.asked} replied"
    if phase.bytes_up:
        words += f", {size(phase.bytes_up)}"
    if phase.HasField("started"):
        words += f", from {local(phase.started)[11:]}"
    if phase.HasField("ended"):
        return f"{words} for {seconds(phase):.2f} s"
    return f"{words}, deadline {when(phase, 'deadline')}"


def seconds(phase: PhaseProgress) -> float:
    """How long a phase lasted; NaN while it does."""
    if not (phase.HasField("started") and phase.HasField("ended")):
        return math.nan
    begun, ended = (at.seconds + at.nanos / 1e9 for at in (phase.started, phase.ended))
    return ended - begun


def _objectives(item: GetRoundResponse) -> Iterator[RenderableType]:
    """What the round knew of its objectives, and what its clients scored in each after it."""
    found, summary = item.objectives, item.summary
    columns: list[tuple[str, Callable[[ObjectiveResult], str]]] = [
        (">weight", lambda one: number(one.weight)),
        (">loss\nbefore", lambda one: number(one.loss)),
    ]
    split = next(
        (split for split in SCORED if any(f"loss/{split}/{one.name}" in summary.metrics for one in found.results)), ""
    )
    if split:
        name = f">{split} loss\nafter it"
        columns.append((name, lambda one: number(metric(summary, f"loss/{split}/{one.name}"))))
    if any(f"accuracy/objective/{one.name}" in summary.metrics for one in found.results):
        columns.append((">accuracy\nafter it", lambda one: percent(metric(summary, f"accuracy/objective/{one.name}"))))
    columns.append((">clients", lambda one: str(one.clients)))
    if any(one.left_out for one in found.results):
        columns.append(("left out", lambda one: one.left_out))
    table = new_table("objective", *(title for title, _ in columns))
    for result in found.results:
        table.add_row(result.name, *(words(result) for _, words in columns))
    yield table
    if found.mode:
        yield Text(f"weights: {found.mode}")
    for note in found.notes:
        yield Text(note, style="yellow")
    if found.cosines:
        yield Text("\ncosines between the objectives", style="bold")
        yield heat_map([result.name for result in found.results], found.cosines)


def accepted(phases: Iterable[PhaseProgress], part: Participation) -> bool:
    """Whether a client's update was accepted: it may have answered an earlier phase of the round, and no more."""
    trains = {phase.phase for phase in phases if phase.kind == PhaseKind.PHASE_KIND_TRAIN}
    return part.state == AssignmentState.ASSIGNMENT_STATE_FULFILLED and not trains.isdisjoint(part.answered)


def _measured(summary: RoundSummary) -> Iterator[tuple[str, str]]:
    """The numbers of a round in lines, each with its label."""
    if summary.worst_client:
        accuracy, loss = metric(summary, "accuracy/worst"), metric(summary, "loss/worst")
        value = f"accuracy {percent(accuracy)}" if math.isfinite(accuracy) else f"loss {number(loss)}"
        yield "worst client", f"{summary.worst_client}: {value}"
    known = {name for names in _MEASURED.values() for name in names} | set(_ELSEWHERE)
    own = {name for name in set(summary.metrics) - known if not name.startswith(_OF_OBJECTIVES)}
    groups = {**_MEASURED, "algorithm": tuple(sorted(own))}
    for label, names in groups.items():
        found = [_named(name, summary.metrics[name]) for name in names if name in summary.metrics]
        if found:
            yield label, ", ".join(found)


def _named(name: str, value: float) -> str:
    words = _WORDS.get(name, name.rpartition("/")[2].replace("_", " "))
    return f"{words} {_count(value) if name in _COUNTS else number(value)}"


def _suspects(item: GetRoundResponse) -> list[str]:
    """Who may have brought a round to a standstill: an update without length, or about half of all the weight."""
    parts = [part for part in item.participations if math.isfinite(part.weight)]
    still = [part.client_id for part in parts if part.update_norm == 0]
    heavy = [part for part in parts if part.weight >= _STANDSTILL - 1e-3 and len(parts) > 2]
    words = [f"{name} sent an update of length 0." for name in still]
    words += [
        f"{part.client_id} alone got {percent(part.weight)} of the weight: look at its cosines." for part in heavy
    ]
    return words


def _count(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else "–"


def _replies(summary: RoundSummary) -> str:
    return f"{summary.asked} asked, {summary.accepted} accepted, {summary.rejected} rejected, {summary.missing} missing"


def participations(item: GetRoundResponse) -> RenderableType:
    """Every client's part in a round; below, why what did not count did not."""
    table = new_table(
        "client", "update", ">samples", ">loss", ">norm", ">lambda", ">cosine", "signed by", ">bytes", ">time", ">test",
        gap=1,
    )  # fmt: skip
    notes = []
    for part in item.participations:
        name = name_of(part, "state")
        word = ("accepted" if accepted(item.phases, part) else "answered") if name == "FULFILLED" else name.lower()
        table.add_row(
            part.client_id,
            Text(word, style=state(name).style),
            str(part.samples) if part.samples else "–",
            number(part.loss_before),
            number(part.update_norm),
            number(part.weight),
            number(part.cosine),
            f"{part.key_id[:8]} ✓" if part.key_id else "–",
            size(part.payload_bytes),
            f"{part.seconds:.2f} s" if math.isfinite(part.seconds) else "–",
            percent(part.evaluation.get("test/accuracy", math.nan)),
        )
        if part.reason:
            notes.append(Text(f"{part.client_id}: {part.reason}"))
    return Group(table, *notes)


def heat_map(names: Sequence[str], cosines: Sequence[float]) -> RenderableType:
    """Cosines (m, m), row after row, as many numbers as fit, and what the colours say."""
    m = len(names)
    if not m or len(cosines) != m * m:
        return Text(f"{len(cosines)} cosines are not those of {m} rows")
    label = min(max(len(name) for name in names), NAME_WIDTH)
    cell = next((width for width in (6, 4, 2) if label + 5 + width * m <= WIDTH), 0)
    if cell == 0:
        return Text(f"{m} x {m} cosines do not fit a terminal; see them with --json")
    lines = [Text(" " * (label + 5) + "".join(f"{j + 1:>{cell}}" if cell > 2 else "" for j in range(m)))]
    for i, name in enumerate(names):
        line = Text(f"{i + 1:>3}  {name[:label]:<{label}}")
        for j in range(m):
            value = cosines[i * m + j]
            line.append(_number_in(value, cell), style=_heat(value))
        lines.append(line)
    return Group(*lines, Text(), _legend())


def _legend() -> Text:
    line = Text("blue: against each other  ")
    for value in (-1.0, 0.0, 1.0):
        line.append(f"{value:^6g}", style=_heat(value))
    return line.append("  red: together")


def _number_in(value: float, cell: int) -> str:
    if cell == 2 or not math.isfinite(value):
        return " " * cell
    if cell == 4:
        return f"{round(100 * value):>4d}"
    return f"{value:>6.2f}"


def _heat(value: float) -> str:
    """Blue for -1, white for 0, red for 1; black on it."""
    if not math.isfinite(value):
        return "default"
    fade = round(255 * (1 - min(abs(value), 1.0) * 0.8))
    red, green, blue = (255, fade, fade) if value >= 0 else (fade, fade, 255)
    return f"#000000 on #{red:02x}{green:02x}{blue:02x}"


def updates(items: Iterable[Update]) -> RenderableType:
    """Updates as they were received."""
    table = new_table(">round", ">phase", "client", "counts", "payload", ">bytes", "received", "envelope", "key")
    for update in items:
        verdict = Text("yes", style="green") if update.accepted else Text(f"no: {update.reason}", style="red")
        table.add_row(
            str(update.round),
            str(update.phase),
            update.client_id,
            verdict,
            short(update.payload) or "–",
            size(update.payload_bytes),
            when(update, "received"),
            short(update.envelope_digest),
            update.envelope.key_id.hex()[:8],
        )
    return table if table.row_count else Text("no updates")
