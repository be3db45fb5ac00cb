"""What each member has of a run: its first and its last result, and how it took part."""

import math
from collections.abc import Sequence
from dataclasses import replace

from coordinator.alerts.about_rounds import OUTLIER
from fedpareto.formatting import NOT_DISCLOSED, UNKNOWN, natural, number, of_member
from fedpareto.run_table import MemberNumber
from fedpareto.series import mean
from fedpareto.web.pages.charts import ACCURACY
from fedpareto.web.pages.dumbbells import Dumbbell, dumbbells
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.pages.scales import Axis, general
from fedpareto.web.pages.verdict import Standing, counted_members
from fedpareto.web.sections.layout import absence, absent, figure
from fedpareto.web.sections.shown_run import ShownRun

_DRAWN = 40  # members; of more, the worst and the best
_BEST = 10  # of these


def results(data: ShownRun) -> Html:
    """A dumbbell for each member, the worst off first."""
    title = "From the first round to the last"
    standing = data.standing
    if standing is None:
        return absent(title, absence(data, "No round of this run has been evaluated.", "evaluation"))
    names = _drawn(standing.worst_first)
    format_ = data.scored.text
    axis = replace(ACCURACY, name=data.scored.title) if data.scored.share else Axis(data.scored.title, general)
    tail = set(standing.worst_first[: max(1, int(0.05 * len(standing.worst_first)))] if len(names) > 1 else ())
    once = standing.rounds < 2
    rows = [
        Dumbbell(
            name, math.nan if once else standing.first.get(name, math.nan), standing.last[name], marked=name in tail
        )
        for name in names
    ]
    left_out = len(standing.worst_first) - len(names)
    some = f" {left_out} members in between are in the table only." if left_out else ""
    worst = standing.worst_first[0]
    caption = (
        f"Each member's {data.scored.title} on its own data, the worst off first: {worst} with "
        f"{format_(standing.last[worst])}. The mean is {format_(standing.mean)}.{some}"
    )
    more = (
        "A group at the top that stays behind is one that the model does not serve: look there for data that no other "
        "member has, or for few rounds taken part in. The scores are the members' own words."
    )
    drawing = dumbbells(
        rows,
        axis,
        names=("first evaluated round", "last one"),
        alt=title,
        line=(f"mean {format_(standing.mean)}", standing.mean),
    )
    return figure(title, drawing, caption, more=more)


def _drawn(names: Sequence[str]) -> Sequence[str]:
    return names if len(names) <= _DRAWN else [*names[: _DRAWN - _BEST], *names[-_BEST:]]


def members_table(data: ShownRun) -> Html:
    """Everybody that took part, the worst off first: the result, the influence, and the replies."""
    private = any(summary.HasField("epsilon") for summary in data.run.members)
    standing, ratios = data.standing, data.longest(MemberNumber.NORM)
    rows = []
    for client in _ordered(data.names, standing):
        summary = data.summaries.get(client)
        hidden = data.undisclosed if client in data.table.samples else frozenset[str]()  # it has an update that counted
        score = standing.last.get(client, math.nan) if standing else math.nan
        rows.append(
            (
                client,
                of_member(data.scored.text(score), "evaluation", hidden),
                of_member(_decimals(mean(data.row(MemberNumber.WEIGHT, client)), 3), "weight", hidden),
                of_member(_decimals(mean(data.row(MemberNumber.COSINE, client)), 2), "cosine", hidden),
                of_member(_times(ratios.get(client, math.nan)), "update_norm", hidden),
                of_member(str(data.table.samples.get(client) or UNKNOWN), "samples", hidden),
                f"{summary.replied} of {summary.asked}" if summary else UNKNOWN,
                *([number(summary.epsilon) if summary and summary.HasField("epsilon") else UNKNOWN] if private else []),
            )
        )
    measure = f"{data.scored.title}" if standing else "score"
    columns = ["member", measure, "mean λ", "mean cosine", "longest update", "samples", "replies"]
    caption = (
        f"{counted_members(len(rows)).capitalize()}. The longest update is against the median of its round; the cosine "
        "is between update and step. Scores and samples are the members' own words."
    )
    return _disclosed([*columns, *(["epsilon"] if private else [])], rows, caption)


def _disclosed(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Html:
    """A table without the columns that privacy hides, which the caption names."""
    cells = [set(values) for values in zip(*rows, strict=True)]
    hidden = [i for i, values in enumerate(cells) if NOT_DISCLOSED in values and values <= {NOT_DISCLOSED, UNKNOWN}]
    if hidden:
        caption += f" {NOT_DISCLOSED.capitalize()} in this run: {', '.join(columns[i] for i in hidden)}."
    shown = [i for i in range(len(columns)) if i not in hidden]
    return table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows], caption=caption)


def _decimals(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else UNKNOWN


def _times(ratio: float) -> str:
    """How many times the median; a ratio that is an alert stands out."""
    if not math.isfinite(ratio):
        return UNKNOWN
    written = f"{ratio:,.0f} ×" if ratio >= 100 else f"{ratio:.1f} ×"
    return tag("span", written, class_="bad") if ratio > OUTLIER else written


def _ordered(clients: Sequence[str], standing: Standing | None) -> list[str]:
    """The worst off first, then those without a result by their names."""
    worst = standing.worst_first if standing else []
    return [*worst, *sorted(set(clients) - set(worst), key=natural)]


def took_part(data: ShownRun) -> Html:
    """How each member's rounds ended, its machine, and why a reply last did not come or did not count."""
    outcomes = ("asked", "replied", "declined", "refused", "missing")
    rows = []
    for client in data.names:
        member = data.members.get(client)
        machine = f"{member.device or UNKNOWN}, {member.software or UNKNOWN}" if member else UNKNOWN
        counts = [str(getattr(data.summaries.get(client), outcome, UNKNOWN)) for outcome in outcomes]
        rows.append((client, machine, *counts))
    caption = (
        "The counts are of rounds that have ended; a reply is refused for its content. Device and software are the "
        "member's own words."
    )
    listed = table(["member", "device, software", *outcomes], rows, words=2, caption=caption)
    elements: list[Html] = [tag("details", tag("summary", "Devices, software and replies, member by member"), listed)]
    reasons = [
        (member.client_id, str(member.last_reason_round), member.last_reason)
        for member in data.summaries.values()
        if member.last_reason
    ]
    if reasons:
        elements.append(tag("h3", "Why a reply last did not come, or did not count"))
        elements.append(table(["member", "round", "reason"], reasons, words=3))
    return join(elements)
