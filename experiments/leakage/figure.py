"""The figure for a data protection officer: for each view, the labels that are guessed, and true and found images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.definition import Cell, Experiment
from experiments.results import Measures, RunResult
from experiments.tables import ours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 6  # images of one condition
_SIDE = 8
_INK = 16
_BASELINES = ("nothing", "random")


def draw(figure: "Figure", experiment: Experiment, title: str, results: Sequence[RunResult]) -> bool:
    """Draws a row for each method: on the left its guesses of labels, on the right images of the least seed.

    Returns:
        Whether there are results for both.
    """
    cells = [cell for cell in experiment.cells() if any(item.is_of(cell) for item in results)]
    of_labels = list(dict.fromkeys(cell.condition.name for cell in cells if cell.document["attack"] == "labels"))
    of_images = list(dict.fromkeys(cell.condition.name for cell in cells if cell.document["attack"] == "images"))
    if not of_labels or not of_images:
        return False
    shown = (of_images[0], of_images[-1]) if len(of_images) > 1 else (of_images[0],)
    by_key = {cell.key: cell for cell in cells}
    methods = [method.name for method in experiment.methods if any(cell.method == method for cell in cells)]
    figure.set_size_inches(4 + 4.5 * len(shown), 1.6 + 0.5 * len(methods))
    figure.suptitle(title)
    figure.supxlabel(
        "green frame: recognised, that is, the nearest of all images of this digit is the true one; "
        "at the right of a row: recognised of all attacked images",
        fontsize="small",
    )
    grid = figure.add_gridspec(
        len(methods) + 1, 1 + len(shown) * (_COLUMNS + 1), width_ratios=[7, *[*[1] * _COLUMNS, 1.2] * len(shown)]
    )
    _bars(figure.add_subplot(grid[1:, 0]), by_key, methods, of_labels, results)
    for block, condition in enumerate(shown):
        first = 1 + block * (_COLUMNS + 1)
        for row, method in enumerate(["", *methods]):
            named = by_key.get((method or _with_images(by_key, methods, condition), condition))
            rows = _images(named, results) if named else []
            for column, image in enumerate(rows[:_COLUMNS]):
                axes = figure.add_subplot(grid[row, first + column])
                _picture(axes, image, "pixel" if method else "true")
            axes = figure.add_subplot(grid[row, first + _COLUMNS])
            axes.axis("off")
            if row == 0:
                text = f"true\n{condition.removeprefix('images, ')}"
            else:
                text = f"{ours(results, named, 'images/found').mean:.0f} %" if named else "–"
            axes.text(0, 0.5, text, va="center", fontsize="small")
    return True


def _bars(
    axes: "Axes",
    cells: dict[tuple[str, str], Cell],
    methods: list[str],
    conditions: list[str],
    results: Sequence[RunResult],
) -> None:
    """100 (1 - total-variation distance) of each method under each condition; a dashed line for the best baseline."""
    height = 0.8 / len(conditions)
    baseline = 0.0
    for index, condition in enumerate(conditions):
        found = [(row, cells[method, condition]) for row, method in enumerate(methods) if (method, condition) in cells]
        spreads = [ours(results, cell, "labels/distance") for _, cell in found]
        right = [100 * (1 - spread.mean) for spread in spreads]
        positions = [row + (index - (len(conditions) - 1) / 2) * height for row, _ in found]
        errors = [100 * float(np.nan_to_num(spread.deviation)) for spread in spreads]
        axes.barh(
            positions, right, height, xerr=errors, color=f"C{index}", label=condition, error_kw={"linewidth": 0.7}
        )
        known = [value for value, (_, cell) in zip(right, found, strict=True) if cell.document["view"] in _BASELINES]
        baseline = max([baseline, *known])
    axes.axvline(baseline, linestyle="--", color="grey", linewidth=1)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("labels guessed right (%)\ndashed: with no message")
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))


def _with_images(cells: dict[tuple[str, str], Cell], methods: list[str], condition: str) -> str:
    return next(method for method in methods if (method, condition) in cells)


def _images(cell: Cell, results: Sequence[RunResult]) -> list[Measures]:
    runs = sorted((item for item in results if item.is_of(cell)), key=lambda item: item.seed)
    return runs[0].rounds if runs else []


def _picture(axes: "Axes", image: Measures, name: str) -> None:
    pixels = np.array([image[f"{name}/{i}"] for i in range(_SIDE * _SIDE)]).reshape(_SIDE, _SIDE)
    axes.imshow(pixels, cmap="gray_r", vmin=0, vmax=_INK)
    axes.set_xticks([])
    axes.set_yticks([])
    spines: Any = axes.spines
    spines[:].set_color("green" if name == "pixel" and image["found"] else "lightgrey")
    spines[:].set_linewidth(1.5)
