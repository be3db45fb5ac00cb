"""The end of a round: the new model is evaluated if the run asks for it, and the measurements are recorded."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import insert, select

from coordinator.rounds import signed_results
from coordinator.rounds.conversation import hold_evaluation
from coordinator.rounds.fleets.base import Fleet, RevokedMeanwhile, Skipped
from coordinator.rounds.runs import scores
from coordinator.rounds.transitions import ROUND_OVER, close_open_phases, move_round
from federation.aggregation.base import Algorithm
from federation.aggregation.metrics import model_metrics
from federation.aggregation.metrics.model_metrics import Measurements
from federation.aggregation.phase_kinds import EvaluationPhase
from federation.aggregation.phases import Voided, Waiting
from federation.record import log_entries
from storage import audit, models
from storage.states import RoundState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationFindings:
    """The results of the evaluation of a round's model.

    Attributes:
        metrics: of the round.
        measured: each member's measurements, or the means of all members, by the names of replies.
        evaluations: each member's values as columns of `evaluations`; empty in runs with private rounds.
        why_not: why there are no metrics, or why some are left out.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    measured: Sequence[Measurements] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    why_not: str = ""


def finish_round(fleet: Fleet, algorithm: Algorithm, round_id: int) -> None:
    """Evaluates the model of a round that has a step, where the run says so, and completes the round.

    Raises:
        Held: the run is not RUNNING.
    """
    spec = fleet.run.spec
    with fleet.context.database.read() as session:
        current = session.get_one(models.Round, round_id)
    model, phase = current.deployed_model, current.evaluation_phase
    if model is None or phase is None:  # no mutant: a step sets both
        raise RuntimeError(f"round {current.number} of run {fleet.run.run_id} is STEPPED without a model")
    findings = EvaluationFindings()
    if spec.evaluates_after(current.number):
        private = spec.privacy.secure != "off" and "evaluation" not in spec.privacy.disclose
        pool = sorted(fleet.settled_pool())
        if private:
            findings = evaluate_privately(fleet, current, model, phase, pool)
        else:
            findings = evaluate(fleet, algorithm, current, model, phase, pool)
    complete_round(fleet, current, findings)


def evaluate(
    fleet: Fleet, algorithm: Algorithm, current: models.Round, model: str, phase: int, pool: Sequence[str]
) -> EvaluationFindings:
    """Asks each member of the pool for its own measurements of the model."""
    evaluation = EvaluationPhase(splits=fleet.run.spec.evaluated, metrics=fleet.run.metrics)
    replies = fleet.ask(fleet.question(current, phase, evaluation, pool, len(pool), model))
    numbers = model_metrics.scores(replies, fleet.run.objectives, fleet.run.metrics)
    if not algorithm.averages:
        with fleet.context.database.read() as session:
            numbers |= scores.improved(session, current, replies)
    return EvaluationFindings(
        metrics=numbers | fleet.observe(model),
        measured=[reply.metrics for reply in replies],
        evaluations=scores.evaluations(current.round_id, model, replies, fleet.run.evaluation),
    )


def evaluate_privately(
    fleet: Fleet, current: models.Round, model: str, phase: int, pool: Sequence[str]
) -> EvaluationFindings:
    """Asks the members of the pool for the means of their measurements. A failure leaves the round without metrics.

    Members evaluate a model once. If the model has not changed since its evaluation, the earlier numbers count.
    """
    if (before := _evaluated_before(fleet, current, model)) is not None:
        stop, value = fleet.run.spec.stop, before.metrics.get("stop/value")
        stop_value = [] if value is None else [{f"{stop.split}/{stop.metric}": value}]
        why = f"evaluation: the model is that of round {before.number}; its numbers stand"
        return EvaluationFindings(metrics=fleet.observe(model), measured=stop_value, why_not=why)
    try:
        means = hold_evaluation(fleet, current, model, phase, pool)
    except (Skipped, Voided, Waiting) as error:
        return EvaluationFindings(metrics=fleet.observe(model), why_not=f"evaluation: {error}")
    except RevokedMeanwhile:
        return EvaluationFindings(metrics=fleet.observe(model), why_not="evaluation: a member of the round was revoked")
    numbers = model_metrics.scores_of_means(means.metrics, means.members, fleet.run.objectives, fleet.run.metrics)
    if means.noise:
        numbers["evaluation/noise"] = means.noise
    why = means.left_out and f"evaluation: {means.left_out}"
    return EvaluationFindings(metrics=numbers | fleet.observe(model), measured=[means.metrics], why_not=why)


def _evaluated_before(fleet: Fleet, current: models.Round, model: str) -> models.Round | None:
    """The last round before with the same model, if it was evaluated."""
    same = select(models.Round).where(
        models.Round.run_id == current.run_id,
        models.Round.number < current.number,
        models.Round.deployed_model == model,
    )
    with fleet.context.database.read() as session:
        rounds = session.scalars(same.order_by(models.Round.number.desc())).all()
    return next((round_ for round_ in rounds if "evaluated" in round_.metrics), None)


def complete_round(fleet: Fleet, current: models.Round, findings: EvaluationFindings) -> None:
    """Records the end of a round, and the results of the evaluation of its model."""
    with fleet.context.database.begin() as session:
        fleet.run.running(session)
        round_ = session.get_one(models.Round, current.round_id)
        stop = scores.watched(session, round_, fleet.run, findings.measured)
        if findings.evaluations:  # in one statement: the ORM would handle each row by itself
            session.connection().execute(insert(models.Evaluation), findings.evaluations)
        traffic = signed_results.traffic(session, current.round_id)
        round_.metrics = {**round_.metrics, **signed_results.finite({**findings.metrics, **stop}), **traffic}
        move_round(round_, RoundState.COMPLETED, fleet.context.clock(), findings.why_not)
    level = logging.WARNING if findings.why_not else logging.INFO
    log.log(level, "run %s round %d: completed %s", fleet.run.run_id, current.number, findings.why_not)


def skip_round(fleet: Fleet, current: models.Round, skipped: Skipped) -> None:
    """Records the end of a round without a step; a phase that was open before a restart is closed."""
    why = str(skipped)
    missing = {"required/missing": float(len(skipped.required))} if skipped.required else {}
    with fleet.context.database.begin() as session:
        fleet.run.running(session)
        round_ = session.get_one(models.Round, current.round_id)
        round_.metrics = {**missing, **signed_results.traffic(session, current.round_id)}
        now = fleet.context.clock()
        cancelled = close_open_phases(session, current.round_id, ROUND_OVER, now)
        move_round(round_, RoundState.SKIPPED, now, why)
        subject = f"{fleet.run.run_id}/{current.number}"
        audit.record(session, at=now, actor="coordinator", action=log_entries.SKIPPED, subject=subject, detail=why)
    fleet.tell_cancelled(cancelled)
    log.warning("run %s round %d: skipped: %s", fleet.run.run_id, current.number, why)
