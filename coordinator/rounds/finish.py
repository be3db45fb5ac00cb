"""The end of a round: the new model is evaluated where the run says so, and what was measured is recorded."""

import logging
from collections.abc import Sequence

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.phase_kinds import Evaluation
from coordinator.aggregation.phases import Replies, Voided, Waiting
from coordinator.rounds import record, scores
from coordinator.rounds.conversation import hold_evaluation
from coordinator.rounds.fleets.base import Fleet, Question, RevokedMeanwhile, Skipped
from coordinator.rounds.states import move_round
from storage.models import Round, RoundState

log = logging.getLogger(__name__)


def finish_round(fleet: Fleet, algorithm: Algorithm, round_id: int) -> None:
    """Evaluates the model of a round that has a step, and completes the round.

    Raises:
        Held: the run is not RUNNING.
    """
    spec = fleet.run.spec
    with fleet.around.database.read() as session:
        current = session.get_one(Round, round_id)
    model, phase = current.deployed_model, current.evaluation_phase
    if model is None or phase is None:
        raise RuntimeError(f"round {current.number} of run {fleet.run.run_id} is STEPPED without a model")
    replies: Replies | None = None
    over = current.number + 1
    last = over == spec.rounds  # no mutant: no round follows the last
    due = last or (spec.evaluate.every and over % spec.evaluate.every == 0)
    if due and spec.evaluated and not fleet.conceals:
        pool = sorted(fleet.settled_pool())
        if spec.privacy.secure != "off" and "evaluation" not in spec.privacy.disclose:
            complete_private_round(fleet, current, model, phase, pool)
            return
        evaluation = Evaluation(splits=spec.evaluated, metrics=fleet.run.metrics)
        replies = fleet.ask(
            Question(current=current, number=phase, phase=evaluation, clients=pool, wanted=len(pool), base_model=model)
        )
    complete_round(fleet, algorithm, current, model, replies)


def complete_private_round(fleet: Fleet, current: Round, model: str, phase: int, pool: Sequence[str]) -> None:
    """Records the end of a round whose model is evaluated without showing a member's own metrics.

    Where the evaluation fails, the round ends without its metrics, and says why.
    """
    found: dict[str, float] = {}
    measured: list[dict[str, float]] = []
    why = ""
    try:
        means = hold_evaluation(fleet, current, model, phase, pool)
        found = scores.scores_of_means(means.metrics, means.members, fleet.run.objectives, fleet.run.metrics)
        measured = [means.metrics]
    except (Skipped, Voided, Waiting) as error:
        why = f"evaluation: {error}"
    except RevokedMeanwhile:
        why = "evaluation: a member of the round was revoked"
    observed = fleet.observe(model)
    with fleet.around.database.begin() as session:
        fleet.run.running(session)
        round_ = session.get_one(Round, current.round_id)
        traffic = record.traffic(session, current.round_id)
        stop = scores.watched(session, round_, fleet.run, measured)
        round_.metrics = {**round_.metrics, **record.finite(found | observed | stop), **traffic}
        move_round(round_, RoundState.COMPLETED, fleet.around.clock(), why)
    level = logging.WARNING if why else logging.INFO
    log.log(level, "run %s round %d: completed %s", fleet.run.run_id, current.number, why)


def complete_round(fleet: Fleet, algorithm: Algorithm, current: Round, model: str, replies: Replies | None) -> None:
    """Records the end of a round, with the replies to the evaluation of its model where there was one."""
    observed = {} if replies is None else fleet.observe(model)
    with fleet.around.database.begin() as session:
        fleet.run.running(session)
        round_ = session.get_one(Round, current.round_id)
        if replies is not None:
            session.add_all(scores.evaluations(current.round_id, model, replies, fleet.run.evaluation))
            found = scores.scores(replies, fleet.run.objectives, fleet.run.metrics)
            found |= scores.watched(session, round_, fleet.run, [reply.metrics for reply in replies])
            better = {} if algorithm.averages else scores.improved(session, current, replies)
            round_.metrics = {**round_.metrics, **record.finite(found | better | observed)}
        round_.metrics = {**round_.metrics, **record.traffic(session, current.round_id)}
        move_round(round_, RoundState.COMPLETED, fleet.around.clock())
    log.info("run %s round %d: completed", fleet.run.run_id, current.number)


def skip_round(fleet: Fleet, current: Round, why: str) -> None:
    """Records the end of a round without a step."""
    with fleet.around.database.begin() as session:
        fleet.run.running(session)
        round_ = session.get_one(Round, current.round_id)
        round_.metrics = record.traffic(session, current.round_id)
        move_round(round_, RoundState.SKIPPED, fleet.around.clock(), why)
    log.warning("run %s round %d: skipped: %s", fleet.run.run_id, current.number, why)
