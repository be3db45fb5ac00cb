"""The conductor: takes one run from where the database says that it stands to its end.

Crash only: whatever the conductor knows is in the database or the blob store before it acts on it. After `kill -9` at
any instant, the next conductor runs the algorithm's generator again, feeds it the stored replies, and goes on; given
the same replies it makes the same bytes.

    begin a round    (opening.py: who is selected)                                        OPEN
      for each phase that the generator yields (conversation.py):
        ask the fleet, send its replies to the generator
      make the step  (step.py: result model, Gram matrix, signed step, the run's model)   STEPPED
      evaluate       (finish.py: one more phase, on the new model)                        COMPLETED
"""

import logging

from coordinator.aggregation.phases import Step, Voided
from coordinator.aggregation.registry import algorithm
from coordinator.aggregation.streaming import one_thread
from coordinator.rounds import record
from coordinator.rounds.conversation import Conversation
from coordinator.rounds.finish import Finish
from coordinator.rounds.fleets.base import Fleet, RevokedMeanwhile, RunFacts, Skipped, Surroundings
from coordinator.rounds.opening import Opening
from coordinator.rounds.participation import WarningLog
from coordinator.rounds.states import move_round, move_run
from coordinator.rounds.step import make_step, read_memory, record_step
from storage.models import Round, RoundState, Run, RunState

log = logging.getLogger(__name__)


class Conductor:
    """Conducts one run. `conduct` returns when the run has ended; it raises Held when it is held."""

    def __init__(self, run: RunFacts, around: Surroundings, fleet: Fleet) -> None:
        self._run = run
        self._around = around
        self._database = around.database
        self._algorithm = algorithm(run.spec.algorithm.name, run.spec.algorithm.hyperparameters)
        self._opening = Opening(run, around, fleet)
        self._conversation = Conversation(run, around, fleet, self._algorithm)
        self._finish = Finish(run, around, fleet, self._algorithm)
        self._warnings = WarningLog(around.database, run.run_id)

    def conduct(self) -> None:
        """Round after round until the run has ended.

        Raises:
            Held: the run was paused or stopped, or the coordinator is stopping.
        """
        with self._database.begin() as session:
            run = session.get_one(Run, self._run.run_id, with_for_update=True)
            if run.state is RunState.PENDING:
                move_run(run, RunState.RUNNING, self._around.clock())
        while True:
            self._run.must_run(self._database)
            self._around.wait(0)
            current = self._opening.round()
            if current is None:
                return
            try:
                if current.state is RoundState.OPEN:
                    self._step(current)
                self._finish.round(current.round_id)
            except Skipped as skipped:
                self._skip(current, str(skipped))
            self._warnings.round_ended()
            self._around.changed()

    def _step(self, current: Round) -> None:
        """Makes the round's step, of replies of members that are members when it is recorded.

        Raises:
            Skipped: there is no step.
        """
        while True:
            try:
                step, phases = self._conversation.hold(current)
                self._aggregate(current, step, phases)
            except RevokedMeanwhile:
                log.warning("run %s round %d: a member was revoked; without it", self._run.run_id, current.number)
            except Voided as voided:
                current = self._void(current, str(voided))
            else:
                return

    def _aggregate(self, current: Round, step: Step, phases: int) -> None:
        """Makes the new model, stores it, and records the signed step."""
        with self._database.read() as session:
            memory = read_memory(session, self._run, self._around.evidence, current.number, current.base_model)
        with one_thread():
            made = make_step(
                step,
                algorithm=self._algorithm,
                spec=self._run.spec,
                number=current.number,
                base_model=current.base_model,
                memory=memory,
                blobs=self._around.blobs,
                device=self._around.device,
            )
        record_step(self._run, self._around, current, step, phases, made)

    def _void(self, current: Round, why: str) -> Round:
        """Begins the next attempt at a round.

        Raises:
            Skipped: this was the last one.
        """
        attempts = self._run.spec.limits.attempts
        if current.attempt + 1 >= attempts:
            raise Skipped(f"voided: {attempts} attempts; the last one: {why}")
        with self._database.begin() as session:
            self._run.running(session)
            round_ = session.get_one(Round, current.round_id)
            round_.attempt += 1
        log.warning("run %s round %d: attempt %d voided: %s", self._run.run_id, current.number, current.attempt, why)
        self._around.changed()
        return round_

    def _skip(self, current: Round, why: str) -> None:
        with self._database.begin() as session:
            self._run.running(session)
            round_ = session.get_one(Round, current.round_id)
            round_.metrics = record.traffic(session, current.round_id)
            move_round(round_, RoundState.SKIPPED, self._around.clock(), why)
        log.warning("run %s round %d: skipped: %s", self._run.run_id, current.number, why)
