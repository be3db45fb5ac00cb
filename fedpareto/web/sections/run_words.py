"""A run in a few words and numbers: its cards, its alerts, its rounds in words, what it is, what the numbers mean."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from federation.record import metric_definitions
from federation.text import counted, without_links
from federation.v1.admin_pb2 import AlertKind, Run
from fedpareto.admin_messages import epsilon_of_clients, name_of
from fedpareto.formatting import NOT_DISCLOSED, PERSONALISED, natural, number, percent, recorded, size, when
from fedpareto.run_table import Outcome, RoundLine
from fedpareto.series import equals, known, mean
from fedpareto.web.pages.alert_list import alert_list, line_of, with_code
from fedpareto.web.pages.html import Html, facts, join, table, tag
from fedpareto.web.sections.shown_run import ShownRun

NAMED = 3  # members that a sentence names
VERBS = {Outcome.DECLINED: "declined", Outcome.REFUSED: "was refused", Outcome.MISSING: "did not reply"}
_ROUNDS = 50  # entries of the list of failures


def state_look(run: Run) -> str:
    """The class of a state's badge."""
    looks = {"RUNNING": "good", "COMPLETED": "good", "PAUSED": "warning", "FAILED": "critical", "STOPPED": "warning"}
    return looks.get(name_of(run, "state"), "notice")


def alerts(data: ShownRun) -> Html:
    """The run's alerts, the newest of a severity first, but that it has ended."""
    lines = [line_of(alert) for alert in reversed(data.run.alerts) if alert.kind != AlertKind.ALERT_KIND_RUN_ENDED]
    return alert_list(lines) if lines else tag("p", "Nothing needs attention.", class_="soft")


def cards(data: ShownRun) -> Html:
    """The run in a few numbers: those of the last evaluated round, and totals."""
    latest, shown = data.run.latest, []
    if "accuracy/mean" in latest.metrics:
        labels = {"mean": "mean accuracy", "std": "standard deviation"}
        if latest.metrics.get("accuracy/worst5") != latest.metrics.get("accuracy/worst"):
            labels["worst5"] = "worst 5 %"
        labels["worst"] = f"worst member, {latest.worst_client}" if latest.worst_client else "worst member"
        shown += [
            (recorded(f"accuracy/{name}", latest.metrics, latest.undisclosed), label) for name, label in labels.items()
        ]
    elif "loss/worst" in latest.metrics:
        shown.append((number(latest.metrics["loss/worst"]), f"highest loss, {latest.worst_client}"))
    elif data.undisclosed & {"accuracy/mean", "loss/worst"}:
        shown.append((NOT_DISCLOSED, "mean accuracy" if "accuracy/mean" in data.undisclosed else "highest loss"))
    if known(data.metric("improved")):
        shown.append((percent(mean(data.metric("improved"))), "improved, on average"))
    elif "improved" in data.undisclosed:
        shown.append((NOT_DISCLOSED, "improved, on average"))
    hidden = [name for value, name in shown if value == NOT_DISCLOSED]
    shown = [card for card in shown if card[0] != NOT_DISCLOSED]
    if hidden:
        shown.append((NOT_DISCLOSED, ", ".join(hidden)))
    total = math.fsum(known(data.metric("bytes/up") + data.metric("bytes/down")))
    shown += [(_took_part(data), "members took part"), (size(total), "up and down")]
    return tag("ul", *(tag("li", tag("b", value), tag("span", name)) for value, name in shown), class_="cards")


def _took_part(data: ShownRun) -> str:
    """How many members took part; of how many, if some did not."""
    everybody, absent = data.turnout.names | {*data.names}, data.turnout.absent
    return f"{len(everybody) - len(absent)} of {len(everybody)}" if absent else str(len(everybody))


# --- rounds in words


@dataclass(frozen=True)
class FeedEntry:
    """An entry of the list of rounds: what is told of one round, or equally of several."""

    told: str
    rounds: str
    first: int
    lines: Sequence[RoundLine]


def feed(lines: Sequence[RoundLine]) -> list[FeedEntry]:
    """The rounds in words: equal failures of neighbours are one entry; rounds without a failure stay apart."""
    told = {line.number: (of_round(line), -1 if line.has_failed else line.number) for line in lines}
    groups = equals(lines, lambda line: line.number, lambda line: told[line.number])
    return [FeedEntry(group.said[0], group.rounds, group.first, group.items) for group in groups]


def of_round(line: RoundLine) -> str:
    """A round in a sentence: "4 of 5 replied; hospital-c declined: disk"."""
    summary = line.summary
    told = [f"{summary.accepted} of {summary.asked} replied"]
    if line.state == "SKIPPED":
        told.append(f"no step: {summary.reason}" if summary.reason else "no step")
    elif summary.reason:
        told.append(summary.reason)
    names = sorted(line.failed, key=natural)
    for name in names[:NAMED]:
        outcome, why = line.failed[name]
        told.append(f"{name} {VERBS[outcome]}{f': {why}' if why else ''}")
    if len(names) > NAMED:
        told.append(f"{len(names) - NAMED} more failed")
    return "; ".join(told)


def failures(data: ShownRun) -> Html:
    """The rounds that made no step, in which a member failed, or that have a remark, the newest first."""
    lines = [line for line in reversed(data.lines) if line.has_failed or line.summary.reason]
    entries = feed(lines)
    if not entries:
        return tag("p", "No round had a failure or a remark.", class_="soft")
    rows = [(entry.rounds, entry.told) for entry in entries[:_ROUNDS]]
    left_out = len(entries) - len(rows)
    more = [tag("p", f"{left_out} earlier ones are left out.", class_="soft")] if left_out else []
    return join([table(["rounds", "what happened"], rows, words=2), *more])


# --- the run itself


def itself(data: ShownRun) -> Html:
    """What the run is, and its specification."""
    run = data.run
    reason = f" ({run.reason})" if run.reason else ""
    initial = (
        "" if data.has_step or data.evaluates or data.describes else " (the initial one: no round has made a step)"
    )
    rows = [
        ("run", tag("code", run.run_id)),
        (
            "state",
            f"{name_of(run, 'state').lower()}{reason}, {run.rounds_done} of {counted(run.rounds_total, 'round')}",
        ),
        ("kind" if data.evaluates or data.describes else "algorithm", run.algorithm),
        ("task", run.task),
        *((("objectives", ", ".join(run.objectives)),) if data.objectives else ()),
        ("parameters", f"{run.parameters:,}"),
        ("model", join([tag("code", run.model), initial])),
        *((field, when(run, field)) for field in ("created", "started", "ended")),
        *((("metrics", PERSONALISED),) if run.measured == "personalised" else ()),
        *((("privacy", words),) if (words := epsilon_of_clients(run)) else ()),
    ]
    parts = [facts(rows)]
    if run.spec:
        parts.append(
            tag("details", tag("summary", "Specification"), tag("pre", run.spec.rstrip()), id="more-specification")
        )
    return join(parts)


def definitions() -> Html:
    """What each number means."""
    terms = [
        join(
            [
                tag("dt", name),
                tag(
                    "dd",
                    with_code(without_links(definition.meaning)),
                    tag("span", f" ({without_links(definition.source)})"),
                ),
            ]
        )
        for name, definition in metric_definitions.DEFINITIONS.items()
    ]
    said = "Accuracies, losses and samples are the members' own words; the rest follows from signed updates."
    summary = tag("summary", f"{len(terms)} numbers, each with its definition and its source")
    return join([tag("p", said, class_="soft"), tag("details", summary, tag("dl", *terms, class_="terms"))])
