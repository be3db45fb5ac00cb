"""Accepted replies that do not count because their members were revoked before the step.

The assignment stays FULFILLED, as its receipt says, with the reason `client-revoked`. This is recorded before the
replies of its phase are used without it, so that a restart leaves out the same ones.
"""

from sqlalchemy import Select, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from storage.models import Assignment, Client, Phase, Round
from storage.states import AssignmentState, ClientState

REVOKED = "client-revoked"
LEFT = "client-left"  # the reason of an assignment that has ended because its client has left


def of_revoked(phase_id: int) -> Select[Assignment]:
    """Selects the assignments of a phase that are fulfilled and count, though their clients are revoked by now."""
    return _of_revoked().where(Assignment.phase_id == phase_id).order_by(Assignment.client_id)


def revoked_clients(session: Session) -> frozenset[str]:
    """The clients that are revoked by now."""
    return frozenset(session.scalars(select(Client.client_id).where(Client.state == ClientState.REVOKED)))


def gone_clients(session: Session, round_id: int) -> frozenset[str]:
    """The clients that a rule forgets in a round: those that are revoked by now, and those that left before it.

    One that was asked in the round, and has left since, is forgotten from the next round on.
    """
    asked = select(Assignment.client_id).join(Phase).where(Phase.round_id == round_id)
    left = select(Client.client_id).where(Client.state == ClientState.LEFT, Client.client_id.not_in(asked))
    return revoked_clients(session) | frozenset(session.scalars(left))


def revoked_before(session: Session, current: Round, number: int) -> bool:
    """True if a phase before `number` in this attempt at a round counts replies of clients that are revoked by now."""
    earlier = _of_revoked().join(Phase, Phase.phase_id == Assignment.phase_id)
    conditions = (Phase.round_id == current.round_id, Phase.attempt == current.attempt, Phase.number < number)
    return session.scalar(earlier.where(*conditions).limit(1)) is not None


def fulfilled(session: Session, phase_id: int) -> int:
    """The number of accepted replies of a phase from clients that are not revoked."""
    return session.scalar(count_fulfilled(phase_id)) or 0


def count_fulfilled(phase_id: int | InstrumentedAttribute[int]) -> Select[int]:
    """Selects this number; the phase may be one of an enclosing query."""
    count = select(func.count()).select_from(Assignment).join(Client, Client.client_id == Assignment.client_id)
    accepted = (Assignment.phase_id == phase_id, Assignment.state == AssignmentState.FULFILLED)
    return count.where(*accepted, Client.state != ClientState.REVOKED)


def left_out(session: Session, round_id: int) -> list[str]:
    """The clients whose accepted replies of a round do not count, by name."""
    clients = select(Assignment.client_id).join(Phase, Phase.phase_id == Assignment.phase_id).distinct()
    conditions = (
        Phase.round_id == round_id,
        Assignment.state == AssignmentState.FULFILLED,
        Assignment.reason == REVOKED,
    )
    return sorted(session.scalars(clients.where(*conditions)))


def _of_revoked() -> Select[Assignment]:
    return (
        select(Assignment)
        .join(Client, Client.client_id == Assignment.client_id)
        .where(
            Assignment.state == AssignmentState.FULFILLED,
            Assignment.reason != REVOKED,
            Client.state == ClientState.REVOKED,
        )
    )
