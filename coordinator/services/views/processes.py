"""Views of the coordinator processes: who serves, which runs each conducts, and how many members attend there."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from sqlalchemy import func, select, true
from sqlalchemy.orm import Session

from coordinator.cluster.leases import database_time
from coordinator.services.views.conversion import like
from federation.v1 import admin_pb2 as messages
from storage.models import AttendanceRow, CoordinatorProcess, Run
from storage.states import RunState


def coordinator_processes(
    session: Session, *, serves_many: bool, lease: timedelta, here: int, now: datetime
) -> Iterator[messages.CoordinatorProcess]:
    """The coordinators of a database, the oldest first.

    A coordinator that is alone (not `serves_many`) keeps leases and attendances in memory: it is alive `now`, conducts
    each run that is under way, and has `here` members. Others are alive for a `lease` after their last sign of life.
    """
    alive = CoordinatorProcess.last_seen > database_time(-lease) if serves_many else true()
    rows = session.execute(
        select(CoordinatorProcess, alive).order_by(CoordinatorProcess.started, CoordinatorProcess.coordinator)
    ).all()
    for row, is_alive in rows:
        conducted = Run.conductor == row.coordinator if serves_many else true()
        runs = session.scalars(select(Run).where(Run.state == RunState.RUNNING, conducted).order_by(Run.created))
        members = here
        if serves_many:
            attends = AttendanceRow.coordinator == row.coordinator, AttendanceRow.left.is_(None)
            members = session.scalar(select(func.count()).select_from(AttendanceRow).where(*attends)) or 0
        yield like(
            messages.CoordinatorProcess,
            row,
            last_seen=row.last_seen if serves_many else now,
            alive=bool(is_alive),
            runs=[like(messages.ConductedRun, run) for run in runs],
            members=members if is_alive else 0,
        )
