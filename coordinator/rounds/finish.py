"""The end of a round: the new model is evaluated if the run asks for it, and the measurements are recorded."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from coordinator.rounds import signed_results
from coordinator.rounds.conversation import describe_privately, hold_evaluation, measure, measure_privately
from coordinator.rounds.fleets.base import Fleet, RevokedMeanwhile, RunFacts, Skipped
from coordinator.rounds.runs import scores
from coordinator.rounds.runs.on_record import MODEL_EVALUATED, private_numbers
from coordinator.rounds.transitions import ROUND_OVER, close_open_phases, move_round
from federation.aggregation.metrics.round_metrics import RoundMetrics
from federation.aggregation.metrics.run_metrics import Earlier, RunMetrics
from federation.aggregation.phase_kinds import EvaluationPhase
from federation.aggregation.phases import Replies, Voided, Waiting
from federation.aggregation.secure.evaluation import Means
from federation.record import log_entries
from federation.statistics.data_columns import ColumnError
from federation.statistics.result import StatisticsResult, result
from federation.vectors import RowFile
from storage import audit, models
from storage.states import RoundState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluationFindings:
    """The results of the evaluation of a round's model.

    Attributes:
        metrics: of the model.
        evaluations: each member's values as columns of `evaluations`; empty in runs with private rounds.
        why_not: why there are no metrics, or why some are left out.
    """

    metrics: RoundMetrics = field(default_factory=RoundMetrics)
    evaluations: Sequence[Mapping[str, Any]] = ()
    why_not: str = ""


def finish_round(fleet: Fleet, metrics: RunMetrics, round_id: int) -> None:
    """Evaluates the model of a round that has a step, where the run says so, and completes the round.

    Raises:
        Held: the run is not RUNNING.
    """
    with fleet.context.database.read() as session:
        current = session.get_one(models.Round, round_id)
    if current.state is RoundState.COMPLETED:
        return  # with its step
    model, phase = current.deployed_model, current.evaluation_phase
    if model is None or phase is None:  # no mutant: a step sets both
        raise RuntimeError(f"round {current.number} of run {fleet.run.run_id} is STEPPED without a model")
    findings = EvaluationFindings()
    if fleet.run.spec.evaluates_after(current.number, conceals=fleet.conceals):
        pool = sorted(fleet.settled_pool())
        evaluates = evaluate_privately if metrics.evaluates_privately else evaluate
        findings = evaluates(fleet, metrics, current, model, phase, pool)
        observed = RoundMetrics.measured(fleet.observe(model))
        findings = replace(findings, metrics=findings.metrics | observed)
    complete_round(fleet, current, findings)


def completion(fleet: Fleet, current: models.Round) -> Callable[[Session, models.Round], object] | None:
    """Completes a round in the transaction that records its step; None if its model is evaluated first.

    Between the two, nothing is sent to anybody.
    """
    if fleet.run.spec.evaluates_after(current.number, conceals=fleet.conceals):
        return None
    return partial(_complete, fleet, findings=EvaluationFindings())


def measure_round(fleet: Fleet, metrics: RunMetrics, current: models.Round) -> None:
    """Measures the model of a round that makes no step, or describes the members' data, and completes the round.

    Raises:
        Held: the run is not RUNNING.
        Skipped: the model was not measured, or nothing was described.
    """
    if fleet.run.spec.describes:
        complete_round(fleet, current, EvaluationFindings(), _described(fleet, current))
        return
    if metrics.evaluates_privately:
        findings = _means(fleet, metrics, current)
    else:
        findings = _measured(fleet, metrics, current, current.base_model, measure(fleet, current))
    complete_round(fleet, current, findings)


def _means(fleet: Fleet, metrics: RunMetrics, current: models.Round) -> EvaluationFindings:
    """The means of the members' measurements of a model. Members measure a model once, so there is one attempt."""
    with fleet.context.database.read() as session:
        earlier = fleet.past.metrics(session, current.number)
        known = private_numbers(session, fleet.run.spec.task, current.base_model, but=current.run_id)
        begun = session.scalar(select(models.Phase.phase_id).filter_by(round_id=current.round_id).limit(1))
    # Who was away is not asked either: beside the sum on record, a second one shows the members in which they differ.
    if known and begun is None:
        raise Skipped(f"{MODEL_EVALUATED}: {known}")
    with _one_attempt("evaluation"):
        return _of_means(metrics, measure_privately(fleet, current), earlier)


@contextmanager
def _one_attempt(noun: str) -> Iterator[None]:
    """Raises Skipped for what would begin another attempt: members answer such a question once."""
    try:
        yield
    except (Voided, Waiting) as error:
        raise Skipped(f"{noun}: {error}") from error
    except RevokedMeanwhile:
        raise Skipped(f"{noun}: a member of the round was revoked") from None


def _described(fleet: Fleet, current: models.Round) -> tuple[StatisticsResult, Replies]:
    """What the members told of their data, and the replies that have it. Raises Skipped."""
    if fleet.run.spec.privacy.secure == "off":
        replies = measure(fleet, current)
        return described(fleet.run, replies), replies
    with _one_attempt("statistics"):
        found, total = describe_privately(fleet, current)
    return found, total.survivors


def _of_means(metrics: RunMetrics, means: Means, earlier: Earlier) -> EvaluationFindings:
    why = means.left_out and f"evaluation: {means.left_out}"
    return EvaluationFindings(metrics=metrics.of_means(means, earlier), why_not=why)


def described(run: RunFacts, replies: Replies) -> StatisticsResult:
    """What the members of a round that describes data have told. Raises Skipped: none of it can be used."""
    asked = run.spec.statistics
    rows = {reply.client_id: reply.rows[0] for reply in replies}
    told = {name: np.asarray(row.read() if isinstance(row, RowFile) else row).tobytes() for name, row in rows.items()}
    try:
        return result(told, asked.described, asked.bins, asked.splits)
    except ColumnError as error:
        raise Skipped(f"statistics: {error}") from None


def evaluate(
    fleet: Fleet, metrics: RunMetrics, current: models.Round, model: str, phase: int, pool: Sequence[str]
) -> EvaluationFindings:
    """Asks each member of the pool for its own measurements of the model."""
    evaluation = EvaluationPhase(splits=fleet.run.spec.evaluated, metrics=fleet.run.metrics)
    replies = fleet.ask(fleet.question(current, phase, evaluation, pool, len(pool), model))
    return _measured(fleet, metrics, current, model, replies)


def _measured(
    fleet: Fleet, metrics: RunMetrics, current: models.Round, model: str, replies: Replies
) -> EvaluationFindings:
    with fleet.context.database.read() as session:
        found = metrics.of_model(replies, scores.decided(session, current), fleet.past.metrics(session, current.number))
    return EvaluationFindings(
        metrics=found, evaluations=scores.evaluations(current.round_id, model, replies, fleet.run.evaluation)
    )


def evaluate_privately(
    fleet: Fleet, metrics: RunMetrics, current: models.Round, model: str, phase: int, pool: Sequence[str]
) -> EvaluationFindings:
    """Asks the members of the pool for the means of their measurements. A failure leaves the round without metrics.

    Members evaluate a model once. If the model has not changed since its evaluation, the earlier numbers count.
    """
    with fleet.context.database.read() as session:
        earlier = fleet.past.metrics(session, current.number)
    if not metrics.is_measured(current.number, model, earlier):
        return EvaluationFindings(
            metrics=metrics.of_same_model(current.number, model, earlier),
            why_not=f"evaluation: the model is that of round {earlier.measured[model].number}; its numbers stand",
        )
    try:
        means = hold_evaluation(fleet, current, model, phase, pool)
    except (Skipped, Voided, Waiting) as error:
        return EvaluationFindings(why_not=f"evaluation: {error}")
    except RevokedMeanwhile:
        return EvaluationFindings(why_not="evaluation: a member of the round was revoked")
    return _of_means(metrics, means, earlier)


def complete_round(
    fleet: Fleet,
    current: models.Round,
    findings: EvaluationFindings,
    statistics: tuple[StatisticsResult, Replies] | None = None,
) -> None:
    """Records the end of a round, and the results of the evaluation of its model, or the signed one about data."""
    with fleet.context.database.begin() as session:
        fleet.run.running(session)
        round_ = session.get_one(models.Round, current.round_id)
        now = _complete(fleet, session, round_, findings)
        if statistics is not None:
            signed_results.record_result(session, fleet, round_, *statistics, now)
        if fleet.run.spec.measures:
            round_.deployed_model = current.base_model
            subject, action = f"{fleet.run.run_id}/{current.number}", log_entries.MEASURED
            audit.record(
                session, at=now, actor="coordinator", action=action, subject=subject, digest=current.base_model
            )
    fleet.tell_ended(current, current.attempt)
    level = logging.WARNING if findings.why_not else logging.INFO
    log.log(level, "run %s round %d: completed %s", fleet.run.run_id, current.number, findings.why_not)


def _complete(fleet: Fleet, session: Session, round_: models.Round, findings: EvaluationFindings) -> datetime:
    """Completes a round in an open transaction; returns when."""
    if findings.evaluations:  # in one statement: the ORM would handle each row by itself
        session.connection().execute(insert(models.Evaluation), findings.evaluations)
    ended = findings.metrics | RunMetrics.of_traffic(*signed_results.traffic(session, round_.round_id))
    round_.metrics = round_.metrics | ended.numbers
    now = fleet.context.clock()
    move_round(round_, RoundState.COMPLETED, now, findings.why_not)
    return now


def skip_round(fleet: Fleet, metrics: RunMetrics, current: models.Round, skipped: Skipped) -> None:
    """Records the end of a round without a step; a phase that was open before a restart is closed."""
    why = str(skipped)
    with fleet.context.database.begin() as session:
        fleet.run.running(session)
        round_ = session.get_one(models.Round, current.round_id)
        traffic = metrics.of_traffic(*signed_results.traffic(session, current.round_id))
        round_.metrics = (metrics.of_skipped(len(skipped.required)) | traffic).numbers
        now = fleet.context.clock()
        cancelled = close_open_phases(session, current.round_id, ROUND_OVER, now)
        move_round(round_, RoundState.SKIPPED, now, why)
        subject = f"{fleet.run.run_id}/{current.number}"
        audit.record(session, at=now, actor="coordinator", action=log_entries.SKIPPED, subject=subject, detail=why)
    fleet.tell_cancelled(cancelled)
    fleet.tell_ended(current, current.attempt)
    log.warning("run %s round %d: skipped: %s", fleet.run.run_id, current.number, why)
