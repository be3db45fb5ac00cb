"""Changes of the states of runs, and of the assignments of revoked clients: recorded, then told to those concerned."""

import logging
from collections.abc import Callable
from datetime import datetime

from sqlalchemy import select

from coordinator.rounds.changes import RunChanges
from coordinator.rounds.fleets.base import Fenced, RunFacts
from coordinator.rounds.fleets.deliveries import sessions_ended
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.replies.revoked import REVOKED
from coordinator.rounds.transitions import RUN_ENDED, end_assignment, end_conversation, move_run, open_assignments
from federation.refusals import Refusal
from storage import audit
from storage.database import Database
from storage.faults import StorageFault
from storage.models import Assignment, Client, Phase, Round, Run
from storage.states import AssignmentState, ClientState, RunState

log = logging.getLogger(__name__)

# Of a run that a fault has paused: how its reason begins, and what an operator can do.
HELD = {
    StorageFault.DISK: ("disk: ", "free some space, or see to the disk"),
    StorageFault.BLOB_STORE: ("blob-store: ", "see to the bucket"),
    StorageFault.CLOCK: ("clock: ", "set the clock of the machine right"),
}
HELD_REASONS = tuple(begins for begins, _ in HELD.values())


class RunStates:
    """Changes the states of runs. Any thread may call.

    Args:
        database: the record.
        presence: tells the clients that attend of cancelled assignments.
        changes: tells the conductors and watchers.
        clock: the time, aware.
    """

    def __init__(
        self, database: Database, presence: Presence, changes: RunChanges, clock: Callable[[], datetime]
    ) -> None:
        self._database = database
        self._presence = presence
        self._changes = changes
        self._clock = clock

    def move(
        self, run_id: str, to: RunState, by: str, action: str, reason: str, *, conducting: RunFacts | None = None
    ) -> None:
        """Moves a run. If its conductor does, `conducting` is what it conducts.

        Raises:
            Refusal: `run-state`.
            Fenced: the conductor may not write about the run any more.
        """
        now = self._clock()
        with self._database.begin() as session:
            run = conducting.locked(session) if conducting else session.get_one(Run, run_id, with_for_update=True)
            if to is RunState.PAUSED is run.state and run.reason.startswith(HELD_REASONS):
                run.reason = reason  # the operator's pause lasts when the fault is over
            else:
                move_run(run, to, now, reason)
            round_id, cancelled = end_conversation(session, run_id, reason, now) if to in RUN_ENDED else (None, [])
            audit.record(session, at=now, actor=by, action=action, subject=run_id, detail=reason)
        self._presence.say_cancelled(run_id, cancelled)
        if round_id is not None:
            with self._database.read() as session:
                ended = sessions_ended(session, Round.round_id == round_id, Phase.attempt == Round.attempt)
            self._presence.say_all(run_id, ended)
        self._changes.notify(run_id)

    def pause(self, run_id: str, reason: str, conducting: RunFacts | None = None) -> None:
        """Pauses a run by the coordinator's own decision, unless it has ended, or another coordinator conducts it."""
        try:
            self.move(run_id, RunState.PAUSED, "coordinator", "run.paused", reason, conducting=conducting)
        except Refusal:
            log.info("run %s: had ended meanwhile", run_id)
        except Fenced as refused:
            log.warning("run %s: a change by this coordinator was refused: %s", run_id, refused)

    def end_revoked(self) -> None:
        """Cancels the open assignments of revoked clients, so that no round waits for them.

        It is called after a revocation is committed, and again at the start and by the housekeeper: the coordinator may
        have died, or lost its database, in between.
        """
        theirs = Assignment.client_id.in_(select(Client.client_id).where(Client.state == ClientState.REVOKED))
        with self._database.read() as session:
            left = select(Assignment.assignment_id).where(Assignment.state == AssignmentState.OPEN, theirs)
            if session.scalar(left.limit(1)) is None:
                return
        now = self._clock()
        with self._database.begin() as session:
            cancelled = open_assignments(session, theirs)
            for assignment in cancelled:
                end_assignment(assignment, AssignmentState.CANCELLED, now, REVOKED)
            runs = {assignment.phase.round.run_id for assignment in cancelled}
        for run_id in runs:
            self._changes.notify(run_id)
