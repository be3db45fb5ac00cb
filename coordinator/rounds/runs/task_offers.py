"""The tasks that members offer, for operators whose run names another one."""

from collections import Counter

from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.spec.run_spec import RunSpec
from federation.text import counted
from storage import models
from storage.states import ClientState

LISTED_TASKS = 8


def missing_offer(session: Session, spec: RunSpec) -> str:
    """Why a run cannot begin: no active client offers its task. Lists the offered ones; empty if no client offers any.

    A run that describes data can have a task that is offered for statistics alone, with 0 samples.
    """
    task, least = spec.task, 0 if spec.describes else 1
    active = session.scalars(select(models.Client.tasks).where(models.Client.state == ClientState.ACTIVE))
    counts = Counter(name for tasks in active for name, samples in tasks.items() if samples >= least)
    if not counts or task in counts:
        return ""
    offered = [f"{name} ({counted(count, 'member')})" for name, count in sorted(counts.items())]
    more = f" and {len(offered) - LISTED_TASKS} more" if len(offered) > LISTED_TASKS else ""
    return f"no member offers {task}; they offer {', '.join(offered[:LISTED_TASKS])}{more}"
