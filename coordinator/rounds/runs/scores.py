"""The members' measurements of a round's model: their record, and the value by which a run is stopped."""

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.phases import PhaseReply, Replies
from coordinator.rounds.fleets.base import RunFacts
from coordinator.rounds.runs import metrics
from coordinator.rounds.runs.metric_definitions import OWN, SCORED, SUMMARIES
from federation.refusals import Refusal
from federation.spec.run_spec import RunSpec
from federation.spec.task_metrics import BUILT_IN, MOST_VALUES, MetricKind, kind_of
from federation.work.evaluate.work import Evaluate
from storage import models
from storage.models import Assignment, Evaluation, Phase, Round, Run

Measurements = Mapping[str, float]  # of one member, as a reply names them


def evaluations(round_id: int, model: str, replies: Replies, evaluation: Evaluate) -> list[Evaluation]:
    """The measurements of every client, split by split, as rows of the database."""
    return [
        Evaluation(
            round_id=round_id,
            client_id=reply.client_id,
            model=model,
            split=split,
            loss=reply.metrics.get(f"{split}/loss"),
            accuracy=_accuracy(reply, split),
            others={
                f"{kind}/{name}": reply.metrics[f"{split}/{kind}/{name}"]
                for kind in ("loss", "accuracy")
                for name in reply.objectives
                if f"{split}/{kind}/{name}" in reply.metrics
            }
            | {name: value for kind in evaluation.metrics for name, value in _own(reply, split, kind).items()},
            samples=_samples(reply.metrics, split),
        )
        for reply in replies
        for split in evaluation.splits
    ]


def _samples(measured: Measurements, split: str) -> int:
    """The samples of a split that a client claims, a number of any size."""
    return int(min(max(measured.get(f"{split}/samples", 0.0), 0.0), 2.0**53))


def _own(reply: PhaseReply, split: str, kind: MetricKind) -> dict[str, float]:
    """The values of one of the task's metrics that a client claims, by name."""
    whole = f"{split}/{kind.name}"
    values = {
        name.removeprefix(f"{split}/"): value
        for name, value in reply.metrics.items()
        if name == whole or name.startswith(f"{whole}/")
    }
    return dict(sorted(values.items())[:MOST_VALUES])


def _accuracy(reply: PhaseReply, split: str, objective: str = "") -> float | None:
    """The accuracy that a client claims; None where it claims none, or one that is no share."""
    value = reply.metrics.get(f"{split}/accuracy/{objective}".removesuffix("/"), math.nan)
    return value if 0 <= value <= 1 else None


def scores(replies: Replies, names: tuple[str, ...], kinds: Sequence[MetricKind] = ()) -> dict[str, float]:
    """The metrics of the clients' accuracies, on the first of `SCORED` that was measured, and of their losses.

    Several objectives have their own metrics, and so do the metrics of the task.
    """
    numbers: dict[str, float] = {}
    several = _several(names)
    for split in SCORED:
        if values := _accuracies(replies, split):
            numbers |= metrics.accuracies(values)
            claims = [(reply, _accuracy(reply, split)) for reply in replies]
            shares = [(value, _samples(reply.metrics, split)) for reply, value in claims if value is not None]
            numbers["accuracy/weighted"] = weighted_mean(shares)
            for name in several:
                if claimed := _accuracies(_serving(replies, name), split, name):
                    numbers[f"accuracy/objective/{name}"] = float(np.mean(claimed))
            break
    for name in several:
        for split in SCORED:
            if values := _measured(_serving(replies, name), f"{split}/loss/{name}"):
                numbers[f"loss/{split}/{name}"] = float(np.mean(values))
    losses = {split: _measured(replies, f"{split}/loss") for split in SCORED}
    numbers |= {f"loss/{split}": float(np.mean(values)) for split, values in losses.items() if values}
    judged = next((values for values in losses.values() if values), [])
    if judged and "accuracy/mean" not in numbers:
        numbers |= {"loss/worst": max(judged), "loss/jain": metrics.jain(judged)}
    for kind in kinds:
        numbers |= _spread(replies, kind)
    numbers["evaluated"] = float(len(replies))
    return numbers


def _spread(replies: Replies, kind: MetricKind) -> dict[str, float]:
    """Mean, mean by samples, worst and best of a task's metric, on the first of `SCORED` that was measured."""
    for split in SCORED:
        claims: dict[str, list[tuple[float, int]]] = {}
        for reply in replies:
            for name, value in _own(reply, split, kind).items():
                claims.setdefault(name, []).append((value, _samples(reply.metrics, split)))
        if claims:
            # A client can claim any names: those that most clients claim are recorded.
            chosen = sorted(claims, key=lambda name: (-len(claims[name]), name))[:MOST_VALUES]
            return {
                f"{OWN}{name}/{of}": summary(claims[name], of, higher=kind.higher)
                for name in sorted(chosen)
                for of in SUMMARIES
            }
    return {}


def summary(claims: Sequence[tuple[float, int]], of: str, *, higher: bool) -> float:
    """Summarises the members' measurements: at least one pair of a value and its number of samples.

    `of` is one of `SUMMARIES`; `higher` is True if higher values are better.
    """
    values = [value for value, _ in claims]
    match of:
        case "mean":
            return float(np.mean(values))
        case "weighted":
            return weighted_mean(claims)
        case "worst":
            return min(values) if higher else max(values)
        case "best":
            return max(values) if higher else min(values)
    raise ValueError(f"no summary {of!r}")


def weighted_mean(claims: Sequence[tuple[float, int]]) -> float:
    """The mean of values weighted by samples; NaN without samples."""
    total = sum(samples for _, samples in claims)
    return math.fsum(value * (samples / total) for value, samples in claims) if total else math.nan


def scores_of_means(
    means: Mapping[str, float], members: int, names: tuple[str, ...], kinds: Sequence[MetricKind] = ()
) -> dict[str, float]:
    """The metrics that follow from means over the members alone, of a run with these objectives and metrics."""
    numbers = {f"loss/{split}": means[f"{split}/loss"] for split in SCORED if f"{split}/loss" in means}
    for split in SCORED:
        if f"{split}/accuracy" in means:
            numbers["accuracy/mean"] = means[f"{split}/accuracy"]
            several = {name: f"{split}/accuracy/{name}" for name in names}
            numbers |= {f"accuracy/objective/{name}": means[key] for name, key in several.items() if key in means}
            break
    for name in _several(names):
        for split in SCORED:
            if f"{split}/loss/{name}" in means:
                numbers[f"loss/{split}/{name}"] = means[f"{split}/loss/{name}"]
    for kind in kinds:
        measured = (f"{split}/{kind.name}" for split in SCORED if f"{split}/{kind.name}" in means)
        numbers |= {f"{OWN}{kind.name}/mean": means[name] for name in itertools.islice(measured, 1)}
    return {**numbers, "evaluated": float(members)}


def _accuracies(replies: Iterable[PhaseReply], split: str, objective: str = "") -> list[float]:
    """The accuracies that clients claim."""
    claims = (_accuracy(reply, split, objective) for reply in replies)
    return [claim for claim in claims if claim is not None]


def _several(names: tuple[str, ...]) -> tuple[str, ...]:
    """The objectives with metrics of their own: none where there is only one."""
    return names if len(names) > 1 else ()  # no mutant: != is the same, as there is at least one


def _serving(replies: Replies, objective: str) -> list[PhaseReply]:
    """The replies of clients that serve an objective; measurements of others do not count."""
    return [reply for reply in replies if objective in reply.objectives]


def _measured(replies: Iterable[PhaseReply], name: str) -> list[float]:
    return [reply.metrics[name] for reply in replies if name in reply.metrics]


def improved(session: Session, current: Round, replies: Replies) -> dict[str, float]:
    """The share of the round's participants whose training loss did not rise. A non-finite new loss counts as worse."""
    attempt = (Phase.round_id == current.round_id, Phase.attempt == current.attempt)
    earlier = session.scalars(
        select(models.Reply).join(Assignment).join(Phase).where(*attempt, Phase.decides, models.Reply.accepted)
    )
    name, count = "train/loss", "train/samples"
    before = {reply.client_id: reply.metrics[name] for reply in earlier if name in reply.metrics}
    after = {
        reply.client_id: reply.metrics.get(name, math.inf)
        for reply in replies
        if name in reply.metrics or reply.metrics.get(count, 0) > 0
    }
    share = metrics.improved(before, after, before)
    return {} if share is None else {"improved": share}


def watched(session: Session, current: Round, run: RunFacts, measured: Sequence[Measurements]) -> dict[str, float]:
    """The record of the value by which a run is stopped; empty if the run has none, or no member measured it.

    `stop/value` is the value, `stop/best` the best one so far, and `stop/since` the number of evaluations since the
    last one that counted as better (`stop.improvement`), 0 for such a one.
    """
    stop, kind = run.spec.stop, run.stopped_by
    name = f"{stop.split}/{stop.metric}"
    claims = [(numbers[name], _samples(numbers, stop.split)) for numbers in measured if name in numbers]
    if kind is None or not claims:
        return {}
    value = summary(claims, stop.of, higher=kind.higher)
    if not math.isfinite(value):  # a mean weighted by samples, and no member claims any
        return {}
    query = select(Round.metrics).where(Round.run_id == current.run_id, Round.number < current.number)
    earlier = session.scalars(query.order_by(Round.number))
    values = [*(numbers["stop/value"] for numbers in earlier if "stop/value" in numbers), value]
    sign = 1.0 if kind.higher else -1.0
    bar, since = sign * values[0], 0
    for latest in values[1:]:
        better = sign * latest > bar + stop.improvement
        bar, since = (sign * latest, 0) if better else (bar, since + 1)
    best = max(values) if kind.higher else min(values)
    return {"stop/value": value, "stop/best": best, "stop/since": float(since)}


def why_stopped(run: RunFacts, numbers: Mapping[str, float]) -> str:
    """The reason why a run ends after a round with these metrics; empty if it goes on."""
    stop, kind = run.spec.stop, run.stopped_by
    if kind is None or "stop/value" not in numbers:
        return ""
    value, since = numbers["stop/value"], int(numbers["stop/since"])
    watched_value = f"{stop.split} {stop.metric} ({stop.of})"
    if stop.target is not None and (value >= stop.target if kind.higher else value <= stop.target):
        return f"target reached: {watched_value} = {value:.6g}, target {stop.target:g}"
    if stop.patience and since >= stop.patience:
        return f"no better {watched_value} in {since} evaluations; the last one is {value:.6g}"
    return ""


def best_round(session: Session, run: Run, metric: str, of: str, split: str) -> tuple[int, float]:
    """The round with the best model by one metric, the first one of equals, and the value.

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
        shown = metric[:80]  # no mutant: any length that is easy to read
        raise Refusal("metric-unknown", f"run {run.run_id} has no metric {shown!r}; there are {names}")
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
            f"no model of run {run.run_id} has a {split} {metric} ({of}) on record; `fedpareto admin round "
            f"{run.run_id} -1` shows what was measured",
        )
    rounds, by_value = sorted(known_values.items()), operator.itemgetter(1)
    return max(rounds, key=by_value) if kind.higher else min(rounds, key=by_value)


def _means_on_record(session: Session, run: Run, metric: str, split: str) -> dict[int, float]:
    """The means of private evaluations, by round: of losses on each split, of others on the first of `SCORED`."""
    evaluated = RunSpec.parse(run.spec).evaluated
    if metric != "loss" and split != next((scored for scored in SCORED if scored in evaluated), ""):
        return {}
    name = {"loss": f"loss/{split}", "accuracy": "accuracy/mean"}.get(metric, f"{OWN}{metric}/mean")
    query = select(Round.number, Round.metrics).where(Round.run_id == run.run_id)
    return {number: numbers[name] for number, numbers in session.execute(query) if name in numbers}
