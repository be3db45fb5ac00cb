"""The objectives of a task that a client serves, and their losses."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from federation.objectives import JOINT, OBJECTIVE
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


def must_have_objectives(task: Task) -> None:
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


def losses(task: Task, output: object, y: Tensor) -> dict[str, Tensor]:
    """The mean loss of a batch for each objective. Raises TaskError if they are not those of the task's objectives."""
    found = task.losses(output, y)
    if set(found) != set(task.objectives):
        raise TaskError(
            f"task {task.name!r}: losses() returned {sorted(found)}, its objectives are {sorted(task.objectives)}"
        )
    return found


def weighted(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """sum_k weights_k losses_k; a single loss with weight 1 is returned as it is."""
    terms = [losses[name] if weight == 1.0 else weight * losses[name] for name, weight in weights.items()]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
