"""The commands to runs: those of operators, and those of the coordinator itself while a fault lasts."""

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.exc import IntegrityError

from coordinator.cluster.leases import Leases
from coordinator.fault_state import FaultState
from coordinator.rounds.changes import RunChanges
from coordinator.rounds.conductors import Conductors
from coordinator.rounds.runs.run_states import HELD, HELD_REASONS, RunStates
from coordinator.rounds.runs.submission import Submission, new_run
from coordinator.rounds.transitions import UNDER_WAY, run_ids
from federation.record import log_entries
from federation.refusals import Refusal
from storage import audit
from storage.database import Database
from storage.faults import StorageFault, explain_fault
from storage.models import Assignment, Input, Phase, Round, Run
from storage.states import AssignmentState, RunState

log = logging.getLogger(__name__)


class RunCommands:
    """Takes the commands to the runs of a federation. Any thread may call.

    Args:
        database: the record.
        conductors: conduct the runs.
        leases: of this coordinator.
        states: changes the states of runs.
        changes: tells the watchers of a new run.
        faults: of the machine.
        clock: the time, aware.
        new_id: makes the ids of runs.
    """

    def __init__(
        self,
        database: Database,
        conductors: Conductors,
        leases: Leases,
        states: RunStates,
        changes: RunChanges,
        faults: FaultState,
        *,
        clock: Callable[[], datetime],
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._database = database
        self._conductors = conductors
        self._leases = leases
        self._states = states
        self._changes = changes
        self._faults = faults
        self._clock = clock
        self._new_id = new_id

    # --- of operators

    def submit(self, submission: Submission, model: str, *, by: str, paused: bool = False) -> str:
        """Takes a run, and returns its id. The initial model, named by its digest, has a row in `models` and a blob.

        A `paused` run waits for `resume` before its first round. `by` is the submitter, for the record.

        Raises:
            Refusal: `run-exists`.
        """
        now, spec, run_id = self._clock(), submission.spec, self._new_id()[:12]
        facts = submission.document, spec, submission.objectives, submission.metrics
        run = new_run(*facts, run_id=run_id, model=model, by=by, created=now)
        if paused:
            run.state = RunState.PAUSED
        detail, digest = f"{spec.name}, model {model}", run.spec_digest
        try:
            with self._database.begin() as session:
                submission.check_new(session)
                session.add(run)
                audit.record(
                    session,
                    at=now,
                    actor=by,
                    action=log_entries.SUBMITTED,
                    subject=run_id,
                    detail=detail,
                    digest=digest,
                )
        except IntegrityError:  # the name was taken at the same time, perhaps by way of another coordinator
            with self._database.read() as session:
                submission.check_new(session)
            raise
        if not paused:
            self._conductors.conduct(run_id)
        self._changes.notify(run_id)
        return run_id

    def pause(self, run_id: str, *, by: str) -> None:
        """Holds a run; replies to open assignments still count, and deadlines go on.

        Raises:
            Refusal: `run-state`.
        """
        self._states.move(run_id, RunState.PAUSED, by, "run.paused", f"paused by {by}")

    def resume(self, run_id: str, *, by: str) -> None:
        """Resumes a run. Of one that was paused because of the machine's clock, the operator vouches for the clock.

        Raises:
            Refusal: `run-state`.
        """
        clock_wrong = Run.reason.startswith(HELD[StorageFault.CLOCK][0])
        vouches = bool(self._runs(Run.run_id == run_id, Run.state == RunState.PAUSED, clock_wrong))
        self._states.move(run_id, RunState.RUNNING, by, "run.resumed", "")
        if vouches:
            self._faults.clock_vouched = True
        self._conductors.conduct(run_id)
        self._faults.look_again()

    def stop(self, run_id: str, *, by: str, reason: str = "") -> None:
        """Ends a run: open assignments are cancelled, the last completed model stays.

        Raises:
            Refusal: `run-state`.
        """
        self._states.move(run_id, RunState.STOPPED, by, "run.stopped", reason or f"stopped by {by}")

    # --- because of faults

    def pause_for_fault(self, fault: StorageFault, cause: str) -> None:
        """Holds every run that is under way until `resume_after_fault` or an operator resumes it.

        With several coordinators, the others take the runs, and only those that none has taken are held. `fault` is
        DISK, BLOB_STORE or CLOCK.
        """
        self._conductors.hold_back()
        begins, remedy = HELD[fault]
        for run_id in self._runs(Run.state.in_(UNDER_WAY), self._leases.unclaimed()):
            reason = f"{begins}{cause}; {remedy}: then it goes on by itself, or with `admin resume`"
            self._states.pause(run_id, reason)
            log.error("run %s: paused, %s", run_id, cause)

    def resume_after_fault(self) -> None:
        """Resumes the runs that `pause_for_fault` has paused, and that nobody has paused or stopped since."""
        if not self._conductors.conducts:
            return
        held = or_(*(Run.reason.startswith(begins) for begins in HELD_REASONS))
        for run_id in self._runs(Run.state == RunState.PAUSED, held):
            log.info("run %s: goes on, the fault is over", run_id)
            with suppress(Refusal):  # an operator was faster
                self._states.move(run_id, RunState.RUNNING, "coordinator", "run.resumed", "")
                self._conductors.conduct(run_id)

    def blob_failed(self, digest: str, error: Exception) -> None:
        """Holds every run whose clients were promised a blob that cannot be served, because of an error."""
        if self._faults.gone() is not None:
            return
        needs = or_(Assignment.base_model == digest, Assignment.inputs.any(Input.digest == digest))
        promised = (
            select(Round.run_id).join(Phase).join(Assignment).where(Assignment.state == AssignmentState.OPEN, needs)
        )
        for run_id in self._runs(Run.state == RunState.RUNNING, Run.run_id.in_(promised)):
            log.error("run %s: paused: %s", run_id, explain_fault(error))
            self._states.pause(run_id, f"storage: {error}; repair it, then resume the run")

    def _runs(self, *where: ColumnElement[bool]) -> Sequence[str]:
        with self._database.read() as session:
            return run_ids(session, *where)
