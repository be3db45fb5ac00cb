"""The page of a report: the run, the figures, the clients, and the definitions of the numbers."""

import math
from collections.abc import Sequence
from importlib.resources import files

from coordinator.aggregation.measures import metric_definitions
from federation.text import counted
from fedpareto.admin_messages import epsilon_of_clients, name_of
from fedpareto.formatting import (
    NOT_DISCLOSED,
    PERSONALISED,
    UNKNOWN,
    number,
    of_member,
    percent,
    recorded,
    short,
    size,
    when,
)
from fedpareto.report.figures import all_figures
from fedpareto.report.html import Html, join, table, tag
from fedpareto.report.report_data import RunData
from fedpareto.series import known, mean

# The browser loads nothing and runs no script, even if a member's text contains markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = files("fedpareto.report").joinpath("style.css").read_text("utf-8")


def page(data: RunData, beside: Sequence[RunData] = ()) -> Html:
    """A run as one HTML document that needs nothing else; other runs of its task are drawn beside it."""
    run = data.run
    sections = list(all_figures(data, beside)) if data.rounds else []
    body = [
        tag("h1", run.name),
        tag("p", f"{run.algorithm} on {run.task}, run {run.run_id}: {_state(data)}{_beside(beside)}", class_="soft"),
        _cards(data),
        *(tag("p", f"Warning: {warning.message}.", class_="warning") for warning in run.alerts),
        tag("p", *_contents(sections)),
        "" if data.rounds else tag("p", "This run has no rounds yet.", class_="absent"),
        *(join([tag("h2", title, id=anchor), *figures]) for anchor, title, figures in sections),
        tag("h2", "Who took part", id="clients"),
        _clients(data),
        tag("h2", "The run", id="run"),
        _facts(data),
        *_remarks(data),
        tag("h3", "Specification"),
        tag("pre", run.spec.rstrip()),
        tag("h2", "What the numbers mean", id="definitions"),
        tag("p", "Accuracies, losses and samples are the clients' own words; the rest follows from signed updates."),
        _definitions(),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{run.name}: federated run"),
        Html(f"<style>\n{_STYLE}</style>"),
    )
    return Html("<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n")


def _definitions() -> Html:
    rows = [
        (name, definition.meaning, definition.source) for name, definition in metric_definitions.DEFINITIONS.items()
    ]
    return table(["name", "definition", "source"], rows, words=3)


def _state(data: RunData) -> str:
    run = data.run
    reason = f" ({run.reason})" if run.reason else ""
    return f"{name_of(run, 'state').lower()}{reason}, {run.rounds_done} of {counted(run.rounds_total, 'round')}"


def _beside(runs: Sequence[RunData]) -> str:
    names = ", ".join(f"{data.run.name} ({data.run.algorithm})" for data in runs)
    return f"; beside {names}" if names else ""


def _contents(sections: list[tuple[str, str, list[Html]]]) -> list[Html]:
    entries = [(anchor, title) for anchor, title, _ in sections]
    entries += [("clients", "Who took part"), ("run", "The run"), ("definitions", "What the numbers mean")]
    links = [tag("a", title, href=f"#{anchor}") for anchor, title in entries]
    return [join([" · " if i else "", link]) for i, link in enumerate(links)]


def _cards(data: RunData) -> Html:
    """The run in a few numbers: those of the last evaluated round, and totals."""
    latest, facts = data.run.latest, []
    if "accuracy/mean" in latest.metrics:
        labels = {"mean": "mean accuracy", "worst5": "worst 5 %", "std": "standard deviation"}
        labels["worst"] = f"worst client, {latest.worst_client}" if latest.worst_client else "worst client"
        facts += [
            (recorded(f"accuracy/{name}", latest.metrics, latest.undisclosed), label) for name, label in labels.items()
        ]
    elif "loss/worst" in latest.metrics:
        facts.append((number(latest.metrics["loss/worst"]), f"highest loss, {latest.worst_client}"))
    elif data.undisclosed & {"accuracy/mean", "loss/worst"}:
        facts.append((NOT_DISCLOSED, "mean accuracy" if "accuracy/mean" in data.undisclosed else "highest loss"))
    if known(data.metric("improved")):
        facts.append((percent(mean(data.metric("improved"))), "improved, on average"))
    elif "improved" in data.undisclosed:
        facts.append((NOT_DISCLOSED, "improved, on average"))
    total = math.fsum(known(data.metric("bytes/up") + data.metric("bytes/down")))
    facts += [(str(len(data.clients)), "clients"), (size(total), "up and down")]
    cards = [tag("div", tag("b", value), tag("span", name), class_="card") for value, name in facts]
    return tag("div", *cards, class_="cards")


def _clients(data: RunData) -> Html:
    summaries = {member.client_id: member for member in data.run.members}
    outcomes = ("asked", "replied", "declined", "refused", "missing")
    private = any(member.HasField("epsilon") for member in summaries.values())
    score_text = percent if data.final and data.final.measure == "accuracy" else number
    rows = []
    for client in data.clients:
        parts, summary, member = data.parts[client], summaries.get(client), data.members.get(client)
        hidden = data.undisclosed if client in data.samples else frozenset[str]()  # it has an update that counted
        score = data.final.values.get(client, math.nan) if data.final else math.nan
        rows.append(
            (
                client,
                f"{member.device or UNKNOWN}, {member.software or UNKNOWN}" if member else UNKNOWN,
                *(str(getattr(summary, outcome, UNKNOWN)) for outcome in outcomes),
                of_member(str(data.samples.get(client) or UNKNOWN), "samples", hidden),
                of_member(number(mean(part.update_norm for part in parts)), "update_norm", hidden),
                of_member(number(mean(part.weight for part in parts)), "weight", hidden),
                of_member(score_text(score), "evaluation", hidden),
                *([number(summary.epsilon) if summary and summary.HasField("epsilon") else UNKNOWN] if private else []),
            )
        )
    measure = f"{data.final.split} {data.final.measure}" if data.final else "score"
    columns = ["client", "device, software", *outcomes, "samples", "mean norm", "mean λ", measure]
    columns += ["epsilon"] if private else []
    caption = tag(
        "p",
        "Asked, replied, declined, refused and missing count rounds that have ended; a reply is refused for its "
        "content. Samples, device and software are the client's own words.",
        class_="soft",
    )
    elements = [caption, tag("div", table(columns, rows, words=2), class_="scroll")]
    reasons = [
        (member.client_id, str(member.last_reason_round), member.last_reason)
        for member in data.run.members
        if member.last_reason
    ]
    if reasons:
        elements.append(tag("h3", "Why a reply last did not come, or did not count"))
        elements.append(tag("div", table(["client", "round", "reason"], reasons, words=3), class_="scroll"))
    return join(elements)


def _facts(data: RunData) -> Html:
    run = data.run
    rows = [
        ("run", run.run_id),
        ("state", _state(data)),
        ("algorithm", run.algorithm),
        ("task", run.task),
        *((("objectives", ", ".join(run.objectives)),) if data.objectives else ()),
        ("parameters", f"{run.parameters:,}"),
        ("model", short(run.model) + ("" if data.has_step else " (the initial one: no round has made a step)")),
        *((field, when(run, field)) for field in ("created", "started", "ended")),
        *((("metrics", PERSONALISED),) if run.measured == "personalised" else ()),
        *((("privacy", words),) if (words := epsilon_of_clients(run)) else ()),
    ]
    return table(["", ""], rows, words=2)


def _remarks(data: RunData) -> list[Html]:
    """The rounds that were skipped or have another remark."""
    rows = [
        (str(item.summary.round), name_of(item.summary, "state").lower(), item.summary.reason)
        for item in data.rounds
        if item.summary.reason
    ]
    if not rows:
        return []
    remarks = table(["round", "state", "remark"], rows, words=3)
    return [tag("h3", "Rounds with a remark"), tag("div", remarks, class_="scroll")]
