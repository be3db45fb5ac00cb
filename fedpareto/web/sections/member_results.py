"""What each member has of a run: its first and its last result, and how it took part."""

import math
from collections.abc import Sequence

from coordinator.alerts.about_rounds import OUTLIER
from fedpareto.formatting import NOT_DISCLOSED, UNKNOWN, natural, number, of_member, percent
from fedpareto.run_table import MemberNumber
from fedpareto.series import mean
from fedpareto.web.pages.dumbbells import Dumbbell, dumbbells
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.pages.verdict import Standing, counted_members
from fedpareto.web.sections.layout import UNFOLDED, absence, absent, figure, folded, member_name
from fedpareto.web.sections.shown_run import ShownRun

_DRAWN = 100  # members; of more, the worst and the best
_BEST = 20  # of these
_LISTED = 40  # members with their machines, in the console


def results(data: ShownRun) -> Html:
    """A dumbbell for each member, the worst off first; many are folded up."""
    standing = data.standing
    if standing is None:
        return absent("Each member's result", absence(data, "No round of this run has been evaluated.", "evaluation"))
    title, names, kind = "Who is left behind", _drawn(standing.worst_first), data.scored
    tail = set(standing.worst_first[: max(1, int(0.05 * len(standing.worst_first)))] if len(names) > 1 else ())
    firsts = standing.first if standing.rounds > 1 else {}
    rows = [Dumbbell(name, firsts.get(name, math.nan), standing.last[name], marked=name in tail) for name in names]
    left_out = len(standing.worst_first) - len(names)
    some = f" {left_out} members in between are in the table only." if left_out else ""
    worst = standing.worst_first[0]
    caption = (
        f"Each member's {kind.title} on its own data, from the first evaluated round to the last, the worst off first: "
        f"{worst} with {kind.text(standing.last[worst])}. The mean is {kind.text(standing.mean)}.{some}"
    )
    more = (
        "A group at the top that stays behind is one that the model does not serve: look there for data that no other "
        "member has, or for few rounds taken part in. The scores are the members' own words."
    )
    first, *others = [
        dumbbells(
            part,
            data.scored.axis,
            names=("first evaluated round", "last one"),
            alt=title if part[0] is rows[0] else "The other members",
            line=(f"mean {kind.text(standing.mean)}", standing.mean),
        )
        for part in folded(rows)
    ]
    hidden = [tag("details", tag("summary", "The other members"), other, id="more-behind") for other in others]
    return figure(title, join([first, *hidden]), caption, more=more)


def _drawn(names: Sequence[str]) -> Sequence[str]:
    return names if len(names) <= _DRAWN else [*names[: _DRAWN - _BEST], *names[-_BEST:]]


def members_table(data: ShownRun) -> Html:
    """Everybody that took part, the worst off first: the result, the influence, and the replies."""
    private = any(summary.HasField("epsilon") for summary in data.run.members)
    standing, norms, losses = data.standing, data.longest(MemberNumber.NORM), data.longest(MemberNumber.LOSS)
    pulls = data.pulls
    rows = []
    for name in _ordered(data.names, standing):
        summary = data.summaries.get(name)
        hidden = data.undisclosed if name in data.table.samples else frozenset[str]()  # it has an update that counted
        score = standing.last.get(name, math.nan) if standing else math.nan
        rows.append(
            (
                join([member_name(data, name), _remark(losses.get(name, math.nan))]),
                of_member(data.scored.text(score), "evaluation", hidden),
                of_member(_decimals(mean(data.row(MemberNumber.WEIGHT, name)), 3), "weight", hidden),
                of_member(percent(pulls.get(name, math.nan)), "weight", hidden),
                of_member(_decimals(mean(data.row(MemberNumber.COSINE, name)), 2), "cosine", hidden),
                of_member(_times(norms.get(name, math.nan)), "update_norm", hidden),
                of_member(str(data.table.samples.get(name) or UNKNOWN), "samples", hidden),
                f"{summary.replied} of {summary.asked}" if summary else UNKNOWN,
                *([number(summary.epsilon) if summary and summary.HasField("epsilon") else UNKNOWN] if private else []),
            )
        )
    if not rows:
        return tag("p", "No member has taken part in a round yet.", class_="soft")
    measure = data.scored.title if standing else "score"
    columns = ["member", measure, "mean λ", "pull", "mean cosine", "longest update", "samples", "replies"]
    caption = (
        f"{counted_members(len(rows)).capitalize()}. Pull is the share of the last step that comes from the member's "
        "update. The longest update is against the median of its round; the cosine is between update and step. Scores "
        "and samples are the members' own words."
    )
    return _disclosed([*columns, *(["epsilon"] if private else [])], rows, caption)


def _remark(ratio: float) -> Html:
    """That the losses that a member reports are conspicuous."""
    if not ratio > OUTLIER:
        return Html("")
    return tag("span", f" loss {ratio:,.0f} times the median", class_="small bad")


def _disclosed(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Html:
    """A table without the columns that privacy hides, which the caption names."""
    cells = [set(values) for values in zip(*rows, strict=True)]
    hidden = [i for i, values in enumerate(cells) if NOT_DISCLOSED in values and values <= {NOT_DISCLOSED, UNKNOWN}]
    if hidden:
        caption += f" {NOT_DISCLOSED.capitalize()} in this run: {', '.join(columns[i] for i in hidden)}."
    shown = [i for i in range(len(columns)) if i not in hidden]
    first, *others = [
        table([columns[i] for i in shown], [[row[i] for i in shown] for row in part], caption="" if at else caption)
        for at, part in enumerate(folded(rows))
    ]
    more = tag("summary", f"{len(rows) - UNFOLDED} more members")
    return join([first, *(tag("details", more, other, id="more-rows") for other in others)])


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
        rows.append((member_name(data, client), machine, *counts))
    caption = (
        "The counts are of rounds that have ended; a reply is refused for its content. Device and software are the "
        "member's own words."
    )
    listed = table(["member", "device, software", *outcomes], rows, words=2, caption=caption)
    summary = tag("summary", "Devices, software and replies, member by member")
    elements: list[Html] = [tag("details", summary, listed, id="more-replies")]
    if data.live and len(data.names) > _LISTED:
        elements = [tag("p", "The page of each member has its device, its software and its replies.", class_="soft")]
    reasons = [
        (member_name(data, member.client_id), str(member.last_reason_round), member.last_reason)
        for member in data.summaries.values()
        if member.last_reason
    ]
    if reasons:
        elements.append(tag("h3", "Why a reply last did not come, or did not count"))
        elements.append(table(["member", "round", "reason"], reasons, words=3))
    return join(elements)
