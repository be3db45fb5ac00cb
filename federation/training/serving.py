"""The objectives that a client serves, and what it reports of them."""

import math
import re
from collections.abc import Mapping, Sequence

from federation.spec.objective_names import JOINT, OBJECTIVE
from federation.tasks import Task, TaskError


def served(task: Task, objectives: Sequence[str] | None) -> tuple[str, ...]:
    """The objectives that a client serves, in the task's order; all of them for None.

    Raises:
        TaskError: none, or one that the task does not have.
    """
    wanted = task.objectives if objectives is None else tuple(objectives)
    if not wanted or not set(wanted) <= set(task.objectives):
        raise TaskError(
            f"task {task.name!r}: cannot serve {', '.join(wanted) or 'nothing'}; "
            f"its objectives are {', '.join(task.objectives)}"
        )
    return tuple(name for name in task.objectives if name in wanted)


def check_objectives(task: Task) -> None:
    """Raises TaskError if the name of an objective cannot stand in metrics, layouts and rows."""
    names = task.objectives
    several = len(names) > 1
    for name in names:
        if re.fullmatch(OBJECTIVE, name) is None or (several and name == JOINT) or name in ("accuracy", "samples"):
            raise TaskError(
                f"task {task.name!r}: {name!r} cannot be the name of an objective: lower-case letters, digits and "
                f"hyphens, and not accuracy, samples or (with others) {JOINT}"
            )
    if not names or len(set(names)) < len(names):
        raise TaskError(f"task {task.name!r}: its objectives are {names}; each needs a name of its own")


def reported_losses(scores: Mapping[str, float], objectives: Sequence[str]) -> dict[str, float]:
    """The losses as an update reports them: of each objective, and their mean. `scores` are those of `evaluate`."""
    if not scores:
        return {}
    return {**{name: scores.get(f"loss/{name}", scores["loss"]) for name in objectives}, JOINT: scores["loss"]}


def split_metrics(
    split: str, samples: int, scores: Mapping[str, float], *, undefined: bool = False
) -> dict[str, float]:
    """The metrics of a split as a reply names them; non-finite ones only if `undefined`."""
    metrics = {f"{split}/{name}": value for name, value in scores.items() if undefined or math.isfinite(value)}
    return {f"{split}/samples": float(samples), **metrics}
