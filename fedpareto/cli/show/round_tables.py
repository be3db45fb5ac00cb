"""Tables of rounds, and one round with its numbers and every member's part."""

import math
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import DecodeError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from federation.record.metric_definitions import DEFINITIONS, EVALUATION, SCORED, definition, in_groups, pattern
from federation.record.results import accepted
from federation.text import escaped
from federation.v1.admin_pb2 import GetRoundResponse, ObjectiveResult, PhaseProgress, RoundSummary
from federation.v1.common_pb2 import StepManifest
from federation.v1.secure_pb2 import SecureTerms
from fedpareto.admin_messages import duration, name_of
from fedpareto.cli.show import envelope_lines
from fedpareto.cli.show.heat_map import heat_map
from fedpareto.cli.show.metric_tables import members, own_metrics
from fedpareto.cli.show.round_lines import STOP
from fedpareto.cli.show.tables import disclosed, new_table, state, state_of
from fedpareto.formatting import (
    NOT_DISCLOSED,
    PERSONALISED,
    UNKNOWN,
    format_of,
    local,
    natural,
    number,
    of_member,
    percent,
    recorded,
    seconds,
    short,
    size,
    when,
)
from fedpareto.run_names import EVALUATE, STATISTICS
from fedpareto.series import equals, metric, own_names

_COLUMNS = ("accuracy/mean", "accuracy/worst5", "improved", "conflicts", "direction_norm", "bytes/up")  # of `rounds`
_WORST = {"accuracy/worst", "loss/worst"}
_MODE, _ALARM = 20, 300  # characters of words in signed steps
_STATIONARY = (
    "No direction is good for every participant, so the model stayed as it was. Either it is Pareto-stationary for "
    "them, or one of them stops the others on purpose."
)
_STANDSTILL = 0.5  # of all the weight: about the share of a client that cancels the others


def rounds(items: Sequence[RoundSummary], stop: str = "") -> RenderableType:
    """The rounds of a run; `stop` is the title of the value by which it is stopped, empty if by none."""
    columns = [f">{definition(name).title}".replace(" ", "\n", 1) for name in _COLUMNS]
    names = [*_COLUMNS]
    if stop:
        columns.append(f">{stop}".replace(" (", "\n").rstrip(")"))
        names.append(STOP)
    titles = [">round", "state", ">replies", ">refused", *columns, "worst member", ">time"]
    rows: list[list[str | Text]] = []
    for summary in items:
        cells: list[str | Text] = [
            str(summary.round),
            state(name_of(summary, "state")),
            f"{summary.accepted}/{summary.asked}",
            str(summary.refused),
            *(recorded(name, summary.metrics, summary.undisclosed) for name in names),
            summary.worst_client or (NOT_DISCLOSED if _WORST & {*summary.undisclosed} else UNKNOWN),
            seconds(summary.seconds),
        ]
        rows.append(cells)
    if not items:
        return Text("no rounds yet")
    table, hidden = disclosed(titles, rows, gap=1)
    for worst in (column for column in table.columns if column.header == "worst member"):
        worst.overflow, worst.no_wrap, worst.max_width = "ellipsis", True, 13
    remarked = [summary for summary in items if summary.reason]
    notes = [Text(f"{group.rounds}: {group.said}") for group in equals(remarked, lambda item: item.round, _remark)]
    return Group(table, *notes, *([hidden] if hidden else []))


def _remark(summary: RoundSummary) -> str:
    more = ": no direction is good for every participant" if metric(summary, "stationary") == 1 else ""
    return f"{summary.reason}{more}"


def round_(item: GetRoundResponse) -> RenderableType:
    """One round, whole."""
    summary = item.summary
    head = Table.grid(padding=(0, 2))
    of = f"{item.run.run_id}, {when(item.run, 'created')[:16]}"
    head.add_row("round", Text(f"{summary.round} of {item.run.name} ({of})"))
    head.add_row("state", state_of(summary))
    if metric(summary, "stationary") == 1:
        head.add_row("", Text(" ".join([_STATIONARY, *_suspects(item)]), style="yellow"))
    took = f"took {summary.seconds:.2f} s" if math.isfinite(summary.seconds) else "not over yet"
    head.add_row("began", f"{when(summary, 'started')}, {took}")
    counts = ("asked", "accepted", "refused", "missing")
    head.add_row("replies", ", ".join(f"{getattr(summary, name)} {name}" for name in counts))
    if item.run.algorithm == EVALUATE:
        head.add_row("model", f"{short(summary.base_model)}, measured and not changed")
    elif item.run.algorithm == STATISTICS:
        head.add_row("data", f"fedpareto admin statistics {item.run.run_id}" if item.document else "not described")
    else:
        head.add_row("model", f"{short(summary.base_model)} → {short(summary.result_model) or '(no step)'}")
    if item.HasField("step_check"):
        head.add_row("step", envelope_lines.step(item))
    if item.step_check.verified:
        for code in _step(item).code:
            head.add_row(code.kind, envelope_lines.code(code))
    if item.participations:
        head.add_row("envelopes", envelope_lines.tally(item.participations))
    for void in item.voided:
        named = ", ".join(f"{client.client_id} ({client.reason})" for client in void.named)
        outcome = f"{'paused' if void.paused else 'voided'}: {void.reason}" + (f"; named: {named}" if named else "")
        head.add_row(f"attempt {void.attempt}", Text(outcome))
    for label, text in _private(item):
        head.add_row(label, text)
    for client in item.not_asked:
        head.add_row("not asked", Text(f"{client.client_id} {client.reason}", style="yellow"))
    for phase in item.phases:
        head.add_row(f"phase {phase.phase}", _phase(phase))
    if item.run.measured == "personalised":
        head.add_row("metrics", PERSONALISED)
    for label, words in _measured(summary):
        head.add_row(label, words)
    parts: list[RenderableType] = [head, Text()]
    if item.HasField("objectives"):
        parts += [*_objectives(item), Text()]
    if own_names(summary.metrics):
        parts += [own_metrics(summary), Text()]
    parts.append(participations(item))
    if own := list(members(item.participations)):
        parts += [Text("\nthe members' own metrics", style="bold"), *own]
    if item.gram_clients:
        title = Text("\ncosines between the accepted updates", style="bold")
        parts += [title, heat_map(item.gram_clients, item.cosines)]
    return Group(*parts)


def _step(item: GetRoundResponse) -> StepManifest:
    """The step; an empty one when the manifest cannot be read, which a coordinator may send."""
    try:
        return StepManifest.FromString(item.step.manifest)
    except DecodeError:
        return StepManifest()


def _private(item: GetRoundResponse) -> Iterator[tuple[str, Text]]:
    """The results of the sessions of a private round, and their alarms."""
    for settled in _step(item).secure:
        try:
            terms = SecureTerms.FromString(settled.terms)
            mode = f"{escaped(terms.mode, _MODE)}, blur {terms.blur:g}"
        except DecodeError:
            mode = UNKNOWN
        description, ready_members = (
            f"{mode}, {escaped(settled.purpose, _MODE)}",
            f"{len(settled.ready)} members that were ready",
        )
        summed = f"{len(settled.survivors)} of {ready_members} are in the sum"
        yield (
            "private",
            Text(f"{description}: {summed if settled.coefficients else f'{ready_members}, and nothing to sum'}"),
        )
        for alarm in settled.alarms:
            yield "alarm", Text(escaped(alarm, _ALARM))


def _phase(phase: PhaseProgress) -> str:
    text = f"{phase.kind}: {phase.replied} of {phase.asked} replied"
    if phase.bytes_up:
        text += f", {size(phase.bytes_up)}"
    if phase.HasField("started"):
        text += f", from {local(phase.started)[11:]}"
    if phase.HasField("ended"):
        return f"{text} for {duration(phase):.2f} s"
    return f"{text}, deadline {when(phase, 'deadline')}"


def _objectives(item: GetRoundResponse) -> Iterator[RenderableType]:
    """The objectives of a round: weights, losses and members, and the scores after it."""
    objectives, summary = item.objectives, item.summary
    columns: list[tuple[str, Callable[[ObjectiveResult], str]]] = [
        (">weight", lambda result: number(result.weight)),
        (">loss\nbefore", lambda result: number(result.loss)),
    ]
    names = [result.name for result in objectives.results]
    split = next((split for split in SCORED if any(f"loss/{split}/{name}" in summary.metrics for name in names)), None)
    if split:
        title = f">{split} loss\nafter it"
        columns.append((title, lambda result: number(metric(summary, f"loss/{split}/{result.name}"))))
    if any(f"accuracy/objective/{name}" in summary.metrics for name in names):
        columns.append(
            (">accuracy\nafter it", lambda result: percent(metric(summary, f"accuracy/objective/{result.name}")))
        )
    columns.append((">members", lambda result: str(result.clients)))
    if any(result.left_out for result in objectives.results):
        columns.append(("left out", lambda result: result.left_out))
    table = new_table("objective", *(title for title, _ in columns))
    for result in objectives.results:
        table.add_row(result.name, *(text_of(result) for _, text_of in columns))
    yield table
    if objectives.mode:
        yield Text(f"weights: {objectives.mode}")
    for note in objectives.notes:
        yield Text(note, style="yellow")
    if objectives.cosines:
        yield Text("\ncosines between the objectives", style="bold")
        yield heat_map(names, objectives.cosines)


def _measured(summary: RoundSummary) -> Iterator[tuple[str, str]]:
    """The numbers of a round in lines, each with its label."""
    if summary.worst_client:
        accuracy, loss = metric(summary, "accuracy/worst"), metric(summary, "loss/worst")
        value = f"accuracy {percent(accuracy)}" if math.isfinite(accuracy) else f"loss {number(loss)}"
        yield "worst member", f"{summary.worst_client}: {value}"
    for group, names in in_groups(summary.metrics).items():
        yield group, ", ".join(f"{definition(name).label} {format_of(name)(summary.metrics[name])}" for name in names)
    hidden = [label for name in summary.undisclosed if (label := _label(name))]
    if hidden:
        yield NOT_DISCLOSED, ", ".join(dict.fromkeys(hidden))


def _label(name: str) -> str:
    """The name of a hidden number in words; empty for those of members, which the table below shows."""
    return "" if pattern(name) not in DEFINITIONS else name


def _suspects(item: GetRoundResponse) -> list[str]:
    """The members that may have stopped a round: those with an update of length 0 or about half of all the weight."""
    parts = [part for part in item.participations if math.isfinite(part.weight)]
    still = [f"{part.client_id} sent an update of length 0." for part in parts if part.update_norm == 0]
    return still + [
        f"{part.client_id} alone got {percent(part.weight)} of the weight: look at its cosines."
        for part in parts
        if part.weight >= _STANDSTILL - 1e-3 and len(parts) > 2
    ]


def participations(item: GetRoundResponse) -> RenderableType:
    """Every member's part in a round; below, the reasons of replies that do not count."""
    titles = ["member", "update", ">samples", ">loss", ">norm", ">lambda", ">cosine", "signed by", ">bytes", ">time"]
    titles.append(">test")
    rows: list[list[str | Text]] = []
    notes = []
    private, undisclosed = any(part.HasField("privacy") for part in item.participations), item.summary.undisclosed
    if private:
        titles.append(">epsilon")
    for part in sorted(item.participations, key=lambda part: natural(part.client_id)):
        name = name_of(part, "state")
        outcome = ("accepted" if accepted(item.phases, part) else "answered") if name == "FULFILLED" else name.lower()
        shown = {"samples": str(part.samples) if part.samples else UNKNOWN}
        shown |= {field: number(getattr(part, field)) for field in ("loss_before", "update_norm", "weight", "cosine")}
        cells: list[str | Text] = [
            part.client_id,
            Text(outcome, style=state(name).style),
            *(of_member(text, field, undisclosed if outcome == "accepted" else ()) for field, text in shown.items()),
            envelope_lines.signed_by(part),
            size(part.payload_bytes),
            seconds(part.seconds),
            of_member(percent(part.evaluation.get("test/accuracy", math.nan)), EVALUATION, undisclosed),
            *([number(part.privacy.epsilon) if part.HasField("privacy") else UNKNOWN] if private else []),
        ]
        rows.append(cells)
        if part.reason:
            notes.append(Text(f"{part.client_id}: {part.reason}"))
    if marked := [part.client_id for part in item.participations if part.unrepeatable]:
        notes.append(Text(f"The trainer of {', '.join(marked)} cannot repeat its work with the same result."))
    notes += envelope_lines.doubts([(part.client_id, part.envelopes) for part in item.participations])
    table, hidden = disclosed(titles, rows, gap=1)
    return Group(table, *([hidden] if hidden else []), *notes)
