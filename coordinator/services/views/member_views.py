"""Views of join strings, requests of officers and administrators, as the messages of the Admin service."""

from datetime import datetime

from coordinator.members.administrators import ListedAdministrator
from coordinator.services.views.conversion import like
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import SignedEnvelope
from storage import models
from storage.states import RequestState


def join_string(row: models.JoinString, now: datetime) -> messages.JoinString:
    """A join string, without its secret, and its state at the time `now`."""
    state = "OPEN"
    if row.used is not None:
        state = "USED"
    elif row.cancelled is not None:
        state = "CANCELLED"
    elif row.expires <= now:
        state = "EXPIRED"
    return like(messages.JoinString, row, state=f"JOIN_STRING_STATE_{state}", ended=row.used or row.cancelled)


def request(row: models.ActionRequest, now: datetime) -> messages.ActionRequest:
    """A request of an officer, with its state at the time `now`."""
    expired = row.state is RequestState.OPEN and row.expires <= now
    return like(
        messages.ActionRequest,
        row,
        state=messages.RequestState.Value(f"REQUEST_STATE_{'EXPIRED' if expired else row.state}"),
        request=SignedEnvelope.FromString(row.envelope),
        decision=None if row.decision is None else SignedEnvelope.FromString(row.decision),
    )


def administrator(listed: ListedAdministrator) -> messages.Administrator:
    """An administrator with its newest certificate."""
    return like(
        messages.Administrator,
        listed.row,
        serial=listed.certificate and listed.certificate.serial,
        certificate_expires=listed.certificate and listed.certificate.not_after,
        revoked=listed.row.ended,
    )
