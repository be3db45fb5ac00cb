"""Views of alerts, as the messages of the Admin service."""

from sqlalchemy.orm import Session

from coordinator.alerts import rows
from coordinator.services.views.conversion import like
from federation.v1 import admin_pb2 as messages
from storage import models

ALERTS_OF_RUN = 100  # that a run shows


def alert(row: models.Alert, run_name: str | None) -> messages.Alert:
    """An alert, with the name of its run."""
    return like(messages.Alert, row, run_name=run_name)


def of_run(session: Session, item: models.Run) -> list[messages.Alert]:
    """The alerts about a run that last, and those that lasted at its end, newest first."""
    return [alert(row, item.name) for row in rows.of_run(session, item, ALERTS_OF_RUN)]
