"""PNG figures of an experiment; needs matplotlib (`fedpareto[experiments]`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedpareto.experiments.comparison_tables import SKIPPED, Spread, ours
from fedpareto.experiments.definition import Cell, Experiment, Plot
from fedpareto.experiments.derived import preference_of
from fedpareto.experiments.published_numbers import number
from fedpareto.experiments.result_store import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from federation.tasks.census import Census

_NAMED = 20  # clients or classes with a name of their own in a chart of a partition
_SIDE, _INK = 8, 16  # of images: their pixels a side, and the darkest grey level


def draw(experiment: Experiment, results: Sequence[RunResult], directory: Path) -> list[Path]:
    """Draws each figure of an experiment for which there are results, and removes the others.

    Returns:
        The files that were written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415

    written = []
    for plot in experiment.plots:
        figure = Figure(figsize=(10, 6), layout="constrained")
        path = directory / f"{plot.slug}.png"
        axes = figure.add_subplot(projection="polar" if plot.kind == "radar" else None)
        axes.set_title(plot.title)
        if _KINDS[plot.kind](axes, experiment, plot, results):
            figure.savefig(path, dpi=120)
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def draw_census(census: "Census", names: Sequence[str], title: str, path: Path) -> None:
    """Draws a bar for each client of a partition, stacked by class.

    Raises:
        OSError, ValueError: matplotlib cannot write such a file.
    """
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    named = len(census.classes) > 0
    counts, labels = (census.counts, census.classes) if named else (census.sizes, ["train", "validation", "test"])
    few = len(labels) <= 10
    colours = colormaps["tab10"](range(10)) if few else colormaps["turbo"](np.linspace(0, 1, len(labels)))
    edges = np.arange(len(counts) + 1) - 0.5
    tops = np.cumsum(counts, axis=1)
    for label, top, count, colour in zip(labels, tops.T, counts.T, colours, strict=False):
        axes.stairs(top, edges, baseline=top - count, fill=True, color=colour, label=str(label))
    axes.set(title=title, xlabel="client", ylabel="samples", xlim=(edges[0], edges[-1]))
    if len(names) <= _NAMED:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    if len(labels) <= _NAMED:
        axes.legend(title="class" if named else None, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


def _curves(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[RunResult]) -> bool:
    """The mean over the seeds for each cell; published curves over rounds are dashed, in the same colour.

    A method that optimises one objective alone is shown only in the figures of this objective.
    """
    alone, own, dashed = _alone(experiment), _objective(plot.measure), False
    for index, cell in enumerate(experiment.cells()):
        if alone.get(cell.method.name, own) != own:
            continue
        along, values = _mean_curve([item for item in results if item.is_of(cell)], plot.over, plot.measure)
        if len(along) < plot.smooth:
            continue
        smoothed = np.convolve(values, np.full(plot.smooth, 1 / plot.smooth), mode="valid")
        axes.plot(along[plot.smooth - 1 :], smoothed, color=_colour(index), label=cell.label, linewidth=1.5)
        if experiment.curves is not None and cell.method.curve and plot.over == "round":
            theirs = experiment.curves.curve(cell.method.curve, plot.measure)
            axes.plot(*theirs, color=_colour(index), linestyle="--", linewidth=1)
            dashed = dashed or bool(theirs[0])
    _label(axes, (plot.x or plot.over) + (" (dashed: published)" if dashed else ""), plot.axis)
    return bool(axes.lines)


def _mean_curve(results: Sequence[RunResult], *names: str) -> tuple[NDArray[np.float64], ...]:
    """Measures in the rounds that every seed has evaluated, in their order, each as a mean over the seeds."""
    seeds = [{item["round"]: [item.get(name, np.nan) for name in names] for item in run.rounds} for run in results]
    curves = [{t: values for t, values in seed.items() if np.isfinite(values).all()} for seed in seeds]
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    values = [np.mean([curve[t] for curve in curves], axis=0) for t in rounds]
    return tuple(np.array(values).reshape(-1, len(names)).T)


def _bars(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[RunResult]) -> bool:
    """A bar for each cell with the deviation over its seeds; a dot for the published number."""
    measured = _measured(experiment, results, plot.measure)
    positions = np.arange(len(measured))
    deviations = np.nan_to_num([spread.deviation for _, spread in measured])
    axes.barh(positions, [spread.mean for _, spread in measured], xerr=deviations, color="tab:blue", label="ours")
    column = next((item.published for item in experiment.columns if item.measure == plot.measure), "")
    if column:
        theirs = [number(experiment.published_values(cell), column) for cell, _ in measured]
        axes.plot(theirs, positions, "o", color="tab:orange", label="published")
    axes.set_yticks(positions, [cell.label for cell, _ in measured])
    axes.invert_yaxis()
    _label(axes, plot.axis, "", legend=bool(column))
    return bool(measured)


def _sweep(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[RunResult]) -> bool:
    """A line for each condition through the methods with an `x`; a horizontal line for each other method."""
    measured = _measured(experiment, results, plot.measure)
    for index, condition in enumerate(experiment.conditions):
        own = [(cell.method.x, spread) for cell, spread in measured if cell.condition == condition]
        points = sorted((x, spread.mean, spread.deviation) for x, spread in own if x is not None)
        if points:
            x, means, deviations = np.nan_to_num(points).T
            label = condition.name or "ours"
            axes.errorbar(x, means, deviations, marker="o", capsize=3, color=_colour(index), label=label)
    for cell, level in measured:
        if cell.method.x is None:
            axes.axhline(level.mean, linestyle=":", color="grey")
            axes.annotate(cell.label, (1, level.mean), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    _label(axes, plot.x, plot.axis)
    return bool(axes.containers)


def _heat(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[RunResult]) -> bool:
    """Methods down, conditions across, the measure as colour and number."""
    means = {cell.key: spread.mean for cell, spread in _measured(experiment, results, plot.measure, skipped=True)}
    methods, conditions = experiment.grid(means)
    values = np.array([[means.get((method, condition), np.nan) for condition in conditions] for method in methods])
    if not np.isfinite(values).any():
        return False
    figure: Any = axes.figure
    figure.set_size_inches(max(9, 3 + 0.55 * len(conditions)), 2.5 + 0.4 * len(methods))
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=plot.top, aspect="auto")
    axes.set_xticks(range(len(conditions)), conditions, rotation=60, ha="right")
    axes.set_yticks(range(len(methods)), methods)
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            text, colour = f"{value:.{0 if plot.top > 1 else 2}f}", "white" if value < 0.6 * plot.top else "black"
            axes.text(j, i, text, ha="center", va="center", color=colour)
        elif (methods[i], conditions[j]) in means:
            axes.text(j, i, SKIPPED, ha="center", va="center", color="grey", fontsize="xx-small")
    figure.colorbar(image, label=plot.axis)
    return True


def _plane(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[RunResult]) -> bool:
    """Paths over the rounds in the plane of two objectives, with a dot at each end.

    The ray of a preference, r_1 F_1 = r_2 F_2, is dashed. A method that optimises one objective alone is a dotted line
    at its value of this objective.
    """
    names = (plot.measure, plot.against)
    alone, ends, rays = _alone(experiment), [], []
    for index, cell in enumerate(experiment.cells()):
        runs = [item for item in results if item.is_of(cell)]
        end = tuple(ours(runs, cell, name).mean for name in names)
        if not np.isfinite(end).all():
            continue
        colour = _colour(index)
        if cell.method.name in alone:
            first = alone[cell.method.name] == _objective(plot.measure)
            (axes.axvline if first else axes.axhline)(end[not first], color=colour, linestyle=":", label=cell.label)
            continue
        axes.plot(*_mean_curve(runs, *names), color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(*end, "o", color=colour, label=cell.label, zorder=3)
        ends.append(end)
        if r := preference_of(cell.document):
            rays.append((colour, r[0] / r[1]))
    if not ends:
        return False
    # Paths begin far from where they end; the limits show the ends.
    right, top = 1.4 * np.max(ends, axis=0)
    axes.set(xlim=(0, right), ylim=(0, top))
    for colour, slope in rays:
        axes.axline((0, 0), slope=slope, color=colour, linestyle="--", linewidth=0.8)
    _label(axes, plot.axis, plot.x)
    return True


def _radar(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[RunResult]) -> bool:
    """Each measure divided by the largest value of the cells; for losses, a smaller polygon is better."""
    cells = [cell for cell in experiment.cells() if any(item.is_of(cell) for item in results)]
    names = list(dict.fromkeys(name for item in results for name in item.final if name.startswith(plot.measure)))
    if len(names) < 3:
        return False
    values = np.array([[ours(results, cell, name).mean for name in names] for cell in cells])
    shares = values / np.nanmax(values, axis=0)
    angles = np.linspace(0, 2 * np.pi, len(names), endpoint=False)
    for index, cell in enumerate(cells):
        axes.plot([*angles, angles[0]], [*shares[index], shares[index, 0]], color=_colour(index), label=cell.label)
    axes.set_xticks(angles, [name.removeprefix(plot.measure) for name in names])
    axes.tick_params(axis="x", pad=12)
    axes.set_ylim(0, 1)
    axes.figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    return True


def _images(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[RunResult]) -> bool:
    """Methods down, conditions across: the first images of the least seed, and the true ones in the first row.

    An image for which the measure is not 0 has a green frame.
    """
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    by_seed = sorted(results, key=lambda item: -item.seed)
    found = {(item.method, item.condition): item.rounds for item in by_seed if "pixel/0" in (item.rounds or [{}])[0]}
    if not found:
        return False
    methods, conditions = experiment.grid(found)
    step = _SIDE + 2
    width = step * (1 + max(map(len, found.values())))
    canvas = np.full((step * (1 + len(methods)), width * len(conditions)), np.nan)
    for (method, condition), images in found.items():
        row = step * (1 + methods.index(method))
        for place, image in enumerate(images):
            column = width * conditions.index(condition) + step * place
            for name, top in (("true", 0), ("pixel", row)):
                pixels = np.reshape([image[f"{name}/{i}"] for i in range(_SIDE**2)], (_SIDE, _SIDE))
                canvas[top : top + _SIDE, column : column + _SIDE] = pixels
            frame = "green" if image[plot.measure] else "lightgrey"
            axes.add_patch(Rectangle((column - 1, row - 1), _SIDE + 1, _SIDE + 1, fill=False, edgecolor=frame))
    figure: Any = axes.figure
    figure.set_size_inches(4 + 0.05 * canvas.shape[1], 1 + 0.05 * canvas.shape[0])
    axes.imshow(canvas, cmap="gray_r", vmin=0, vmax=_INK)
    axes.set(xlim=(-2, canvas.shape[1] - step), ylim=(canvas.shape[0], -2), xlabel=plot.axis)
    axes.set_xticks(width * (0.5 + np.arange(len(conditions))) - step / 2, conditions)
    axes.set_yticks(step * np.arange(1 + len(methods)) + _SIDE / 2, ["true", *methods])
    return True


_KINDS = {
    "curves": _curves,
    "bars": _bars,
    "sweep": _sweep,
    "heat": _heat,
    "plane": _plane,
    "radar": _radar,
    "images": _images,
}


def _measured(
    experiment: Experiment, results: Sequence[RunResult], measure: str, *, skipped: bool = False
) -> list[tuple[Cell, Spread]]:
    """The cells for which a measure is known and, if wanted, those whose runs made no step."""
    spreads = ((cell, ours(results, cell, measure)) for cell in experiment.cells())
    return [item for item in spreads if np.isfinite(item[1].mean) or (skipped and item[1].missing == SKIPPED)]


def _alone(experiment: Experiment) -> dict[str, str]:
    """By method that optimises one objective alone: the objective."""
    return {method: _objective(measure) for measure, method in experiment.derived.delta_m.items()}


def _objective(measure: str) -> str:
    return measure.rpartition("/")[2]


def _colour(index: int) -> str:
    return f"C{index}" if index < 10 else ("black", "gold", "navy", "lime", "maroon", "teal", "coral")[index % 7]


def _label(axes: "Axes", horizontal: str, vertical: str, *, legend: bool = True) -> None:
    axes.set(xlabel=horizontal, ylabel=vertical)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", ncols=2)
