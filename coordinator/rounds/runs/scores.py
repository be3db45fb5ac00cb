"""The members' measurements of a round's model: their record, and the value by which a run is stopped."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.base import RunFacts
from federation.aggregation.metrics.model_metrics import (
    Measurements,
    claimed_accuracy,
    claimed_samples,
    own_values,
    summary,
)
from federation.aggregation.phases import Replies
from federation.record.metric_definitions import OWN, SCORED
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import BUILT_IN, best_round_of, kind_of
from federation.text import did_you_mean
from federation.work.evaluate.work import Evaluate
from storage import models
from storage.models import Assignment, Evaluation, Phase, Round, Run


def evaluations(round_id: int, model: str, replies: Replies, evaluation: Evaluate) -> list[dict[str, Any]]:
    """The measurements of every client, split by split, as columns of `evaluations`."""
    return [
        {
            "round_id": round_id,
            "client_id": reply.client_id,
            "model": model,
            "split": split,
            "loss": reply.metrics.get(f"{split}/loss"),
            "accuracy": claimed_accuracy(reply, split),
            "others": {
                f"{kind}/{name}": reply.metrics[f"{split}/{kind}/{name}"]
                for kind in ("loss", "accuracy")
                for name in reply.objectives
                if f"{split}/{kind}/{name}" in reply.metrics
            }
            | {name: value for kind in evaluation.metrics for name, value in own_values(reply, split, kind).items()},
            "samples": claimed_samples(reply.metrics, split),
        }
        for reply in replies
        for split in evaluation.splits
    ]


def decided(session: Session, current: Round) -> list[tuple[str, Measurements]]:
    """The measurements in the replies on which the step of a round depends, with their clients, phase by phase."""
    attempt = (Phase.round_id == current.round_id, Phase.attempt == current.attempt)
    query = select(models.Reply).join(Assignment).join(Phase).where(*attempt, Phase.decides, models.Reply.accepted)
    return [(reply.client_id, reply.metrics) for reply in session.scalars(query.order_by(Phase.number))]


def why_stopped(run: RunFacts, numbers: Mapping[str, float]) -> str:
    """The reason why a run ends after a round with these metrics; empty if it goes on."""
    return run.spec.stop.reached(run.stopped_by, numbers)


class BestRound(NamedTuple):
    """The round with the best model of a run by one metric, its value, and the number of rounds with this value."""

    number: int
    value: float
    equals: int


def best_round(session: Session, run: Run, metric: str, of: str, split: str) -> BestRound:
    """The round with the best model by one metric; of equals see `best_round_of`, by the mean loss on this split.

    Args:
        session: reads the record.
        run: the run.
        metric: "accuracy", "loss" or one of the task's, with "/KEY" if it has several values.
        of: "mean", "weighted" or "worst" of the members' values, or a member by name; empty is "mean".
        split: "train", "validation" or "test"; empty is "validation".

    Raises:
        Refusal: `metric-unknown`: no model was measured so.
    """
    of, split = of or "mean", split or "validation"
    kind = kind_of(metric, run.metrics)
    if kind is None:
        names = ", ".join(kind.name for kind in (*BUILT_IN, *run.metrics))
        near = did_you_mean(metric, [kind.name for kind in (*BUILT_IN, *run.metrics)])
        shown = metric[:80]  # no mutant: any length that is easy to read
        raise Refusal("metric-unknown", f"run {run.run_id} has no metric {shown!r}{near or ';'} there are {names}")
    of_member = of not in ("mean", "weighted", "worst")
    claims: dict[int, list[tuple[float, int]]] = {}
    query = select(Round.number, Evaluation).join(Round, Round.round_id == Evaluation.round_id)
    for number, row in session.execute(query.where(Round.run_id == run.run_id, Evaluation.split == split)):
        value = {"loss": row.loss, "accuracy": row.accuracy, **row.others}.get(metric)
        if value is not None and (not of_member or row.client_id == of):
            claims.setdefault(number, []).append((value, row.samples))
    chosen = "mean" if of_member else of  # of one member, the mean is its value
    values = {number: summary(round_claims, chosen, higher=kind.higher) for number, round_claims in claims.items()}
    if not values and of == "mean":
        values = _means_on_record(session, run, metric, split)
    known_values = {number: value for number, value in values.items() if math.isfinite(value)}
    if not known_values:
        raise Refusal(
            "metric-unknown",
            f"no model of run {run.run_id} has a {split} {metric} ({of}) on record: its specification, [evaluate] and "
            "[privacy], says what is measured and shown",
        )
    losses = _on_record(session, run, f"loss/{split}")
    number, equals = best_round_of(known_values, losses, higher=kind.higher)
    return BestRound(number, known_values[number], equals)


def _means_on_record(session: Session, run: Run, metric: str, split: str) -> dict[int, float]:
    """The means of private evaluations, by round: of losses on each split, of others on the first of `SCORED`."""
    evaluated = RunSpec.parse(run.spec).evaluated
    if metric != "loss" and split != next((scored for scored in SCORED if scored in evaluated), ""):
        return {}
    name = {"loss": f"loss/{split}", "accuracy": "accuracy/mean"}.get(metric, f"{OWN}{metric}/mean")
    return _on_record(session, run, name)


def _on_record(session: Session, run: Run, name: str) -> dict[int, float]:
    """A metric of the run's rounds, by round."""
    query = select(Round.number, Round.metrics).where(Round.run_id == run.run_id)
    return {number: numbers[name] for number, numbers in session.execute(query) if name in numbers}
