"""The tasks that members offer, for operators whose run names another one."""

from collections import Counter

from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.text import counted
from storage import models
from storage.states import ClientState

LISTED_TASKS = 8


def missing_offer(session: Session, task: str) -> str:
    """Says that no active client offers a task, and lists the offered ones; empty if one does, or none offers any."""
    active = session.scalars(select(models.Client.tasks).where(models.Client.state == ClientState.ACTIVE))
    counts = Counter(name for tasks in active for name, samples in tasks.items() if samples > 0)
    if not counts or task in counts:
        return ""
    offered = [f"{name} ({counted(count, 'member')})" for name, count in sorted(counts.items())]
    more = f" and {len(offered) - LISTED_TASKS} more" if len(offered) > LISTED_TASKS else ""
    return f"no member offers {task}; they offer {', '.join(offered[:LISTED_TASKS])}{more}"
