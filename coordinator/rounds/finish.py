"""The end of a round: the new model is evaluated where the run says so, and what the round came to is recorded."""

import logging

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.phase_kinds import Evaluation
from coordinator.aggregation.phases import Replies
from coordinator.rounds import record
from coordinator.rounds.fleets.base import Fleet, Question, RunFacts, Surroundings, settled_pool
from coordinator.rounds.states import move_round
from storage.models import Round, RoundState

log = logging.getLogger(__name__)


class Finish:
    """Evaluates and completes rounds that have a step.

    Args:
        run: the run.
        around: the coordinator.
        fleet: the clients.
        algorithm: of the run.
    """

    def __init__(self, run: RunFacts, around: Surroundings, fleet: Fleet, algorithm: Algorithm) -> None:
        self._run = run
        self._spec = run.spec
        self._around = around
        self._fleet = fleet
        self._algorithm = algorithm

    def round(self, round_id: int) -> None:
        """Completes a round.

        Raises:
            Held: the run is not RUNNING.
        """
        with self._around.database.read() as session:
            current = session.get_one(Round, round_id)
        model, number = current.deployed_model, current.evaluation_phase
        if model is None or number is None:
            raise RuntimeError(f"round {current.number} of run {self._run.run_id} is STEPPED without a model")
        every = self._spec.evaluate.every
        last = current.number + 1 == self._spec.rounds
        replies: Replies | None = None
        if last or (every and (current.number + 1) % every == 0):
            pool = sorted(settled_pool(self._run, self._around, self._fleet))
            replies = self._fleet.ask(
                Question(
                    round_id=current.round_id,
                    round=current.number,
                    attempt=current.attempt,
                    number=number,
                    phase=Evaluation(splits=self._spec.evaluate.splits),
                    clients=pool,
                    wanted=len(pool),
                    base_model=model,
                )
            )
        self._complete(current, model, replies)

    def _complete(self, current: Round, model: str, replies: Replies | None) -> None:
        observed = {} if replies is None else self._fleet.observe(model)
        now = self._around.clock()
        with self._around.database.begin() as session:
            self._run.running(session)
            round_ = session.get_one(Round, current.round_id)
            if replies is not None:
                session.add_all(record.evaluations(current.round_id, model, replies, self._spec.evaluate.splits))
                scores = (
                    record.scores(replies, self._run.objectives)
                    | ({} if self._algorithm.averages else record.improved(session, current, replies))
                    | observed
                )
                round_.metrics = {**round_.metrics, **record.finite(scores)}
            round_.metrics = {**round_.metrics, **record.traffic(session, current.round_id)}
            move_round(round_, RoundState.COMPLETED, now)
        log.info("run %s round %d: completed", self._run.run_id, current.number)
