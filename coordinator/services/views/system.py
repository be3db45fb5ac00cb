"""The coordinator's software, its newest backup, and the refusals for limits, as a message of the Admin service."""

from datetime import datetime, timedelta
from importlib.metadata import version

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from federation.v1 import admin_pb2 as messages
from storage import audit
from storage.models import AuditEntry

LIMITS_PERIOD = timedelta(days=7)
_MOST_LIMITS = 50
_BACKED_UP = "backup.made"


def system(session: Session, now: datetime) -> messages.GetSystemResponse:
    """The software that serves the database of `session`, and the limits that were hit in the week before `now`."""
    response = messages.GetSystemResponse(
        version=version("fedpareto"), database=_database(session), entries=audit.size(session)
    )
    backed_up = session.scalar(select(func.max(AuditEntry.at)).where(AuditEntry.action == _BACKED_UP))
    if backed_up is not None:
        response.backed_up.FromDatetime(backed_up)
    row, times = AuditEntry, func.sum(AuditEntry.times)
    hits = (
        select(row.outcome, row.actor, times, func.max(row.at))
        .where(row.at >= now - LIMITS_PERIOD, or_(row.outcome == "limit", row.outcome.startswith("limit:")))
        .group_by(row.outcome, row.actor)
        .order_by(times.desc(), row.outcome, row.actor)
        .limit(_MOST_LIMITS)
    )
    for reason, actor, count, last in session.execute(hits):
        response.limits.add(reason=reason, actor=actor, times=int(count)).last.FromDatetime(last)
    return response


def _database(session: Session) -> str:
    dialect = session.get_bind().dialect
    name = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(dialect.name, dialect.name)
    numbers = getattr(dialect, "server_version_info", None) or dialect.dbapi.sqlite_version_info  # type: ignore[union-attr]
    return f"{name} {'.'.join(map(str, numbers))}"
