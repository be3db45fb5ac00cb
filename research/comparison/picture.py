"""Mean against worst member: a panel a task, a point a rule, with the 95 % intervals of both over the seeds."""

import math
from collections.abc import Sequence
from pathlib import Path

from comparison.catalogue import AFTER, TASKS
from comparison.verdict import LEVEL, RULES
from fedpareto.experiments.result_store import RunResult

_MARKERS = "osD^v<>PX*hd"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the half width of its 95 % interval by Student's t; 0 for one value."""
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, 0.0
    from scipy.special import stdtrit  # noqa: PLC0415 - few commands need it

    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, float(stdtrit(n - 1, LEVEL)) * deviation / math.sqrt(n)


def draw(results: Sequence[RunResult], path: Path, *, condition: str = "honest", after: int = AFTER[-1]) -> None:
    """Draws the tasks that have runs under a condition. Losses fall to the right and upwards, as accuracies rise."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    there = [task for task in TASKS if any(run.condition == f"{task}, {condition}" for run in results)]
    columns = min(3, max(1, len(there)))
    rows = max(1, math.ceil(len(there) / columns))
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.6 * rows), squeeze=False)
    for panel, task in zip(axes.flat, there, strict=False):
        for number, rule in enumerate(RULES):
            own = [run for run in results if run.method == rule and run.condition == f"{task}, {condition}"]
            points = [
                (run.final.get(f"{after}/mean", math.nan), run.final.get(f"{after}/worst", math.nan)) for run in own
            ]
            points = [point for point in points if all(map(math.isfinite, point))]
            if points:
                (x, dx), (y, dy) = (interval(values) for values in zip(*points, strict=True))
                panel.errorbar(x, y, xerr=dx, yerr=dy, fmt=_MARKERS[number], capsize=2, label=rule)
        unit = "loss" if TASKS[task].loss else "accuracy (%)"
        panel.set(title=task, xlabel=f"mean, {unit}", ylabel=f"worst member, {unit}")
        if TASKS[task].loss:
            panel.invert_xaxis()
            panel.invert_yaxis()
    for panel in axes.flat[len(there) :]:
        panel.set_visible(False)
    if there:
        axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
