"""Views of alerts, as the messages of the Admin service."""

import re
from datetime import UTC, datetime, timedelta

from sqlalchemy.orm import Session

from coordinator.alerts import rows
from coordinator.services.views.conversion import like
from coordinator.services.views.paging import foreign_token
from federation.v1 import admin_pb2 as messages
from storage import models
from storage.columns import LARGEST_NUMBER

EPOCH, MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
_TOKEN = re.compile(r"([0-9]{1,17})-([0-9]{1,10})")  # microseconds since EPOCH, and an id
ALERTS_OF_RUN = 100  # that a run shows


def alert(row: models.Alert, run_name: str | None) -> messages.Alert:
    """An alert, with the name of its run."""
    return like(messages.Alert, row, run_name=run_name)


def token_after(row: models.Alert) -> str:
    """The page token of what comes after an alert in a list."""
    return f"{(row.began - EPOCH) // MICROSECOND}-{row.alert_id}"


def place_of(token: str) -> tuple[datetime, int] | None:
    """The beginning and the id of the alert after which a page begins; None of the first page.

    Raises:
        Refusal: `argument`.
    """
    if not token:
        return None
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise foreign_token(token)
    return EPOCH + int(found[1]) * MICROSECOND, min(int(found[2]), LARGEST_NUMBER)


def of_run(session: Session, item: models.Run) -> list[messages.Alert]:
    """The alerts about a run that last, and those that lasted at its end, newest first."""
    return [alert(row, item.name) for row in rows.of_run(session, item, ALERTS_OF_RUN)]
