"""The models that a run measured: the values of each at all members, and at each one."""

import math
from statistics import fmean, pstdev

from federation.text import counted
from fedpareto.formatting import UNKNOWN, short
from fedpareto.run_table import MemberNumber
from fedpareto.series import known
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.sections.shown_run import ShownRun

_MEMBERS = 12  # with a column each


def models(data: ShownRun) -> Html:
    """A row for each model: mean, worst, best and spread over the members, then each member's value."""
    if not data.evaluates:
        return Html("")
    kind, scores = data.scored, data.table.values(MemberNumber.SCORE)
    names = data.table.names if len(data.table.names) <= _MEMBERS else []
    places = [data.table.members.index(name) for name in names]
    rows = []
    for line in data.lines:
        values = [float(value) for value in scores[:, line.number]] if line.number < scores.shape[1] else []
        found = known(values)
        worst, best = (min(found), max(found)) if found else (math.nan, math.nan)
        if not kind.higher:
            worst, best = best, worst
        own = [kind.text(values[place]) if values else UNKNOWN for place in places]
        spread = kind.text(pstdev(found)) if found else UNKNOWN
        mean = kind.text(fmean(found) if found else line.mean)
        model = join([tag("code", short(line.summary.base_model)), f" (round {line.number})"])
        rows.append((model, mean, *map(kind.text, (worst, best)), spread, *own))
    if not rows:
        return tag("p", "No model has been measured yet.", class_="soft")
    caption = (
        f"{kind.title.capitalize()} of {counted(len(rows), 'model')} on each member's own data; the spread is the "
        "standard deviation over the members. The scores are the members' own words."
    )
    return table(["model", "mean", "worst", "best", "spread", *names], rows, caption=caption)
