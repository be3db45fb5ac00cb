"""The figures of the cost of a run: replies, bytes, time; beside other runs of the same task."""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC
from itertools import accumulate

from federation.record.metric_definitions import SCORED
from federation.v1.admin_pb2 import PhaseProgress
from fedpareto.admin_messages import duration
from fedpareto.formatting import UNKNOWN, natural, number, percent, size, some, whole
from fedpareto.run_table import Outcome, RoundLine
from fedpareto.series import known, mean
from fedpareto.web.pages import charts
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.pages.marks import COLOURS
from fedpareto.web.pages.plane import Path, plane
from fedpareto.web.pages.scales import Axis, Format
from fedpareto.web.pages.timeline import TimelineLane, TimelineSpan, timeline
from fedpareto.web.sections.layout import absence, absent, figure, line_figure, over_rounds, recorded, thinned
from fedpareto.web.sections.shown_run import ShownRun

_BARS = 100  # rounds, in the console
_NAMED = 8  # members with one reason
_SHOWN = 24  # rounds of the timeline
_WORDS = 2  # phases of a round whose replies stand beside it
_LOOKS = {
    "train": (0, 0),
    "evaluate": (2, 1),
    "statistics": (2, 1),
    "jacobian": (4, 2),
    "residual": (1, 3),
    "search": (3, 2),
}  # colour and fill


def figures(data: ShownRun, beside: Sequence[ShownRun]) -> Iterator[Html]:
    """Replies and bytes of the run, bytes for each member of all the runs, and the phases of its rounds."""
    runs = [data, *(run for run in beside if not run.alone)]
    yield _replies(data)
    yield _bytes(data)
    if beside:
        yield _for_each_client(runs)
        yield _against_bytes(runs)
    yield _phases(data)


def _replies(data: ShownRun) -> Html:
    title = "Replies, and why some do not count"
    layers = [
        Series(name, [float(getattr(line.summary, name)) for line in data.lines], colour)
        for name, colour in (("accepted", 2), ("refused", 1), ("missing", 4))
    ]
    clients_by_reason: dict[tuple[str, str], list[str]] = {}  # the members of an outcome and reason, once a reply
    for line in data.lines:
        unneeded = {member: (Outcome.NOT_NEEDED, reason) for member, reason in line.unneeded.items()}
        for member, (outcome, reason) in {**line.failed, **unneeded}.items():
            clients_by_reason.setdefault((outcome, reason.partition(":")[0] or UNKNOWN), []).append(member)
    ordered = sorted(clients_by_reason.items(), key=lambda item: -len(item[1]))
    rows = [(*key, some(sorted(set(clients), key=natural), _NAMED), str(len(clients))) for key, clients in ordered]
    caption = (
        "Every update counted." if not rows else "The reasons are in the table; the page of reasons explains each."
    )
    more = (
        "The members that were asked to train, and those that failed before. A refused reply was signed by its member, "
        "has wrong content, and stays in the record. Missing are members that declined, were late or were not needed."
    )
    chart = charts.stacked(*thinned(data, layers, _BARS), Axis("members", whole, low=0.0), alt=title)
    columns = [(layer.name, layer.values, whole) for layer in layers]
    reasons = [table(["what", "reason", "members", "times"], rows, words=3)] if rows else []
    return figure(title, join([chart, *reasons]), caption, over_rounds(data, columns), more=more)


def _bytes(data: ShownRun) -> Html:
    title = "Bytes"
    columns = recorded(data, "bytes/up", "bytes/refused", "bytes/down")
    up, _, down = (values for _, values, _ in columns)
    no_round = "No round of this run has ended."
    total_up, total_down = math.fsum(known(up)), math.fsum(known(down))
    sums = f"{size(total_up)} and {size(total_down)} in all"
    caption = f"Update files that came up and model files that went down: {sums}.{_share(data)}"
    more = (
        "One model is counted for every member that answered and did not have it yet: workers keep the last ones. "
        "Envelopes (about 1 kB each) and TLS come on top. Bytes that were refused are in the table."
    )
    series = [Series("up", up, 0), Series("down", down, 2)]
    axis = Axis("bytes per round", size, low=0.0)
    return line_figure(data, title, no_round, series, axis, caption, columns, more=more)


def _share(data: ShownRun) -> str:
    """A sentence about what one member sends and fetches in a round; empty if that is not known."""
    up, down, model = mean(data.up), mean(data.down), 4.0 * data.run.parameters
    if not (math.isfinite(up) and math.isfinite(down)):
        return ""
    in_models = f" ({up / model:.2f} and {down / model:.2f} models)" if model else ""
    return f" In a round, a member sends {size(up)} and fetches {size(down)}{in_models}."


def _for_each_client(runs: Sequence[ShownRun]) -> Html:
    title = "Bytes for each member in a round"
    if not known(runs[0].up):
        return absent(title, absence(runs[0], "No round of this run has ended.", "weight"))
    rows: list[tuple[str, ...]] = []
    for run in runs:
        up, down = mean(run.up), mean(run.down)
        model = 4.0 * run.run.parameters
        models = [f"{count / model:.2f}" if model and math.isfinite(count) else UNKNOWN for count in (up, down)]
        total = size(math.fsum(known(run.metric("bytes/up"))))
        rows.append((run.label, run.run.algorithm, size(up), models[0], size(down), models[1], total))
    caption = "What a member sends and fetches in a round in which it takes part, on average over the rounds."
    more = (
        "In the table also in models, of 4 bytes for each parameter. Training on one weighted sum of the objectives "
        "sends one model, whatever the number of objectives, and a sketch of the gradients if the algorithm asks for "
        "one; training for each objective sends as many models as the member serves."
    )
    columns = ["run", "algorithm", "up", "in models", "down", "in models", "up, all rounds and members"]
    caption = tag("figcaption", f"{caption} {more}")
    return tag("figure", tag("h3", title), table(columns, rows, words=2), caption, class_="wide")


def _against_bytes(runs: Sequence[ShownRun]) -> Html:
    """The accuracy or loss of each run against the bytes that its members sent."""
    title = "Progress against uploaded bytes"
    measures = {"accuracy/mean": "mean accuracy", **{f"loss/{split}": f"mean {split} loss" for split in SCORED}}
    name = next((name for name in measures if known(runs[0].metric(name))), None)
    if name is None:
        return absent(title, absence(runs[0], "No round of this run has been evaluated.", "accuracy/mean"))
    label, accuracy = measures[name], name == "accuracy/mean"
    text_of: Format = percent if accuracy else number
    paths = []
    for index, run in enumerate(runs):
        sent = list(accumulate(value if math.isfinite(value) else 0.0 for value in run.up))
        values = run.metric(name)
        labels = [
            f"round {round_}: {text_of(value)} after {size(cost)}"
            for round_, value, cost in zip(run.numbers, values, sent, strict=True)
        ]
        paths.append(Path(run.label, sent, values, labels, index % COLOURS))
    axes = (
        Axis("bytes that a member sends in all the rounds that it takes part in", size, low=0.0),
        Axis(label, text_of, low=0.0, high=1.0 if accuracy else None),
    )
    ends = "; ".join(
        f"{path.name} {text_of(path.known[-1][1])} after {size(path.known[-1][0])}" for path in paths if path.known
    )
    caption = (
        f"The {label} against what a member had to send for it: the bytes of a round for each member that sent some, "
        "added up. A curve above (accuracy) or below (loss) another one makes more of the same upload, "
        f"however many rounds that takes. At the end: {ends}."
    )
    return figure(title, plane(paths, *axes, alt=title, words=f"{label} against uploaded bytes: {ends}."), caption)


# --- time


def _phases(data: ShownRun) -> Html:
    title = "The phases of the rounds"
    rounds = [_lane(line) for line in data.lines if line.phases]
    if not rounds:
        return absent(title, "No phase of this run is on record.")
    shown = rounds[-_SHOWN:]
    span = "every round" if len(shown) == len(rounds) else f"the last {len(shown)} rounds"
    caption = (
        f"{span[0].upper()}{span[1:]}, from its beginning; on the right how many replied of how many were asked, phase "
        "by phase."
    )
    more = (
        "When each question was put to the members and when it was closed. What lies between two phases is the "
        "coordinator's own work; the round ends at the upright line. In a simulation, phases are the times of its own "
        "process, and evaluations are not on record as phases."
    )
    kinds: dict[str, list[PhaseProgress]] = {}
    for line in data.lines:
        for phase in line.phases:
            kinds.setdefault(phase.kind, []).append(phase)
    rows = []
    for kind, phases in kinds.items():
        lasted = known([duration(phase) for phase in phases])
        replied, asked = sum(phase.replied for phase in phases), sum(phase.asked for phase in phases)
        sent = math.fsum(phase.bytes_up for phase in phases)
        share = percent(replied / asked) if asked else UNKNOWN
        longest = number(max(lasted, default=math.nan))
        rows.append((kind, str(len(phases)), share, number(mean(lasted)), longest, size(sent)))
    columns = ["phase", "times", "replied", "mean seconds", "longest", "bytes up"]
    words = "; ".join(f"{row[0]}: {row[1]} times, {row[2]} replied, {row[3]} s on average" for row in rows)
    return figure(title, timeline(shown, alt=title, words=f"{words}."), caption, table(columns, rows), more=more)


def _lane(line: RoundLine) -> TimelineLane:
    spans, words = [], []
    start = line.summary.started.ToDatetime(UTC)
    for phase in line.phases:
        began = (phase.started.ToDatetime(UTC) - start).total_seconds()
        lasted = duration(phase)
        ended = began + lasted if math.isfinite(lasted) else began
        replies = f"{phase.replied}/{phase.asked}"
        took = f"{lasted:.2f} s" if math.isfinite(lasted) else "open"
        phase_name = f"round {phase.round}, phase {phase.phase}, {phase.kind}"
        title = f"{phase_name}: {replies} replied, {took}, {size(phase.bytes_up)} up"
        words.append(replies)
        spans.append(TimelineSpan(phase.kind, title, began, ended, *_LOOKS.get(phase.kind.lower(), (3, 0))))
    text = " ".join(words[:_WORDS]) + (" …" if len(words) > _WORDS else "")
    return TimelineLane(f"round {line.number}", text, spans, line.summary.seconds)
