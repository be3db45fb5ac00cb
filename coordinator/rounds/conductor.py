"""The conductor: continues one run from its state in the database to its end.

Crash only: each fact is in the database or the blob store before the conductor acts on it. After `kill -9`, the next
conductor runs the algorithm's generator again, sends it the stored replies, and goes on; the same replies give the same
bytes.

    begin a round    (opening.py: which clients are selected)                             OPEN
      for each phase that the generator yields (conversation.py):
        ask the fleet, send its replies to the generator
      make the step  (step.py: result model, Gram matrix; signed_results.py)              STEPPED
      evaluate       (finish.py: one more phase, on the new model)                        COMPLETED

A round whose model is not evaluated is completed in the transaction that records its step.

The rounds of a run that evaluates have no phases of an algorithm and no step.
"""

import logging
from collections.abc import Sequence
from typing import NoReturn

from sqlalchemy.orm import Session

from coordinator.rounds.conversation import run_phases
from coordinator.rounds.finish import completion, finish_round, measure_round, skip_round
from coordinator.rounds.fleets.base import Fleet, Held, RevokedMeanwhile, Skipped
from coordinator.rounds.opening import open_round
from coordinator.rounds.runs.private import record_named, since_pause
from coordinator.rounds.signed_results import record_step
from coordinator.rounds.step import make_step
from coordinator.rounds.transitions import ROUND_OVER, close_open_phases, move_run
from federation.aggregation.metrics.run_metrics import RunMetrics
from federation.aggregation.phases import Voided, Waiting
from federation.aggregation.registry import algorithm
from storage import audit
from storage.models import Assignment, Round
from storage.records import VoidRecord
from storage.states import RoundState, RunState

log = logging.getLogger(__name__)


class Conductor:
    """Conducts the run of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._run = fleet.run
        self._context = fleet.context
        self._algorithm = algorithm(fleet.run.spec.algorithm.name, fleet.run.spec.algorithm.hyperparameters)
        facts = fleet.run.spec, self._algorithm, fleet.run.objectives, fleet.run.metrics
        self._metrics = RunMetrics(*facts, conceals=fleet.conceals)

    def conduct(self) -> None:
        """Round after round until the run has ended.

        Raises:
            Fenced: another coordinator has taken the run.
            Held: the run was paused or stopped, or the coordinator is stopping.
        """
        with self._context.database.begin() as session:
            run = self._run.locked(session)
            if run.state is RunState.PENDING:
                move_run(run, RunState.RUNNING, self._context.clock())
        while True:
            self._context.wait(0)  # no mutant: without it the next phase sees a stop
            current = open_round(self._fleet)
            if current is None:
                return
            try:
                if not self._run.spec.trains:
                    measure_round(self._fleet, self._metrics, current)
                else:
                    if current.state is RoundState.OPEN:
                        self._step(current)
                    finish_round(self._fleet, self._metrics, current.round_id)
            except Skipped as skipped:
                skip_round(self._fleet, self._metrics, current, skipped)
            self._context.changed()

    def _step(self, current: Round) -> None:
        """Makes the round's step from replies of clients that are still members when it is recorded."""
        if current.given_up:  # before a restart
            raise self._given_up(current.voided[-1].reason)
        while True:
            try:
                step, phases = run_phases(self._fleet, self._algorithm, current)
                stepped = make_step(self._fleet, self._algorithm, current, step)
                completes = completion(self._fleet, current)
                record_step(self._fleet, self._metrics, current, step, phases, stepped, completes)
            except RevokedMeanwhile:
                log.warning("run %s round %d: a member was revoked; without it", self._run.run_id, current.number)
                if self._run.spec.privacy.secure != "off":  # its masks are in the others' replies
                    current = self._void(current, Voided("a member was revoked during the private round"))
            except Voided as voided:
                current = self._void(current, voided)
            except Waiting as waiting:
                self._pause(current, str(waiting))
            else:
                self._fleet.tell_ended(current, current.attempt)
                return

    def _void(self, current: Round, voided: Voided) -> Round:
        """Begins the next attempt at a round. Raises Skipped after the last one."""
        attempts, why, now = self._run.spec.limits.attempts, str(voided), self._context.clock()
        record = VoidRecord(attempt=current.attempt, reason=why, named=voided.named, blind=voided.blind)
        last = len(since_pause(current)) + 1 >= attempts
        where = f"run {self._run.run_id} round {current.number} attempt {current.attempt}"
        with self._context.database.begin() as session:
            self._run.running(session)
            round_, cancelled = self._note_void(session, current, record, begins_next=not last)
            # Section 4: in the transaction of the void: the audit log names a cheater if and only if the record does.
            record_named(session, current, voided.named, now)
        self._fleet.tell_cancelled(cancelled)
        self._fleet.tell_ended(current, record.attempt)
        log.warning("%s: voided: %s", where, why)
        if last:
            raise self._given_up(why)
        return round_

    def _given_up(self, why: str) -> Skipped:
        """The end of a round whose last attempt was voided."""
        return Skipped(f"voided: {self._run.spec.limits.attempts} attempts; the last one: {why}")

    def _pause(self, current: Round, why: str) -> NoReturn:
        """Pauses the run; when an operator resumes it, it begins the next attempt at the round. Raises Held."""
        with self._context.database.begin() as session:
            run, now = self._run.running(session), self._context.clock()
            move_run(run, RunState.PAUSED, now, why)
            audit.record(session, at=now, actor="coordinator", action="run.paused", subject=run.run_id, detail=why)
            record = VoidRecord(attempt=current.attempt, reason=why, paused=True)
            _, cancelled = self._note_void(session, current, record, begins_next=True)
        self._fleet.tell_cancelled(cancelled)
        self._fleet.tell_ended(current, record.attempt)
        log.warning("run %s: paused: %s", self._run.run_id, why)
        raise Held

    def _note_void(
        self, session: Session, current: Round, record: VoidRecord, *, begins_next: bool
    ) -> tuple[Round, Sequence[Assignment]]:
        """Records the end of an attempt. Returns the round, and the assignments that were open before a restart."""
        round_ = session.get_one(Round, current.round_id)
        round_.voided = (*round_.voided, record)
        round_.attempt += begins_next
        return round_, close_open_phases(session, round_.round_id, ROUND_OVER, self._context.clock())
