"""The end of a run's conversation: what is open when a run is stopped or fails."""

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.states import close_phase, end_assignment, move_round
from storage.models import Assignment, AssignmentState, Phase, PhaseState, Round, RoundState


def end_conversation(session: Session, run_id: str, reason: str, at: datetime) -> list[Assignment]:
    """Ends the round of a run that has ended: cancels what is open. Returns the cancelled assignments."""
    current = session.scalar(
        select(Round).where(Round.run_id == run_id, Round.state.in_([RoundState.OPEN, RoundState.STEPPED]))
    )
    if current is None:
        return []
    cancelled = []
    for phase in session.scalars(
        select(Phase).where(Phase.round_id == current.round_id, Phase.state == PhaseState.OPEN).with_for_update()
    ):
        # Locked, for a reply may be accepted at this very moment: it stays accepted.
        for assignment in session.scalars(
            select(Assignment)
            .where(Assignment.phase_id == phase.phase_id, Assignment.state == AssignmentState.OPEN)
            .order_by(Assignment.assignment_id)
            .with_for_update()
        ):
            end_assignment(assignment, AssignmentState.CANCELLED, at, "run-ended")
            cancelled.append(assignment)
        close_phase(phase, at)
    ended = RoundState.SKIPPED if current.state is RoundState.OPEN else RoundState.COMPLETED
    move_round(current, ended, at, f"the run ended: {reason}")
    return cancelled
