"""The page of a report: the verdict, the alerts, each member's result, and then why."""

import math
from collections.abc import Sequence
from dataclasses import replace

from federation.record import metric_definitions
from federation.text import counted
from federation.v1.admin_pb2 import AlertKind
from fedpareto.admin_messages import epsilon_of_clients, name_of
from fedpareto.formatting import NOT_DISCLOSED, PERSONALISED, number, percent, recorded, short, size, when
from fedpareto.run_names import RunNames
from fedpareto.series import equals, known, mean
from fedpareto.web.pages.alert_list import alert_list, line_of, with_code
from fedpareto.web.pages.html import Html, facts, join, table, tag
from fedpareto.web.pages.skeleton import Link, WebPage, in_one_file
from fedpareto.web.sections import member_results
from fedpareto.web.sections.figures import FigureSection, sections
from fedpareto.web.sections.shown_run import ShownRun

_STATES = {"COMPLETED": "good", "FAILED": "critical", "RUNNING": "notice", "PAUSED": "warning"}


def page(data: ShownRun, beside: Sequence[ShownRun] = ()) -> Html:
    """A run as one HTML document that needs nothing else; other runs of its task are drawn beside it."""
    names = RunNames([data.run, *(other.run for other in beside)])
    data, *beside = (replace(one, origin=names.origin(one.run.run_id, one.run.name)) for one in (data, *beside))
    why = list(sections(data, beside)) if data.lines else []
    parts = [
        *([("members", "Members", _members(data))] if data.lines else []),
        *((section.anchor, section.title, _figures(section)) for section in why),
        ("replies", "Who took part", [tag("div", member_results.took_part(data), class_="card")]),
        ("run", "The run", _run(data)),
        ("definitions", "What the numbers mean", _definitions()),
    ]
    body = [
        _head(data, beside),
        _cards(data),
        *_alerts(data),
        "" if data.lines else tag("p", "This run has no rounds yet.", class_="absent"),
        *(tag("section", tag("h2", title, id=anchor), *elements) for anchor, title, elements in parts),
    ]
    links = [Link(anchor.capitalize(), f"#{anchor}") for anchor in ("alerts", *(anchor for anchor, _, _ in parts))]
    return in_one_file(WebPage(title=f"{data.run.name}: federated run", body=body, nav=links))


def _head(data: ShownRun, beside: Sequence[ShownRun]) -> Html:
    run, state = data.run, name_of(data.run, "state")
    others = ", ".join(f"{other.label} ({other.run.algorithm})" for other in beside)
    rounds = f"{run.rounds_done} of {counted(run.rounds_total, 'round')}"
    words = f"{run.algorithm} on {run.task}, {rounds}, run {run.run_id} of {when(run, 'created')[:16]}"
    words += f"; beside {others}" if others else ""
    return join(
        [
            tag("h1", f"{run.name} ", tag("span", state.lower(), class_=f"state {_STATES.get(state, 'notice')}")),
            tag("p", data.verdict, class_="verdict"),
            tag("p", words, class_="soft"),
            *([tag("p", run.reason, class_="soft")] if run.reason else []),
        ]
    )


def _alerts(data: ShownRun) -> list[Html]:
    lines = [line_of(alert) for alert in reversed(data.run.alerts) if alert.kind != AlertKind.ALERT_KIND_RUN_ENDED]
    content = alert_list(lines) if lines else tag("p", "Nothing needs attention.", class_="soft")
    return [tag("section", tag("h2", "Alerts", id="alerts"), content)]


def _members(data: ShownRun) -> list[Html]:
    return [
        tag("div", member_results.results(data), class_="figures one"),
        tag("div", tag("h3", "Every member"), member_results.members_table(data), class_="card"),
    ]


def _figures(section: FigureSection) -> list[Html]:
    return [tag("div", *section.figures, class_="figures")]


def _cards(data: ShownRun) -> Html:
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


def _run(data: ShownRun) -> list[Html]:
    run = data.run
    reason = f" ({run.reason})" if run.reason else ""
    rows = [
        ("run", run.run_id),
        (
            "state",
            f"{name_of(run, 'state').lower()}{reason}, {run.rounds_done} of {counted(run.rounds_total, 'round')}",
        ),
        ("algorithm", run.algorithm),
        ("task", run.task),
        *((("objectives", ", ".join(run.objectives)),) if data.objectives else ()),
        ("parameters", f"{run.parameters:,}"),
        ("model", short(run.model) + ("" if data.has_step else " (the initial one: no round has made a step)")),
        *((field, when(run, field)) for field in ("created", "started", "ended")),
        *((("metrics", PERSONALISED),) if run.measured == "personalised" else ()),
        *((("privacy", words),) if (words := epsilon_of_clients(run)) else ()),
    ]
    specification = tag("details", tag("summary", "Specification"), tag("pre", run.spec.rstrip()))
    return [tag("div", facts(rows), *_remarks(data), specification, class_="card")]


def _remarks(data: ShownRun) -> list[Html]:
    """The rounds that were skipped or have another remark."""
    remarked = [line for line in data.lines if line.summary.reason]
    groups = equals(remarked, lambda line: line.number, lambda line: (line.state.lower(), line.summary.reason))
    if not groups:
        return []
    rows = [(group.rounds, *group.said) for group in groups]
    return [tag("h3", "Rounds with a remark"), table(["rounds", "state", "remark"], rows, words=3)]


def _definitions() -> list[Html]:
    terms = [
        join([tag("dt", name), tag("dd", with_code(definition.meaning), tag("span", f" ({definition.source})"))])
        for name, definition in metric_definitions.DEFINITIONS.items()
    ]
    said = "Accuracies, losses and samples are the members' own words; the rest follows from signed updates."
    summary = tag("summary", f"{len(terms)} numbers, each with its definition and its source")
    return [tag("p", said, class_="soft"), tag("details", summary, tag("dl", *terms, class_="terms"))]
