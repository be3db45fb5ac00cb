"""The beginning of a round: whether the run goes on, whom to wait for, who is asked. All of it is recorded first."""

import logging

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds import selection
from coordinator.rounds.fleets.base import Fleet, Held, RunFacts, Surroundings
from coordinator.rounds.states import move_run
from coordinator.rounds.step import read_memory
from storage import audit
from storage.models import Round, RoundState, Run, RunState

log = logging.getLogger(__name__)


class Opening:
    """Finds the round that is under way, or begins the next one.

    Args:
        run: the run.
        around: the coordinator.
        fleet: the clients.
    """

    def __init__(self, run: RunFacts, around: Surroundings, fleet: Fleet) -> None:
        self._run = run
        self._run_id = run.run_id
        self._spec = run.spec
        self._around = around
        self._database = around.database
        self._fleet = fleet

    def round(self) -> Round | None:
        """The round that is under way, or a new one; None when the run has ended."""
        with self._database.begin() as session:
            last = session.scalar(
                select(Round).where(Round.run_id == self._run_id).order_by(Round.number.desc()).limit(1)
            )
            if last is not None and last.state in (RoundState.OPEN, RoundState.STEPPED):
                return last
            number = 0 if last is None else last.number + 1
            if self._ended(session, number):
                return None
        return self._begin_round(number)

    def _ended(self, session: Session, number: int) -> bool:
        """Ends the run when its rounds are done, or when too many in a row were skipped."""
        limit = self._spec.limits.skipped_rounds
        recent = session.scalars(
            select(Round).where(Round.run_id == self._run_id).order_by(Round.number.desc()).limit(limit)
        ).all()
        run = self._run.running(session)
        if len(recent) == limit and all(round_.state is RoundState.SKIPPED for round_ in recent):
            why = f"{limit} rounds in a row were skipped; the last one: {recent[0].reason}"
            move_run(run, RunState.FAILED, self._around.clock(), why)
        elif number >= self._spec.rounds:
            move_run(run, RunState.COMPLETED, self._around.clock())
        else:
            return False
        audit.record(
            session,
            at=self._around.clock(),
            actor="coordinator",
            action=f"run.{run.state.lower()}",
            subject=self._run_id,
            detail=run.reason,
        )
        log.info("run %s: %s %s", self._run_id, run.state, run.reason)
        return True

    def _begin_round(self, number: int) -> Round:
        """Waits for the pool, selects, and records the selection before anybody is asked."""
        while True:
            complete = self._fleet.complete()  # asked first: a client that makes it complete must be in the pool
            with self._database.read() as session:
                run = session.get_one(Run, self._run_id)
                if run.state is not RunState.RUNNING:
                    raise Held
                missing = self._missing(session, complete)
            if missing != run.reason or not missing:  # only then is there anything to write
                with self._database.begin() as session:
                    run = self._run.running(session)
                    run.reason = missing = self._missing(session, complete)
                    if not missing:
                        begun = self._selected(session, run, number)
                        break
                log.info("run %s: %s", self._run_id, missing)
                self._around.changed()
            self._around.wait(None if complete else 1.0)
        log.info("run %s round %d: selected %s", self._run_id, number, ", ".join(begun.selected))
        return begun

    def _missing(self, session: Session, complete: bool) -> str:
        """Whom a round has to wait for; empty when it can begin."""
        ready, minimum = len(self._fleet.pool(session)), self._spec.selection.minimum
        if ready < minimum:
            return f"waiting for clients: {ready} of {minimum} are ready for {self._spec.task}"
        return "" if complete else "waiting for clients to come back after a restart"

    def _selected(self, session: Session, run: Run, number: int) -> Round:
        read_memory(session, self._run, self._around.evidence, number, None)
        rule, pool = self._spec.selection, self._fleet.pool(session)
        selected = selection.select(rule, pool, seed=self._spec.seed, round_number=number)
        begun = Round(
            run_id=self._run_id,
            number=number,
            state=RoundState.OPEN,
            base_model=run.model,
            selected=selected,
            wanted=min(len(selected), selection.wanted(rule, len(pool))),
            started=self._around.clock(),
        )
        session.add(begun)
        return begun
