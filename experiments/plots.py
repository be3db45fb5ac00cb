"""PNG figures of an experiment; needs matplotlib (`fedpareto[experiments]`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.definition import Cell, Experiment, Plot, slug
from experiments.published import number
from experiments.results import Result
from experiments.tables import ours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = NDArray[np.float64]


def draw(experiment: Experiment, results: Sequence[Result], directory: Path) -> list[Path]:
    """Draws every figure of an experiment for which there is something to show.

    Returns:
        The files that were written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    kinds: Mapping[str, Callable[[Axes, Experiment, Plot, Sequence[Result]], bool]] = {
        "curves": _curves,
        "bars": _bars,
        "sweep": _sweep,
        "heat": _heat,
    }
    written = []
    for plot in experiment.plots:
        figure = Figure(figsize=(10, 6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if kinds[plot.kind](axes, experiment, plot, results):
            axes.set_title(plot.title)
            path = directory / f"{slug(plot.kind + '-' + plot.measure)}.png"
            figure.savefig(path, dpi=120)
            written.append(path)
    return written


def _curves(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[Result]) -> bool:
    """The mean over the seeds for each cell; published curves dashed, in the same colour."""
    shown = False
    for index, cell in enumerate(experiment.cells()):
        rounds, values = _mean_curve([item for item in results if _is_of(item, cell)], plot)
        if not len(rounds):
            continue
        colour = _colour(index)
        axes.plot(rounds, values, color=colour, label=cell.label, linewidth=1.5)
        shown = True
        if experiment.curves is not None and cell.method.curve:
            theirs = experiment.curves.curve(cell.method.curve, plot.measure)
            axes.plot(*theirs, color=colour, linestyle="--", linewidth=1)
    axes.set_xlabel("round" + (" (dashed: published)" if experiment.curves is not None else ""))
    axes.set_ylabel(plot.axis)
    _legend(axes)
    return shown


def _mean_curve(results: Sequence[Result], plot: Plot) -> tuple[Series, Series]:
    """Rounds that every seed has evaluated, and the mean of the measure there, smoothed over `plot.smooth` of them."""
    curves = [
        {
            int(item["round"]): item[plot.measure]
            for item in result.rounds
            if np.isfinite(item.get(plot.measure, np.nan))
        }
        for result in results
    ]
    if not curves:
        return np.empty(0), np.empty(0)
    rounds = np.array(sorted(set.intersection(*map(set, curves))), dtype=np.float64)
    if len(rounds) < plot.smooth:
        return np.empty(0), np.empty(0)
    values = np.mean([[curve[int(t)] for t in rounds] for curve in curves], axis=0)
    values = np.convolve(values, np.full(plot.smooth, 1 / plot.smooth), mode="valid")
    return rounds[plot.smooth - 1 :], values


def _bars(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[Result]) -> bool:
    """A bar for each cell with the deviation over its seeds; what was published as a dot."""
    cells = [cell for cell in experiment.cells() if np.isfinite(ours(results, cell, plot.measure).mean)]
    spreads = [ours(results, cell, plot.measure) for cell in cells]
    positions = np.arange(len(cells))
    axes.barh(
        positions,
        [item.mean for item in spreads],
        xerr=np.nan_to_num([item.deviation for item in spreads]),
        color="tab:blue",
        label="ours",
    )
    column = next((item.published for item in experiment.columns if item.measure == plot.measure), "")
    if column:
        theirs = [number(experiment.published_values(cell), column) for cell in cells]
        axes.plot(theirs, positions, "o", color="tab:orange", label="published")
        _legend(axes)
    axes.set_yticks(positions, [cell.label for cell in cells])
    axes.invert_yaxis()
    axes.set_xlabel(plot.axis)
    return bool(cells)


def _sweep(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[Result]) -> bool:
    """The methods that have an `x`, in its order, a line for each condition; the others are level lines."""
    shown = False
    for index, condition in enumerate(experiment.conditions):
        cells = [cell for cell in experiment.cells() if cell.condition.name == condition.name]
        points = [
            (cell.method.x, item)
            for cell in cells
            if cell.method.x is not None and np.isfinite((item := ours(results, cell, plot.measure)).mean)
        ]
        points.sort(key=lambda point: point[0])
        if points:
            axes.errorbar(
                [x for x, _ in points],
                [item.mean for _, item in points],
                np.nan_to_num([item.deviation for _, item in points]),
                marker="o",
                capsize=3,
                color=_colour(index),
                label=condition.name or "ours",
            )
            shown = True
        for cell in cells:
            level = ours(results, cell, plot.measure).mean
            if cell.method.x is None and np.isfinite(level):
                axes.axhline(level, linestyle=":", color="grey")
                axes.annotate(cell.label, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.axis)
    _legend(axes)
    return shown


def _heat(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[Result]) -> bool:
    """Methods down, conditions across, the measure as colour and number."""
    known = {
        (cell.method.name, cell.condition.name): value
        for cell in experiment.cells()
        if np.isfinite(value := ours(results, cell, plot.measure).mean)
    }
    names = (
        [item.name for item in experiment.methods if item.name in {method for method, _ in known}],
        [item.name for item in experiment.conditions if item.name in {condition for _, condition in known}],
    )
    values = np.array([[known.get((method, condition), np.nan) for condition in names[1]] for method in names[0]])
    if not known:
        return False
    figure: Any = axes.figure
    figure.set_size_inches(3 + 0.55 * values.shape[1], 2.5 + 0.4 * values.shape[0])
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(values.shape[1]), names[1], rotation=60, ha="right")
    axes.set_yticks(range(values.shape[0]), names[0])
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(j, i, f"{value:.0f}", ha="center", va="center", color="white" if value < 60 else "black")
    figure.colorbar(image, label=plot.axis)
    return True


def _is_of(result: Result, cell: Cell) -> bool:
    return (result.method, result.condition) == (cell.method.name, cell.condition.name)


def _colour(index: int) -> str:
    return f"C{index}" if index < 10 else ("black", "gold", "navy", "lime", "maroon", "teal", "coral")[index % 7]


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", ncols=2)
