"""The models that a run measured: the values of each at all members, and at each one."""

import math
from statistics import fmean, pstdev

from federation.record.metric_definitions import OWN, Basis, basis
from federation.spec.task_metrics import BUILT_IN
from federation.text import counted
from fedpareto.formatting import UNKNOWN, number, short
from fedpareto.run_table import MemberNumber
from fedpareto.series import known
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.sections.shown_run import ShownRun

EVALUATED, NOISE = "evaluated", "evaluation/noise"
_MEMBERS = 12  # with a column each


def models(data: ShownRun) -> Html:
    """A row for each model: mean, worst, best and spread over the members, then each member's value."""
    if not data.evaluates:
        return Html("")
    if data.has_means_alone:
        return _means(data)
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


def _means(data: ShownRun) -> Html:
    """A row for each model that was measured privately: its means, and the noise on them."""
    rows = []
    largest = {kind.name: kind.largest for kind in BUILT_IN} | {item.name: item.largest for item in data.run.metrics}
    for line in data.lines:
        found = line.summary.metrics
        names = [name for name in sorted(found) if basis(name) is Basis.MODEL and name not in (EVALUATED, NOISE)]
        noise = found.get(NOISE, math.nan)
        for name in names:
            most = largest.get(name.removeprefix(OWN).split("/")[0], 1.0)
            model = join([tag("code", short(line.summary.base_model)), f" (round {line.number})"])
            error = number(noise * most) if math.isfinite(noise) else UNKNOWN
            rows.append((model, name, number(found[name]), error, f"{found.get(EVALUATED, math.nan):.0f}"))
    if not rows:
        return tag("p", "No model has been measured yet.", class_="soft")
    caption = (
        f"Means over the members, of {counted(len({line.number for line in data.lines}), 'model')}; the noise is the "
        "standard deviation of what members have added. No member's own value is known, so there is no worst one and "
        "no spread."
    )
    return table(["model", "number", "mean", "noise", "members"], rows, caption=caption)
