"""The figures that say why: each a chart, a caption that says what it shows, and its numbers in a table."""

import math
from dataclasses import replace

from federation.record.metric_definitions import SCORED
from fedpareto.formatting import number, percent, some, whole
from fedpareto.run_table import MemberNumber
from fedpareto.series import known, last, mean
from fedpareto.web.pages import charts
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.scales import ACCURACY, COSINE, Axis, general
from fedpareto.web.sections.layout import absence, absent, figure, line_figure, recorded, same, thinned
from fedpareto.web.sections.shown_run import ShownRun

_NO_ACCURACY = "No member reported an accuracy in this run."
_MOST = 8  # rounds that a caption names
_LINES = 60  # members that have a line of their own
_NO_STEP = "No round of this run has made a step."


def course(data: ShownRun) -> Html:
    """A thin line for each member's scores, and bold ones for the mean and the worst."""
    title = "Each member over the rounds"
    standing = data.standing
    if standing is None:
        return absent(title, absence(data, "No round of this run has been evaluated.", "evaluation"))
    names = standing.worst_first[:_LINES]
    series = [Series(name, data.row(MemberNumber.SCORE, name), 4, weight="thin") for name in names]
    series.append(Series("mean", [line.mean for line in data.lines], 0, weight="bold"))
    series.append(Series("worst member", [line.worst for line in data.lines], 1, weight="bold"))
    left_out = len(standing.worst_first) - len(names)
    some_left_out = f" The {left_out} best of {len(standing.worst_first)} members have no line." if left_out else ""
    caption = f"The {data.scored.title} of each member on its own data, a thin line each.{some_left_out}"
    return figure(title, charts.lines(*thinned(data, series), data.scored.axis, alt=title), caption)


def rounds(data: ShownRun) -> list[Html]:
    """The members' results over the rounds."""
    return [_accuracy(data), _losses(data), _spread(data), _improved(data)]


def conflicts(data: ShownRun) -> list[Html]:
    """The geometry of the updates and the step."""
    return [_cosines(data), _norms(data), _conflicts(data)]


# --- accuracy


def _accuracy(data: ShownRun) -> Html:
    title = "Accuracy over the rounds"
    names = ("mean", "std", "worst5", "best5", "worst", "best", "p5", "p95")
    columns = recorded(data, *(f"accuracy/{name}" for name in names))
    average, std, worst5, best5, worst = (values for _, values, _ in columns[:5])
    series = [Series("mean", average, 0, weight="bold"), Series("best 5 %", best5, 2)]
    if same(worst5, worst):
        series.append(Series("worst member", worst, 1, weight="bold"))
    else:
        series.append(Series("worst 5 %", worst5, 1, weight="bold"))
        series.append(Series("worst member", worst, 4, dashed=True))
    band = (
        Series("", [m - s for m, s in zip(average, std, strict=True)], 0),
        Series("", [m + s for m, s in zip(average, std, strict=True)], 0),
    )
    caption = "Every member tests the model on its own data and counts the same, however much data it has."
    gap = last(average) - last(worst5)
    if not math.isfinite(gap):
        return line_figure(data, title, _NO_ACCURACY, series, ACCURACY, caption, columns)
    caption = (
        f"At the end the mean and the worst 5 % are {100 * gap:.1f} percentage points apart. A mean that rises while "
        "the worst stay behind is bought at their expense."
    )
    more = (
        "Every member tests the model on its own data and counts the same, however much data it has. The shaded band "
        "is one standard deviation of the members about their mean. The worst 5 % are the mean of the lowest "
        "floor(0.05 N) members, at least one: with fewer than 40 members that is the worst member. Percentiles are in "
        "the table."
    )
    return line_figure(data, title, _NO_ACCURACY, series, ACCURACY, caption, columns, band=band, more=more)


def _spread(data: ShownRun) -> Html:
    title = "Spread of the accuracies"
    columns = recorded(data, "accuracy/std", "accuracy/variance", "accuracy/jain")
    std, _, jain = (values for _, values, _ in columns)
    caption = (
        "The standard deviation of the members' accuracies; 0 would be the same accuracy for everybody. At the end "
        f"Jain's index is {number(last(jain))}."
    )
    more = (
        "The deviation also falls when everybody becomes equally bad, so read it beside the mean. Jain's index says "
        "the same in relation to the mean: 1 for perfect equality, 1/N when one member has everything."
    )
    series = [Series("standard deviation", std, 3)]
    axis = Axis("accuracy", percent, low=0.0)
    return line_figure(data, title, _NO_ACCURACY, series, axis, caption, columns, more=more)


# --- loss


def _losses(data: ShownRun) -> Html:
    title = "Loss over the rounds"
    columns = recorded(data, "loss/train", "loss/validation", "loss/test")
    series = [Series(name, values, i) for i, (name, values, _) in enumerate(columns) if known(values)]
    no_loss = "No member reported a loss of a new model in this run."
    no_loss = absence(data, no_loss, *(f"loss/{split}" for split in SCORED))
    caption = (
        "Mean of the losses that the members measured on their own data, on a logarithmic scale. A training loss that "
        "falls while the test loss rises is overfitting."
    )
    more = (
        "Losses are claims: a member that reports a false loss changes this mean by any amount, and gains influence "
        "under a rule that reads losses."
    )
    columns = [column for column in columns if known(column[1])]
    axis = Axis("mean loss", general, log=True)
    return line_figure(data, title, no_loss, series, axis, caption, columns, more=more)


def _improved(data: ShownRun) -> Html:
    title = "Improved participants"
    promised, kept = data.metric("descent_share"), data.metric("improved")
    unknown = "Neither steps nor training losses are known in this run."
    series = [
        Series("training loss did not rise", kept, 0),
        Series("update not against the direction", promised, 4, dashed=True),
    ]
    measured = f" On average {percent(mean(kept))} of the participants were better off." if known(kept) else ""
    caption = f"The share of a round's participants whose training loss did not rise in the step.{measured}"
    more = (
        "The dashed line is what the direction promises to first order: the share of updates that have no negative "
        "cosine with it. For pure multi-gradient descent it is always 100 %. Where the promise is kept by fewer, the "
        "step was too long, or one member's batch misled it."
    )
    axis = replace(ACCURACY, name="share of the members")
    columns = recorded(data, "improved", "descent_share")
    return line_figure(data, title, unknown, series, axis, caption, columns, more=more)


# --- weights


def entropy(data: ShownRun) -> Html:
    """How many members the coefficients stand for."""
    title = "How many members decided"
    selectivity = data.metric("entropy")
    effective = [math.exp(value) for value in selectivity]
    present = [
        float(line.summary.accepted) if math.isfinite(value) else math.nan
        for line, value in zip(data.lines, selectivity, strict=True)
    ]
    series = [Series("effective number", effective, 0), Series("updates accepted", present, 4, dashed=True)]
    caption = (
        "The effective number of members, exp(entropy of λ): as many as took part when all weigh the same, 1 when "
        "one has all the weight."
    )
    more = "The further the line is below the dashed one, the more selective the algorithm was."
    columns = [*recorded(data, "entropy"), ("effective", effective, number), ("accepted", present, whole)]
    shares = data.metric("private/rule_share")
    if known(shares):
        moved = sum(share < 1 for share in known(shares))
        caption += (
            f" In {moved} of {len(known(shares))} private steps the coefficients were moved towards plain averaging, "
            "so that the others cover each member's update; on average "
            f"{percent(mean(known(shares)))} of the algorithm's own coefficients was left. Each member "
            f"blurred its update with c = {number(last(data.metric('private/blur')))}."
        )
        columns += recorded(data, "private/rule_share")
    axis = Axis("members", general, low=0.0)
    return line_figure(data, title, _NO_STEP, series, axis, caption, columns, more=more)


# --- geometry


def _conflicts(data: ShownRun) -> Html:
    title = "Pairs in conflict"
    caption = (
        "How many pairs of updates have a negative inner product: what is good for the one is, to first order, bad "
        "for the other."
    )
    more = (
        "The more the members' data differ, and the nearer training is to its end, the more there are. In such a "
        "round, the average can raise the losses of some members."
    )
    axis = Axis("pairs of updates", whole, low=0.0)
    series = [Series("pairs", data.metric("conflicts"), 1)]
    return line_figure(data, title, _NO_STEP, series, axis, caption, recorded(data, "conflicts"), more=more)


def _cosines(data: ShownRun) -> Html:
    title = "Whether the direction serves everybody"
    columns = recorded(data, "conflict_depth", "conflict_mean", "descent_min")
    depth, average, least = (values for _, values, _ in columns)
    series = [
        Series("least of an update with the direction", least, 0, weight="bold"),
        Series("least of two updates in conflict", depth, 1),
        Series("mean of the pairs in conflict", average, 4, dashed=True),
    ]
    against = sum(value < -1e-9 for value in known(least))
    caption = (
        "The line with circles is the verdict on a step: above 0 it makes nobody worse, to first order; below 0 it "
        f"makes some members worse. Here that was so in {against} of {len(known(least))} steps."
    )
    more = (
        "Cosines: -1 is opposite, 0 at right angles. The other lines tell how much the members are against each other."
    )
    return line_figure(data, title, _NO_STEP, series, COSINE, caption, columns, more=more)


def _norms(data: ShownRun) -> Html:
    title = "Length of the direction, and what was left to gain for all"
    columns = recorded(data, "direction_norm", "stationarity", "stationarity/relative", "step/rate")
    norm, left = (values for _, values, _ in columns[:2])
    still = [str(line.number) for line in data.lines if line.summary.metrics.get("stationary") == 1]
    stood = (
        f" In {len(still)} rounds there was no such direction and the model stayed as it was ({some(still, _MOST)}): "
        "it is Pareto-stationary for those participants, or one of them stands in the way on purpose."
        if still
        else ""
    )
    caption = (
        "The length of the direction that was taken, and how much common progress was left: the shortest vector in the "
        f"convex hull of the updates.{stood}"
    )
    more = (
        "The shortest vector is 0 exactly at a Pareto-stationary point, where no direction is good for every "
        "participant. Relative to the longest update it is in the table. A rule that normalises updates takes a "
        "direction of another scale than theirs."
    )
    series = [Series("direction", norm, 0), Series("shortest common direction", left, 2)]
    axis = Axis("norm", general, log=True)
    return line_figure(data, title, _NO_STEP, series, axis, caption, columns, more=more)
