"""The figures of a run with several objectives, beside other runs of the same task."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from federation.aggregation.metrics.metrics import delta_m
from federation.record.metric_definitions import SCORED
from federation.text import counted
from fedpareto.formatting import number, percent
from fedpareto.series import first, known, last, mean
from fedpareto.web.pages import heat
from fedpareto.web.pages.charts import Series
from fedpareto.web.pages.html import Html, join, table, tag
from fedpareto.web.pages.marks import COLOURS
from fedpareto.web.pages.plane import Guide, Path, plane
from fedpareto.web.pages.radar import radar
from fedpareto.web.pages.scales import ACCURACY, COSINE, Axis, Format, general
from fedpareto.web.sections.layout import absence, absent, figure, line_figure, over_rounds, recorded
from fedpareto.web.sections.shown_run import ShownRun

_NO_LOSSES = "No member reported the losses of the objectives in this run."
LINES = 12  # objectives that get a line of their own; more become the rows of a heat map
_TRAINED = ("train", "validation", "test")  # a preference and the weights are about training losses


def figures(data: ShownRun, beside: Sequence[ShownRun]) -> Iterator[Html]:
    """The figures of a run; runs of `beside` that train for one objective alone show what is possible in it."""
    alone = [run for run in beside if run.alone]
    runs = [data, *(run for run in beside if not run.alone)]
    yield _front(runs, alone) if len(data.objectives) == 2 else _radar(runs)
    yield _ends(runs, alone)
    yield _weights(data)
    yield _losses(data)
    yield _accuracies(data)
    yield _conflicts(data)


# --- at the end


def _front(runs: Sequence[ShownRun], alone: Sequence[ShownRun]) -> Html:
    title = "The way through the plane of losses"
    across, up = runs[0].objectives
    split = runs[0].split(_TRAINED)
    if split is None:
        return absent(title, absence(runs[0], _NO_LOSSES, "accuracy/mean"))
    paths = []
    for index, run in enumerate(runs):
        losses = run.losses(split)
        labels = [
            f"round {round_}: {across} {general(x)}, {up} {general(y)}"
            for round_, x, y in zip(run.numbers, losses[across], losses[up], strict=True)
        ]
        paths.append(Path(run.label, losses[across], losses[up], labels, index % COLOURS))
    guides, remarks = [], ""
    for run in alone:
        least = min(known(run.losses(split)[run.alone or ""]), default=math.nan)
        if math.isfinite(least):
            guides.append(Guide(f"{run.alone} alone", **{"x" if run.alone == across else "y": least}))
            remarks += f" For {run.alone} alone, {run.label} comes down to {number(least)}."
    preferences = [run.preference for run in runs if run.preference]
    for r in {tuple(preference): preference for preference in preferences}.values():
        guides.append(Guide(f"{general(r[0])} · {across} = {general(r[1])} · {up}", slope=r[0] / r[1]))
    if preferences:
        remarks += (
            " The line through the corner is what was preferred: there the losses stand in the wanted proportion."
        )
    caption = (
        f"Each run as a path, from the ring to the filled mark: how large its mean {split} losses in {across} (across) "
        f"and {up} (up) are, over the members that serve them, round by round. Nearer to the corner is better; "
        f"a path that turns along one axis buys one objective with the other.{remarks}"
    )
    axes = Axis(f"{split} loss, {across}", general, low=0.0), Axis(f"{split} loss, {up}", general, low=0.0)
    ends = "; ".join(
        f"{path.name} from {_point(path.known[0])} to {_point(path.known[-1])}" for path in paths if path.known
    )
    words = f"The {split} losses in {across} and {up}: {ends}."
    columns: list[tuple[str, Sequence[float], Format]] = [
        (name, values, number) for name, values in runs[0].losses(split).items()
    ]
    if known(runs[0].metric("preference/divergence")):
        columns += recorded(runs[0], "preference/divergence")
    return figure(
        title, plane(paths, *axes, guides=guides, alt=title, words=words), caption, over_rounds(runs[0], columns)
    )


def _point(point: tuple[float, float, str]) -> str:
    return f"({general(point[0])}, {general(point[1])})"


def _radar(runs: Sequence[ShownRun]) -> Html:
    title = "All objectives at once"
    names = runs[0].objectives
    split = runs[0].split(SCORED)
    if split is None:
        return absent(title, absence(runs[0], _NO_LOSSES, "accuracy/mean"))
    named_values = [(run.label, run.at_the_end(f"loss/{split}/")) for run in runs]
    if len(runs) == 1:
        losses = runs[0].losses(split).values()
        named_values = [("first round", [first(values) for values in losses]), ("at the end", named_values[0][1])]
    columns = zip(*(values for _, values in named_values), strict=True)
    largest = [max(known(column), default=math.nan) for column in columns]
    series = []
    for index, (name, values) in enumerate(named_values):
        shares = [value / top if top else math.nan for value, top in zip(values, largest, strict=True)]
        series.append(Series(name, shares, index % COLOURS))
    caption = (
        f"An axis for each objective, with the mean {split} loss divided by the largest of those that are compared "
        "(in brackets): the middle would be no loss at all, the rim is the worst of them. A polygon within another "
        "one is better in everything; where they cross, each is better in something."
    )
    means = "; ".join(f"{line.name} {percent(mean(line.values))}" for line in series)
    words = f"The {split} losses in {len(names)} objectives, on average of the largest: {means}."
    rows = [(name, *(number(values[k]) for _, values in named_values)) for k, name in enumerate(names)]
    chart = radar(names, series, largest, alt=title, words=words)
    return figure(title, chart, caption, table(["objective", *(name for name, _ in named_values)], rows))


def _ends(runs: Sequence[ShownRun], alone: Sequence[ShownRun]) -> Html:
    """Every run at its end, as a table; with Delta_M where every objective was trained for alone."""
    names = runs[0].objectives
    accurate = any(known(run.at_the_end("accuracy/objective/")) for run in runs)
    split = runs[0].split(SCORED) or "test"
    prefix, measure = ("accuracy/objective/", "accuracy") if accurate else (f"loss/{split}/", f"{split} loss")
    best = {run.alone: run.at_the_end(prefix)[names.index(run.alone)] for run in alone if run.alone}
    baselines = [best.get(name, math.nan) for name in names]
    text_of: Format = percent if accurate else number
    rows = []
    for run in [*runs, *alone]:
        values = run.at_the_end(prefix)
        whole = run not in alone and all(map(math.isfinite, [*values, *baselines])) and 0 not in baselines
        cost = f"{delta_m(values, baselines, [accurate] * len(names)):+.2f} %" if whole else "–"
        rows.append((run.label, run.run.algorithm, *map(text_of, [*values, mean(values)]), *([cost] if alone else [])))
    caption = f"The {measure} in each objective after the last evaluated round, over the members that serve it."
    if alone:
        caption += (
            " Δ_M is the mean change against the runs that train for one objective alone, positive where it is worse; "
            "it takes one of those for every objective."
        )
    columns = ["run", "algorithm", *names, "mean", *(["Δ_M"] if alone else [])]
    return tag("figure", tag("h3", "At the end"), table(columns, rows, words=2), tag("figcaption", caption))


# --- over the rounds


def _per_objective(
    data: ShownRun, title: str, values: dict[str, list[float]], axis: Axis, caption: str, text_of: Format = number
) -> Html:
    columns = [(name, line, text_of) for name, line in values.items()]
    if len(values) > LINES:
        chart = heat.heat(data.numbers, list(values), list(values.values()), axis.format, alt=title)
        return figure(title, chart, caption, over_rounds(data, columns))
    series = [
        Series(name, line, index % COLOURS, dashed=index >= COLOURS)
        for index, (name, line) in enumerate(values.items())
    ]
    return line_figure(data, title, "", series, axis, caption, columns)


def _weights(data: ShownRun) -> Html:
    title = "Weights λ of the objectives"
    weights = {name: data.metric(f"weight/{name}") for name in data.objectives}
    if not any(map(known, weights.values())):
        return absent(title, f"The algorithm of this run, {data.run.algorithm}, does not weigh objectives.")
    notes = [(str(line.number), note) for line in data.lines for note in line.objectives.notes]
    modes = Counter(line.objectives.mode for line in data.lines if line.objectives.mode)
    results = (result for line in data.lines for result in line.objectives.results)
    left_out = Counter(result.name for result in results if result.left_out)
    modes_text = ", ".join(f"{mode} in {count}" for mode, count in modes.items())
    left_out_text = "".join(f" {name} was left out of {counted(count, 'round')}." for name, count in left_out.items())
    caption = (
        "How much each objective counts in a step. Multi-gradient descent gives weight to an objective "
        "that the others would leave behind: the one whose gradients are short, or stand against the rest. How they "
        f"were found, by rounds: {modes_text or 'not on record'}.{left_out_text}"
    )
    chart = _per_objective(data, title, weights, Axis("weight", general, low=0.0, high=1.0), caption)
    if not notes:
        return chart
    return join([chart, _notes(notes)])


def _notes(notes: Sequence[tuple[str, str]]) -> Html:
    """The notes of the algorithm on its weights."""
    return tag("figure", tag("h3", "Notes on the weights"), table(["round", "note"], notes, words=2))


def _losses(data: ShownRun) -> Html:
    title = "Loss of each objective"
    split = data.split(SCORED)
    if split is None:
        return absent(title, absence(data, _NO_LOSSES, "accuracy/mean"))
    losses = data.losses(split)
    caption = (
        f"The mean {split} loss of the new model in each objective, over the members that serve it, on a logarithmic "
        "scale. Losses of different kinds do not compare in height: their slopes tell which are being served."
    )
    return _per_objective(data, title, losses, Axis(f"{split} loss", general, log=True), caption)


def _accuracies(data: ShownRun) -> Html:
    title = "Accuracy in each objective"
    accuracies = {name: data.metric(f"accuracy/objective/{name}") for name in data.objectives}
    if not any(map(known, accuracies.values())):
        return absent(
            title, absence(data, "No member reported an accuracy in an objective in this run.", "accuracy/mean")
        )
    at_end = {name: last(line) for name, line in accuracies.items() if known(line)}
    worst = min(at_end, key=lambda name: at_end[name])
    caption = (
        "The mean accuracy in each objective over the members that serve it. At the end the lowest is "
        f"{percent(at_end[worst])}, in {worst}."
    )
    return _per_objective(data, title, accuracies, ACCURACY, caption, percent)


def _conflicts(data: ShownRun) -> Html:
    title = "Conflicts between objectives"
    names = ("conflicts", "conflict_depth", "conflict_mean", "stationarity")
    columns = recorded(data, *(f"objective/{name}" for name in names))
    _, depth, average, _ = (values for _, values, _ in columns)
    why = absence(data, "The algorithm of this run does not compare the objectives with each other.", "weight")
    caption = (
        "The least cosine of two objectives whose gradients (or averaged updates) are against each other, and the mean "
        "of all such pairs; 0 where there is none. The deeper, the more one objective has to pay for another. The "
        "table has the number of pairs, and the length of the weighted sum: 0 where no step serves all objectives."
    )
    series = [Series("least cosine", depth, 1), Series("mean of the pairs in conflict", average, 4, dashed=True)]
    return line_figure(data, title, why, series, replace(COSINE, high=0.0, bounded=False), caption, columns)
