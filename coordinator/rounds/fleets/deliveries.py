"""Deliveries: messages on record for the clients that attend here and did not get them from a conductor here.

A conductor's messages to clients at other coordinators are on record: their assignments, with the ends of these. Each
coordinator looks for those of its own streams.
"""

from collections.abc import Collection, Mapping

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.presence import Assigned, AttendanceStream, Cancelled
from storage.models import Assignment, Client
from storage.states import AssignmentState, ClientState

_CHUNK = 500  # ids in one query


def open_assignments_of(session: Session, client_id: str) -> list[Assigned]:
    """The open assignments of a client, oldest first; none while it waits for approval."""
    if session.get_one(Client, client_id).state is not ClientState.ACTIVE:
        return []
    rows = session.execute(
        select(Assignment.assignment_id, Assignment.envelope)
        .where(Assignment.client_id == client_id, Assignment.state == AssignmentState.OPEN)
        .order_by(Assignment.phase_id)
    )
    return [Assigned(assignment_id, envelope) for assignment_id, envelope in rows]


def deliver(session: Session, streams: Mapping[str, AttendanceStream]) -> None:
    """Sends each stream, by client id, its new open assignments, and tells it which earlier ones have ended.

    An assignment that is sent twice does no harm.
    """
    given = {assignment_id: stream for stream in streams.values() for assignment_id in list(stream.given)}
    is_open = _open(session, streams)
    new = [assignment_id for assignment_id in is_open if assignment_id not in given]
    for chunk in _chunks(new):
        rows = select(Assignment.assignment_id, Assignment.client_id, Assignment.envelope)
        for row in session.execute(rows.where(Assignment.assignment_id.in_(chunk)).order_by(Assignment.phase_id)):
            streams[row.client_id].say(Assigned(row.assignment_id, row.envelope))
    # One that is not on record yet in this snapshot was sent by a conductor a moment ago.
    for chunk in _chunks([assignment_id for assignment_id in given if assignment_id not in is_open]):
        ended = select(Assignment.assignment_id, Assignment.state, Assignment.reason)
        ended = ended.where(Assignment.assignment_id.in_(chunk), Assignment.state != AssignmentState.OPEN)
        for assignment_id, state, reason in session.execute(ended):
            if state in (AssignmentState.CANCELLED, AssignmentState.EXPIRED):
                given[assignment_id].say(Cancelled(assignment_id, reason))
            else:
                given[assignment_id].given.discard(assignment_id)


def _open(session: Session, clients: Collection[str]) -> set[str]:
    """The ids of the open assignments of active clients."""
    is_open = set[str]()
    for chunk in _chunks(list(clients)):
        query = select(Assignment.assignment_id).join(Client, Client.client_id == Assignment.client_id)
        query = query.where(Assignment.client_id.in_(chunk), Assignment.state == AssignmentState.OPEN)
        is_open.update(session.scalars(query.where(Client.state == ClientState.ACTIVE)))
    return is_open


def _chunks(ids: list[str]) -> list[list[str]]:
    return [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)]
