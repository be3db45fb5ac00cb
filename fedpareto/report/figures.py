"""The figures of a report: each a chart, a caption that says how to read it, and its numbers in a table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from federation.record.metric_definitions import SCORED
from fedpareto.formatting import number, percent, whole
from fedpareto.report import charts, metric_figures, objective_figures, traffic
from fedpareto.report.charts import ACCURACY, COSINE, Axis, Series, general
from fedpareto.report.html import Html, table
from fedpareto.report.layout import absence, absent, figure, line_figure, recorded, same, some
from fedpareto.report.report_data import RunData
from fedpareto.series import known, last, mean

_NO_ACCURACY = "No client reported an accuracy in this run."
_NO_STEP = "No round of this run has made a step."


def all_figures(data: RunData, beside: Sequence[RunData]) -> Iterator[tuple[str, str, list[Html]]]:
    """The sections of a report: an anchor, a title, the figures."""
    if data.objectives:
        yield "objectives", "The objectives", list(objective_figures.figures(data, beside))
    yield "accuracy", "Accuracy, and how evenly it is spread", [_accuracy(data), _spread(data), _final(data)]
    if data.own_metrics:
        yield "metrics", "The task's own metrics", list(metric_figures.figures(data))
    yield "loss", "Loss, and who was better off", [_losses(data), _improved(data)]
    yield "weights", "Who decided: the weights", [_weights(data), _entropy(data)]
    yield "conflicts", "Conflicts, and the direction that was taken", [_conflicts(data), _cosines(data), _norms(data)]
    yield "traffic", "Replies, bytes and time", list(traffic.figures(data, beside))


# --- accuracy


def _accuracy(data: RunData) -> Html:
    title = "Accuracy over the rounds"
    names = ("mean", "std", "worst5", "best5", "worst", "best", "p5", "p95")
    columns = recorded(data, *(f"accuracy/{name}" for name in names))
    average, std, worst5, best5, worst = (values for _, values, _ in columns[:5])
    series = [Series("mean", average, 0), Series("best 5 %", best5, 2)]
    if same(worst5, worst):
        series.append(Series("worst client (fewer than 40 evaluate, so it is also the worst 5 %)", worst, 1))
    else:
        series.append(Series("worst 5 %", worst5, 1))
        series.append(Series("worst client", worst, 4, dashed=True))
    band = (
        Series("", [m - s for m, s in zip(average, std, strict=True)], 0),
        Series("", [m + s for m, s in zip(average, std, strict=True)], 0),
    )
    caption = "Every client tests the model on its own data and counts the same, however much data it has."
    gap = last(average) - last(worst5)
    if not math.isfinite(gap):
        return line_figure(data, title, _NO_ACCURACY, series, ACCURACY, caption, columns)
    caption += (
        " The shaded band is one standard deviation of the clients about their mean. A mean that rises while the worst "
        f"5 % stay behind is bought at their expense: at the end the two are {100 * gap:.1f} percentage points apart. "
        "The worst 5 % are the mean of the lowest floor(0.05 N) clients, at least one; percentiles are in the table."
    )
    return line_figure(data, title, _NO_ACCURACY, series, ACCURACY, caption, columns, band=band)


def _spread(data: RunData) -> Html:
    title = "Spread of the accuracies"
    columns = recorded(data, "accuracy/std", "accuracy/variance", "accuracy/jain")
    std, _, jain = (values for _, values, _ in columns)
    caption = (
        "The standard deviation of the clients' accuracies: 0 would be the same accuracy for everybody. It also "
        "falls when everybody becomes equally bad, so read it beside the mean. Jain's index, in the table, says the "
        "same in relation to the mean: 1 for perfect equality, 1/N when one client has everything; at the end it is "
        f"{number(last(jain))}."
    )
    series = [Series("standard deviation", std, 3)]
    return line_figure(data, title, _NO_ACCURACY, series, Axis("accuracy", percent, low=0.0), caption, columns)


def _final(data: RunData) -> Html:
    title = "Every client at the end"
    final = data.final
    if final is None:
        return absent(title, absence(data, "No round of this run has been evaluated.", "evaluation"))
    better_high = final.measure == "accuracy"
    ordered = sorted(final.values.items(), key=lambda item: (item[1] if better_high else -item[1], item[0]))
    values = [value for _, value in ordered]
    average, tail = mean(values), max(1, int(0.05 * len(values)))
    format_ = percent if better_high else number
    axis = Axis(f"{final.split} {final.measure}", ACCURACY.format if better_high else general, low=0.0)
    line = Series(f"mean {format_(average)}", [average], 2)
    chart = charts.bars([name for name, _ in ordered], values, axis, marked=tail, line=line)
    caption = (
        f"After round {final.round}, {len(values)} clients on their own {final.split} data, the worst first; the "
        f"worst 5 % are outlined, the dashed line is the mean, {format_(average)}. The worst off is {ordered[0][0]} "
        f"with {format_(values[0])}. A steep left end is a group that the model does not serve: look there for data "
        "that no other client has, or for few rounds taken part in."
    )
    rows = [(name, format_(value)) for name, value in ordered]
    return figure(title, chart, caption, table(["client", f"{final.split} {final.measure}"], rows))


# --- loss


def _losses(data: RunData) -> Html:
    title = "Loss over the rounds"
    columns = recorded(data, "loss/train", "loss/validation", "loss/test")
    series = [Series(name, values, i) for i, (name, values, _) in enumerate(columns) if known(values)]
    no_loss = "No client reported a loss of a new model in this run."
    no_loss = absence(data, no_loss, *(f"loss/{split}" for split in SCORED))
    caption = (
        "Mean of the losses that the clients measured on their own data, on a logarithmic scale. Losses are claims: "
        "a client that reports a false loss changes this mean by any amount, and gains influence under a rule that "
        "reads losses. A training loss that falls while the test loss rises is overfitting."
    )
    columns = [column for column in columns if known(column[1])]
    return line_figure(data, title, no_loss, series, Axis("mean loss", general, log=True), caption, columns)


def _improved(data: RunData) -> Html:
    title = "Improved participants"
    promised, kept = data.metric("descent_share"), data.metric("improved")
    unknown = "Neither steps nor training losses are known in this run."
    series = [
        Series("training loss did not rise", kept, 0),
        Series("promised: update not against the direction", promised, 4, dashed=True),
    ]
    measured = f" On average {percent(mean(kept))} of the participants were better off." if known(kept) else ""
    caption = (
        "The share of a round's participants whose training loss did not rise in the step. The dashed line is what "
        "the direction promises to first order: the share of updates that have no negative cosine with it. For pure "
        "multi-gradient descent it is always 100 %. Where the promise is kept by fewer, the step was too long, or "
        f"one client's batch misled it.{measured}"
    )
    axis = replace(ACCURACY, name="share of the clients")
    return line_figure(data, title, unknown, series, axis, caption, recorded(data, "improved", "descent_share"))


# --- weights


def _weights(data: RunData) -> Html:
    title = "Weights λ, client by client"
    weights = data.weights
    if not any(map(known, weights.values())):
        return absent(title, absence(data, _NO_STEP, "weight"))
    chart = charts.heat(data.numbers, list(weights), list(weights.values()), number)
    rows = []
    for name, values in weights.items():
        own = known(values)
        least, largest = min(own, default=math.nan), max(own, default=math.nan)
        rows.append((name, str(len(own)), *map(number, (mean(own), least, largest))))
    caption = (
        "A row for each client, a column for each round, the darker the larger its weight; blank where it took no "
        "part. Plain averaging gives even rows. Multi-gradient descent gives weight to those whom the others would "
        "leave behind: a dark row is a client with unusual data, or one that tries to steer; its cosines in "
        "`fedpareto admin round` tell more. A single dark cell in a column is a round that one client decided."
    )
    return figure(title, chart, caption, table(["client", "steps", "mean λ", "least", "largest"], rows))


def _entropy(data: RunData) -> Html:
    title = "How many clients decided"
    entropy = data.metric("entropy")
    effective = [math.exp(value) for value in entropy]
    present = [
        float(item.summary.accepted) if math.isfinite(value) else math.nan
        for item, value in zip(data.rounds, entropy, strict=True)
    ]
    series = [Series("effective number", effective, 0), Series("updates accepted", present, 4, dashed=True)]
    caption = (
        "The effective number of clients, exp(entropy of λ): as many as took part when all weigh the same, 1 when "
        "one has all the weight. The further below the dashed line, the more selective the algorithm was."
    )
    columns = [*recorded(data, "entropy"), ("effective", effective, number), ("accepted", present, whole)]
    shares = data.metric("private/rule_share")
    if known(shares):
        moved = sum(share < 1 for share in known(shares))
        caption += (
            f" In {moved} of {len(known(shares))} private steps the coefficients were moved towards plain averaging, "
            "so that the others cover each member's update; on average "
            f"{percent(mean(known(shares)))} of the algorithm's own coefficients was left."
        )
        columns += recorded(data, "private/rule_share")
    return line_figure(data, title, _NO_STEP, series, Axis("clients", general, low=0.0), caption, columns)


# --- geometry


def _conflicts(data: RunData) -> Html:
    title = "Pairs in conflict"
    caption = (
        "How many pairs of updates have a negative inner product: what is good for the one is, to first order, bad "
        "for the other. The more the clients' data differ, and the nearer training is to its end, the more there "
        "are. In such a round, the average can raise the losses of some clients."
    )
    axis = Axis("pairs of updates", whole, low=0.0)
    series = [Series("pairs", data.metric("conflicts"), 1)]
    return line_figure(data, title, _NO_STEP, series, axis, caption, recorded(data, "conflicts"))


def _cosines(data: RunData) -> Html:
    title = "How deep the conflicts are, and whether the direction serves all"
    columns = recorded(data, "conflict_depth", "conflict_mean", "descent_min")
    depth, average, least = (values for _, values, _ in columns)
    series = [
        Series("least cosine of two updates in conflict", depth, 1),
        Series("mean of the pairs in conflict", average, 4, dashed=True),
        Series("least cosine of an update with the direction", least, 0),
    ]
    against = sum(value < -1e-9 for value in known(least))
    caption = (
        "Cosines: -1 is opposite, 0 at right angles. The lower lines tell how much the clients are against each "
        "other. The line with circles is the verdict on the step: above 0 it makes nobody worse, to first order; "
        f"below 0 it makes some clients worse. Here that was so in {against} of {len(known(least))} steps."
    )
    return line_figure(data, title, _NO_STEP, series, COSINE, caption, columns)


def _norms(data: RunData) -> Html:
    title = "Length of the direction, and what was left to gain for all"
    columns = recorded(data, "direction_norm", "stationarity", "stationarity/relative", "step/rate")
    norm, left = (values for _, values, _ in columns[:2])
    still = [str(item.summary.round) for item in data.rounds if item.summary.metrics.get("stationary") == 1]
    stood = (
        f" In {len(still)} rounds there was no such direction and the model stayed as it was ({some(still)}): it is "
        "Pareto-stationary for those participants, or one of them stands in the way on purpose."
        if still
        else ""
    )
    caption = (
        "On a logarithmic scale, the length of the direction that was taken, and of the shortest vector in the "
        "convex hull of the updates. The latter is 0 exactly at a Pareto-stationary point, where no direction is "
        "good for every participant: it tells how much common progress was left, whatever the algorithm made of it. "
        "Relative to the longest update it is in the table. A rule that normalises updates takes a direction of "
        f"another scale than theirs.{stood}"
    )
    series = [Series("direction", norm, 0), Series("shortest common direction", left, 2)]
    return line_figure(data, title, _NO_STEP, series, Axis("norm", general, log=True), caption, columns)
