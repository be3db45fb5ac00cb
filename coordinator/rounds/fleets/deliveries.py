"""Deliveries: messages on record for the clients that attend here and did not get them from a conductor here.

Ends of private rounds are told by conductors, too. A client may be told of one twice.

A conductor's messages to clients at other coordinators are on record: their assignments, with the ends of these. Each
coordinator looks for those of its own streams.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, func, or_, select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.presence import Assigned, AttendanceStream, Cancelled
from coordinator.rounds.transitions import EVALUATES, ROUND_ENDED, ROUND_OVER, RUN_ENDED
from federation.work.secure.terms import SessionStage
from storage.models import Assignment, Client, Phase, Round, Run
from storage.states import AssignmentState, ClientState, RoundState

_CHUNK = 500  # ids in one query
_NEWEST = 1000  # phases of the federation in which a client is told of private rounds that ended while it was away
_TOLD_AFTER_DEADLINE = timedelta(minutes=10)  # afterwards, a worker that waits knows by itself
_OVER = or_(
    Run.state.in_(RUN_ENDED),
    Round.state.in_(ROUND_ENDED),
    Phase.attempt < Round.attempt,
    and_(Round.state == RoundState.STEPPED, ~EVALUATES),
)
"""Selects the phases, of joined rounds and runs, whose private rounds ask nothing more of anybody."""


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


def sessions_ended(session: Session, *where: ColumnElement[bool]) -> list[tuple[str, Cancelled]]:
    """What clients are told of private rounds that are over, by client id, unless they have finished them themselves.

    The conditions select all assignments of a client in a session, or the newest ones.
    """
    return _told(session, _over(session, *where))


def sessions_ended_for(session: Session, client_id: str, now: datetime) -> list[Cancelled]:
    """What a client that comes back is told of private rounds that ended while it was away."""
    newest = select(func.max(Phase.phase_id)).scalar_subquery()
    recent = Phase.phase_id > newest - _NEWEST, Phase.deadline > now - _TOLD_AFTER_DEADLINE
    return [message for _, message in sessions_ended(session, Assignment.client_id == client_id, *recent)]


def _over(session: Session, *where: ColumnElement[bool]) -> list[Row[Any]]:
    """The assignments in private rounds that are over."""
    columns = Assignment.assignment_id, Assignment.client_id, Assignment.state, Run.state.label("run")
    query = select(*columns, Phase.kind, Phase.attempt, Phase.round_id, Phase.phase_id).join_from(Assignment, Phase)
    query = query.join(Round).join(Run).where(Phase.kind.in_(list(SessionStage)), _OVER, *where)
    return list(session.execute(query))


def _told(session: Session, rows: Iterable[Row[Any]]) -> list[tuple[str, Cancelled]]:
    begun: dict[tuple[str, int, int], int] = {}  # the sessions of a client in an attempt
    last: dict[tuple[str, int, int, int], Row[Any]] = {}
    for row in sorted(rows, key=lambda row: row.phase_id):
        attempt = (row.client_id, row.round_id, row.attempt)
        begun[attempt] = begun.get(attempt, 0) + (row.kind == SessionStage.READY)
        last[*attempt, begun[attempt]] = row
    # A member that has the receipt of its last reply has erased its values of the session.
    left = {
        row.assignment_id: row
        for row in last.values()
        if (row.kind, row.state) != (SessionStage.UNMASK, AssignmentState.FULFILLED)
    }
    told = []
    for chunk in _chunks(list(left)):
        envelopes = select(Assignment.assignment_id, Assignment.envelope).where(Assignment.assignment_id.in_(chunk))
        for assignment_id, envelope in session.execute(envelopes):
            row = left[assignment_id]
            reason = "run-ended" if row.run in RUN_ENDED else ROUND_OVER
            told.append((row.client_id, Cancelled.of(assignment_id, reason, envelope)))
    return told


def deliver(session: Session, streams: Mapping[str, AttendanceStream]) -> None:
    """Sends each stream, by client id, its new open assignments, and tells it which earlier ones have ended.

    Those of a private round stay `given` until it is over, so that its client is told. An assignment that is sent twice
    does no harm.
    """
    given = {assignment_id: stream for stream in streams.values() for assignment_id in list(stream.given)}
    is_open = _open(session, streams)
    new = [assignment_id for assignment_id in is_open if assignment_id not in given]
    for chunk in _chunks(new):
        rows = select(Assignment.assignment_id, Assignment.client_id, Assignment.envelope)
        for row in session.execute(rows.where(Assignment.assignment_id.in_(chunk)).order_by(Assignment.phase_id)):
            streams[row.client_id].say(Assigned(row.assignment_id, row.envelope))
    # One that is not on record yet in this snapshot was sent by a conductor a moment ago.
    over = list[Row[Any]]()
    for chunk in _chunks([assignment_id for assignment_id in given if assignment_id not in is_open]):
        columns = Assignment.assignment_id, Assignment.state, Assignment.reason, Assignment.envelope, Phase.kind
        ended = select(*columns).join_from(Assignment, Phase)
        ended = ended.where(Assignment.assignment_id.in_(chunk), Assignment.state != AssignmentState.OPEN)
        for assignment_id, state, reason, envelope, kind in session.execute(ended):
            if state in (AssignmentState.CANCELLED, AssignmentState.EXPIRED):
                given[assignment_id].say(Cancelled.of(assignment_id, reason, envelope))
                continue
            given[assignment_id].forget(assignment_id)
            if kind not in list(SessionStage):
                given[assignment_id].given.discard(assignment_id)
        over += _over(session, Assignment.assignment_id.in_(chunk))
    for client_id, message in _told(session, over):
        streams[client_id].say(message)
    for past in over:
        streams[past.client_id].given.discard(past.assignment_id)


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
