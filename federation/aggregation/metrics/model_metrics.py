"""The metrics of a model, from its members' measurements, each as its reply names them."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from federation.aggregation.metrics import metrics
from federation.aggregation.phases import PhaseReply, Replies
from federation.record.metric_definitions import OWN, SCORED, SUMMARIES
from federation.spec.run_sections import StopSpec
from federation.spec.task_metrics import MOST_VALUES, MetricKind

Measurements = Mapping[str, float]  # of one member, as a reply names them


def scores(replies: Replies, names: tuple[str, ...], kinds: Sequence[MetricKind] = ()) -> dict[str, float]:
    """The metrics of the clients' accuracies, on the first of `SCORED` that was measured, and of their losses.

    Several objectives have their own metrics, and so do the metrics of the task.
    """
    numbers: dict[str, float] = {}
    several = _several(names)
    for split in SCORED:
        if values := _accuracies(replies, split):
            numbers |= metrics.accuracies(values)
            claims = [(reply, claimed_accuracy(reply, split)) for reply in replies]
            shares = [(value, claimed_samples(reply.metrics, split)) for reply, value in claims if value is not None]
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
            for name, value in own_values(reply, split, kind).items():
                claims.setdefault(name, []).append((value, claimed_samples(reply.metrics, split)))
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


def claimed_samples(measured: Measurements, split: str) -> int:
    """The samples of a split that a client claims, a number of any size."""
    return int(min(max(measured.get(f"{split}/samples", 0.0), 0.0), 2.0**53))


def own_values(reply: PhaseReply, split: str, kind: MetricKind) -> dict[str, float]:
    """The values of one of the task's metrics that a client claims, by name."""
    whole = f"{split}/{kind.name}"
    values = {
        name.removeprefix(f"{split}/"): value
        for name, value in reply.metrics.items()
        if name == whole or name.startswith(f"{whole}/")
    }
    return dict(sorted(values.items())[:MOST_VALUES])


def claimed_accuracy(reply: PhaseReply, split: str, objective: str = "") -> float | None:
    """The accuracy that a client claims; None where it claims none."""
    return reply.metrics.get(f"{split}/accuracy/{objective}".removesuffix("/"))


def _accuracies(replies: Iterable[PhaseReply], split: str, objective: str = "") -> list[float]:
    """The accuracies that clients claim."""
    claims = (claimed_accuracy(reply, split, objective) for reply in replies)
    return [claim for claim in claims if claim is not None]


def _several(names: tuple[str, ...]) -> tuple[str, ...]:
    """The objectives with metrics of their own: none where there is only one."""
    return names if len(names) > 1 else ()  # no mutant: != is the same, as there is at least one


def _serving(replies: Replies, objective: str) -> list[PhaseReply]:
    """The replies of clients that serve an objective; measurements of others do not count."""
    return [reply for reply in replies if objective in reply.objectives]


def _measured(replies: Iterable[PhaseReply], name: str) -> list[float]:
    return [reply.metrics[name] for reply in replies if name in reply.metrics]


def improved(before: Iterable[tuple[str, Measurements]], replies: Iterable[PhaseReply]) -> dict[str, float]:
    """The share of the round's participants whose training loss did not rise. A non-finite new loss counts as worse.

    Args:
        before: the clients of the replies that the step depends on, with their measurements, phase by phase.
        replies: of the members that measured the new model.
    """
    name, count = "train/loss", "train/samples"
    earlier = {client: measured[name] for client, measured in before if name in measured}
    after = {
        reply.client_id: reply.metrics.get(name, math.inf)
        for reply in replies
        if name in reply.metrics or reply.metrics.get(count, 0) > 0
    }
    share = metrics.improved(earlier, after, earlier)
    return {} if share is None else {"improved": share}


def watched(
    stop: StopSpec, kind: MetricKind | None, measured: Iterable[Measurements], earlier: Iterable[float]
) -> dict[str, float]:
    """The record of the value by which a run is stopped; empty if the run has none, or no member measured it.

    `stop/value` is the value, `stop/best` the best one so far, and `stop/since` the number of evaluations since the
    last one that counted as better (`stop.improvement`), 0 for such a one.

    Args:
        stop: that section of the specification.
        kind: the metric by which the run is stopped; None if by none.
        measured: each member's measurements, or their means.
        earlier: `stop/value` of the rounds before, in their order.
    """
    name = f"{stop.split}/{stop.metric}"
    claims = [(numbers[name], claimed_samples(numbers, stop.split)) for numbers in measured if name in numbers]
    if kind is None or not claims:
        return {}
    value = summary(claims, stop.of, higher=kind.higher)
    if not math.isfinite(value):  # a mean weighted by samples, and no member claims any
        return {}
    values = [*earlier, value]
    sign = 1.0 if kind.higher else -1.0
    bar, since = sign * values[0], 0
    for latest in values[1:]:
        better = sign * latest > bar + stop.improvement
        bar, since = (sign * latest, 0) if better else (bar, since + 1)
    best = max(values) if kind.higher else min(values)
    return {"stop/value": value, "stop/best": best, "stop/since": float(since)}
