"""PNG figures of an experiment; needs matplotlib (`fedpareto[experiments]`)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from experiments.definition import Cell, Experiment, Plot
from experiments.derived import preference_of
from experiments.published import number
from experiments.results import Result
from experiments.tables import SKIPPED, ours

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = NDArray[np.float64]


def draw(experiment: Experiment, results: Sequence[Result], directory: Path) -> list[Path]:
    """Draws every figure of an experiment for which there is something to show, and removes the others.

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
        "plane": _plane,
        "radar": _radar,
    }
    written = []
    for plot in experiment.plots:
        figure = Figure(figsize=(10, 6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(projection="polar" if plot.kind == "radar" else None)
        path = directory / f"{plot.slug}.png"
        if kinds[plot.kind](axes, experiment, plot, results):
            axes.set_title(plot.title)
            figure.savefig(path, dpi=120)
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def _curves(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[Result]) -> bool:
    """The mean over the seeds for each cell; published curves, which are over rounds, dashed in the same colour.

    A method that was made for one objective alone is shown where that is measured.
    """
    shown = dashed = False
    for index, cell in enumerate(experiment.cells()):
        if _is_of_another_objective(experiment, cell, plot.measure):
            continue
        along, values = _mean_curve([item for item in results if _is_of(item, cell)], plot.over, plot.measure)
        if not len(along) or len(along) < plot.smooth:
            continue
        colour = _colour(index)
        smoothed = np.convolve(values, np.full(plot.smooth, 1 / plot.smooth), mode="valid")
        axes.plot(along[plot.smooth - 1 :], smoothed, color=colour, label=cell.label, linewidth=1.5)
        shown = True
        if experiment.curves is not None and cell.method.curve and plot.over == "round":
            theirs = experiment.curves.curve(cell.method.curve, plot.measure)
            axes.plot(*theirs, color=colour, linestyle="--", linewidth=1)
            dashed = dashed or bool(theirs[0])
    axes.set_xlabel((plot.x or plot.over) + (" (dashed: published)" if dashed else ""))
    axes.set_ylabel(plot.axis)
    _legend(axes)
    return shown


def _mean_curve(results: Sequence[Result], *names: str) -> tuple[Series, ...]:
    """Several measures in the rounds that every seed has evaluated, in their order, each a mean over the seeds."""
    curves = [
        {
            item["round"]: [item[name] for name in names]
            for item in result.rounds
            if all(np.isfinite(item.get(name, np.nan)) for name in names)
        }
        for result in results
    ]
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    values = [np.mean([curve[t] for curve in curves], axis=0) for t in rounds]
    return tuple(np.array(values).T) if values else tuple(np.empty(0) for _ in names)


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
        (cell.method.name, cell.condition.name): item.mean
        for cell in experiment.cells()
        if np.isfinite((item := ours(results, cell, plot.measure)).mean) or item.skipped
    }
    names = (
        [item.name for item in experiment.methods if item.name in {method for method, _ in known}],
        [item.name for item in experiment.conditions if item.name in {condition for _, condition in known}],
    )
    values = np.array([[known.get((method, condition), np.nan) for condition in names[1]] for method in names[0]])
    if not np.isfinite(values).any():
        return False
    figure: Any = axes.figure
    figure.set_size_inches(3 + 0.55 * values.shape[1], 2.5 + 0.4 * values.shape[0])
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(values.shape[1]), names[1], rotation=60, ha="right")
    axes.set_yticks(range(values.shape[0]), names[0])
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(j, i, f"{value:.0f}", ha="center", va="center", color="white" if value < 60 else "black")
        elif (names[0][i], names[1][j]) in known:
            axes.text(j, i, SKIPPED, ha="center", va="center", color="grey", fontsize="xx-small")
    figure.colorbar(image, label=plot.axis)
    return True


def _plane(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[Result]) -> bool:
    """Where two objectives went: thin paths over the rounds, dots at the end; dashed, the rays of preferences.

    Along a ray r_1 F_1 = r_2 F_2. Methods that were made for one objective alone are dotted lines at what they got it
    to.
    """
    names = (plot.measure, plot.against)
    alone = {method: name for name, method in experiment.derived.delta_m.items()}
    ends, rays = list[tuple[float, float]](), list[tuple[str, tuple[float, ...]]]()
    for index, cell in enumerate(experiment.cells()):
        own = [item for item in results if _is_of(item, cell)]
        end = tuple(ours(own, cell, name).mean for name in names)
        if not np.isfinite(end).all():
            continue
        colour = _colour(index)
        if cell.method.name in alone:
            first = _objective(alone[cell.method.name]) == _objective(plot.measure)
            (axes.axvline if first else axes.axhline)(end[not first], color=colour, linestyle=":", label=cell.label)
            continue
        axes.plot(*_mean_curve(own, *names), color=colour, linewidth=0.7, alpha=0.6)
        axes.plot(*end, "o", color=colour, label=cell.label, zorder=3)
        ends.append((end[0], end[1]))
        if preference := preference_of(cell.document):
            rays.append((colour, preference))
    if not ends:
        return False
    # The beginning of a path is far away: the picture is of where they end.
    axes.set_xlim(0, 1.4 * max(x for x, _ in ends))
    axes.set_ylim(0, 1.4 * max(y for _, y in ends))
    for colour, r in rays:
        axes.axline((0, 0), slope=r[0] / r[1], color=colour, linestyle="--", linewidth=0.8)
    axes.set_xlabel(plot.axis)
    axes.set_ylabel(plot.x)
    _legend(axes)
    return True


def _radar(axes: "Axes", experiment: Experiment, plot: Plot, results: Sequence[Result]) -> bool:
    """Each measure as a share of the largest of those compared (section 9.7); for losses, inside is better."""
    cells = [cell for cell in experiment.cells() if any(_is_of(item, cell) for item in results)]
    names = list(dict.fromkeys(name for item in results for name in item.final if name.startswith(plot.measure)))
    values = np.array([[ours(results, cell, name).mean for name in names] for cell in cells])
    if len(names) < 3:
        return False
    shares = values / np.nanmax(values, axis=0)
    angles = np.linspace(0, 2 * np.pi, len(names), endpoint=False)
    for index, cell in enumerate(cells):
        axes.plot([*angles, angles[0]], [*shares[index], shares[index, 0]], color=_colour(index), label=cell.label)
    axes.set_xticks(angles, [name.removeprefix(plot.measure) for name in names])
    axes.tick_params(axis="x", pad=12)
    axes.set_ylim(0, 1)
    axes.figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    return True


def _is_of_another_objective(experiment: Experiment, cell: Cell, measure: str) -> bool:
    own = [_objective(name) for name, method in experiment.derived.delta_m.items() if method == cell.method.name]
    return bool(own) and _objective(measure) not in own


def _objective(measure: str) -> str:
    return measure.rpartition("/")[2]


def _is_of(result: Result, cell: Cell) -> bool:
    return (result.method, result.condition) == (cell.method.name, cell.condition.name)


def _colour(index: int) -> str:
    return f"C{index}" if index < 10 else ("black", "gold", "navy", "lime", "maroon", "teal", "coral")[index % 7]


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", ncols=2)
