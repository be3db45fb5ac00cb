"""The page of a report: what run it was, who took part, the figures, what the words mean."""

import math
from collections.abc import Sequence

from coordinator.rounds.metrics import DEFINITIONS
from federation.v1.admin_pb2 import MemberSummary
from fedpareto.formatting import number, percent, short, size, when
from fedpareto.messages import name_of
from fedpareto.report.charts import COLOURS
from fedpareto.report.data import RunData
from fedpareto.report.figures import all_figures
from fedpareto.report.html import Html, join, table, tag

# Nothing is loaded from anywhere and nothing runs, whatever somebody may have smuggled into a text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #667; --rule: #d8dce2; --card: #f5f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; }
@media (prefers-color-scheme: dark) { :root { --paper: #16191d; --ink: #e4e7eb; --soft: #9aa4b0; --rule: #353b43;
  --card: #1f242a; --c0: #58b4e8; --c1: #f0803c; --c2: #35c79d; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 58rem; padding: 1.5rem; }
h1 { margin: 0; } h2 { border-top: 1px solid var(--rule); margin-top: 2.5rem; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 0 0 .4rem; } .soft, figcaption { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.2rem 0; }
.card { background: var(--card); border-radius: .4rem; padding: .5rem .9rem; }
.card b { display: block; font-size: 1.25rem; } .card span { color: var(--soft); font-size: .85rem; }
figure { margin: 1.5rem 0 2rem; } figcaption { font-size: .92rem; margin: .3rem 0; max-width: 48rem; }
.absent { color: var(--soft); font-style: italic; }
svg { display: block; height: auto; width: 100%; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .axis { fill: var(--ink); } .grid { stroke: var(--rule); stroke-width: 1; }
.guide { stroke: var(--soft); stroke-dasharray: 6 4; stroke-width: 1.2; } .glyph { font-size: 1.1rem; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .dashed { stroke-dasharray: 5 4; stroke-width: 1.3; }
.band { fill-opacity: .14; }
.legend { color: var(--soft); font-size: .85rem; margin: .2rem 0; } .legend i, .legend span { margin-left: .8rem; }
.key { border-radius: 2px; box-sizing: border-box; display: inline-block; height: .7rem; vertical-align: -1px;
  width: 1.1rem; }
.hollow { fill: var(--paper); stroke-width: 1.2; } .tick { stroke: var(--soft); stroke-width: 1; }
.q1 { fill-opacity: .12; stroke-width: 1.6; } .q2 { fill-opacity: .5; stroke-width: 1.2; }
.q3 { fill-opacity: 0; stroke-dasharray: 3 2; stroke-width: 1.4; }
.warning { border-left: .25rem solid var(--c1); padding-left: .6rem; }
.key.q1 { background: none; border: 2px solid; } .key.q2 { border: 1px solid; opacity: .6; }
.key.q3 { background: none; border: 2px dashed; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--rule); padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; } .scroll { max-height: 24rem; overflow: auto; }
summary { cursor: pointer; color: var(--soft); font-size: .88rem; }
pre { background: var(--card); border-radius: .4rem; overflow-x: auto; padding: .8rem; font-size: .84rem; }
@media print { :root { color-scheme: light; --paper: #fff; --ink: #000; --soft: #333; --rule: #bbb; --card: #fff;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; } * { print-color-adjust: exact; } body { max-width: none; }
  figure, table { break-inside: avoid; } details > * { display: block; } .scroll { max-height: none; } }
""" + "".join(
    f".s{i} {{ stroke: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); }} "
    f".b{i} {{ background: var(--c{i}); }} .g{i} {{ color: var(--c{i}); }}\n"
    for i in range(COLOURS)
)


def page(data: RunData, beside: Sequence[RunData] = ()) -> Html:
    """A run as one HTML document that needs nothing else; other runs of its task are drawn beside it."""
    run = data.run
    sections = list(all_figures(data, beside)) if data.rounds else []
    nothing = [] if data.rounds else [tag("p", "This run has no rounds yet.", class_="absent")]
    body = [
        tag("h1", run.name),
        tag("p", f"{run.algorithm} on {run.task}, run {run.run_id}: {_state(data)}{_beside(beside)}", class_="soft"),
        _cards(data),
        *(tag("p", f"Warning: {warning.message}.", class_="warning") for warning in run.warnings),
        tag("p", *_contents(sections)),
        *nothing,
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
        table(["name", "definition", "source"], [(name, *words) for name, words in DEFINITIONS.items()], words=3),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{run.name}: federated run"),
        Html(f"<style>{_STYLE}</style>"),
    )
    return Html("<!doctype html>\n" + tag("html", head, tag("body", *body), lang="en") + "\n")


def _state(data: RunData) -> str:
    run = data.run
    reason = f" ({run.reason})" if run.reason else ""
    return f"{name_of(run, 'state').lower()}{reason}, {run.rounds_done} of {run.rounds_total} rounds"


def _beside(runs: Sequence[RunData]) -> str:
    names = ", ".join(f"{one.run.name} ({one.run.algorithm})" for one in runs)
    return f"; beside {names}" if names else ""


def _contents(sections: list[tuple[str, str, list[Html]]]) -> list[Html]:
    entries = [(anchor, title) for anchor, title, _ in sections]
    entries += [("clients", "Who took part"), ("run", "The run"), ("definitions", "What the numbers mean")]
    links = [tag("a", title, href=f"#{anchor}") for anchor, title in entries]
    return [join([" · " if i else "", link]) for i, link in enumerate(links)]


def _cards(data: RunData) -> Html:
    """The run in a few numbers: those of the last round that was evaluated, and totals."""
    numbers = data.run.latest.metrics
    found = []
    if "accuracy/mean" in numbers:
        found += [
            (percent(numbers["accuracy/mean"]), "mean accuracy"),
            (percent(numbers["accuracy/worst5"]), "worst 5 %"),
            (percent(numbers["accuracy/std"]), "standard deviation"),
            (percent(numbers["accuracy/worst"]), f"worst client, {data.run.latest.worst_client}"),
        ]
    elif "loss/worst" in numbers:
        found.append((number(numbers["loss/worst"]), f"highest loss, {data.run.latest.worst_client}"))
    improved = [value for value in data.metric("improved") if math.isfinite(value)]
    if improved:
        found.append((percent(math.fsum(improved) / len(improved)), "improved, on average"))
    total = sum(sum(value for value in data.metric(f"bytes/{way}") if math.isfinite(value)) for way in ("up", "down"))
    found += [(str(len(data.clients)), "clients"), (size(total), "up and down")]
    cards = [tag("div", tag("b", value), tag("span", name), class_="card") for value, name in found]
    return tag("div", *cards, class_="cards")


def _clients(data: RunData) -> Html:
    summaries = {member.client_id: member for member in data.run.members}
    rows = []
    for client in data.clients:
        parts = data.parts(client)
        summary = summaries.get(client, MemberSummary())
        outcomes = (summary.asked, summary.replied, summary.declined, summary.refused, summary.missing)
        accepted = data.accepted(client)
        weights = [part.weight for part in parts if math.isfinite(part.weight)]
        norms = [part.update_norm for part in parts if math.isfinite(part.update_norm)]
        member = data.members.get(client)
        score = data.final.values.get(client, math.nan) if data.final else math.nan
        rows.append(
            (
                client,
                f"{member.device or '–'}, {member.software or '–'}" if member else "–",
                *map(str, outcomes if client in summaries else "–" * len(outcomes)),
                str(accepted[-1].samples) if accepted else "–",
                number(_mean(norms)),
                number(_mean(weights)),
                (percent if data.final and data.final.measure == "accuracy" else number)(score),
            )
        )
    measure = f"{data.final.split} {data.final.measure}" if data.final else "score"
    columns = ["client", "device, software", "asked", "replied", "declined", "refused", "missing"]
    columns += ["samples", "mean norm", "mean λ", measure]
    caption = tag(
        "p",
        "Asked, replied, declined, refused and missing count rounds that have ended; a reply is refused for its "
        "content. Samples, device and software are the client's own words.",
        class_="soft",
    )
    found = [caption, tag("div", table(columns, rows, words=2), class_="scroll")]
    reasons = [
        (member.client_id, str(member.last_reason_round), member.last_reason)
        for member in data.run.members
        if member.last_reason
    ]
    if reasons:
        found.append(tag("h3", "Why a reply last did not come, or did not count"))
        found.append(tag("div", table(["client", "round", "reason"], reasons, words=3), class_="scroll"))
    return join(found)


def _facts(data: RunData) -> Html:
    run = data.run
    rows = [
        ("run", run.run_id),
        ("state", _state(data)),
        ("algorithm", run.algorithm),
        ("task", run.task),
        *((("objectives", ", ".join(run.objectives)),) if data.objectives else ()),
        ("parameters", f"{run.parameters:,}"),
        ("model", short(run.model)),
        *((field, when(run, field)) for field in ("created", "started", "ended")),
    ]
    return table(["", ""], rows, words=2)


def _remarks(data: RunData) -> list[Html]:
    """Rounds that were skipped, or of which something else is to be said."""
    rows = [
        (str(item.summary.round), name_of(item.summary, "state").lower(), item.summary.reason)
        for item in data.rounds
        if item.summary.reason
    ]
    if not rows:
        return []
    found = table(["round", "state", "remark"], rows, words=3)
    return [tag("h3", "Rounds with a remark"), tag("div", found, class_="scroll")]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
